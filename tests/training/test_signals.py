"""A signal at any moment is a stop: while the imports run, before training, inside a sweep, and
after it.
"""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lrattnres.config import ConfigError
from lrattnres.entry import MemberFailed, attempt, leave, take_part
from lrattnres.runs import sweep
from lrattnres.training.signals import STOPPED, Stopped, StopRequest
from tests.paths import ROOT

SIGNALS = list(StopRequest.SIGNALS)


def received(number: signal.Signals) -> bool:
    os.kill(os.getpid(), number)
    time.sleep(5)
    raise AssertionError(f"{number.name} went unheard")


def states(runs: Path) -> dict[str, str]:
    with (runs / "sweep.csv").open(newline="") as file:
        return {row["name"]: row["state"] for row in csv.DictReader(file)}


@pytest.mark.parametrize("number", SIGNALS)
def test_outside_of_training(number: signal.Signals, capsys) -> None:
    before = [signal.getsignal(other) for other in SIGNALS]
    code, error = attempt(lambda: received(number))
    assert code == STOPPED and isinstance(error, Stopped)
    assert capsys.readouterr().err.startswith(f"{number.name}: stopped outside of training")
    assert [signal.getsignal(other) for other in SIGNALS] == before
    with pytest.raises(SystemExit) as left:
        leave(lambda: received(number))
    assert left.value.code == STOPPED


def test_errors_are_not_taken_for_a_stop_nor_a_stop_for_an_error() -> None:
    def swallowing() -> bool:
        try:
            return received(signal.SIGTERM)
        except Exception:
            return True

    assert attempt(swallowing)[0] == STOPPED
    assert attempt(lambda: bool(1 / 0))[0] == 1 and attempt(lambda: True)[0] == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_inside_a_sweep(tmp_path: Path, number: signal.Signals) -> None:
    take_part(tmp_path / "a", lambda: True)
    with pytest.raises(SystemExit) as left:
        take_part(tmp_path / "b", lambda: received(number))
    assert left.value.code == STOPPED
    assert states(tmp_path) == {"a": "finished", "b": "stopped"}
    assert not (tmp_path / "b" / "failure.txt").exists()


@pytest.mark.parametrize("state", ["running", "finished"])
def test_while_the_state_of_a_run_is_written(tmp_path: Path, monkeypatch, state: str) -> None:
    write = sweep.write_atomic

    def signalled(path: Path, content: str) -> None:
        if path.name == "status.json" and f'"{state}"' in content:
            os.kill(os.getpid(), signal.SIGTERM)
        write(path, content)

    monkeypatch.setattr(sweep, "write_atomic", signalled)
    with pytest.raises(SystemExit) as left:
        take_part(tmp_path / "a", lambda: True)
    assert left.value.code == STOPPED
    assert states(tmp_path) == {"a": "stopped" if state == "running" else "finished"}


def test_the_outer_one_knows_what_the_inner_one_heard() -> None:
    with StopRequest(at_once=True) as outer:
        with StopRequest() as inner:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)
        assert inner.number == outer.number == signal.SIGUSR1
        os.kill(
            os.getpid(), signal.SIGTERM
        )  # SLURM sends it after SIGUSR1: it interrupts no requeue
        time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):  # who cannot wait presses Ctrl-C twice
            received(signal.SIGINT)


def test_while_torch_is_imported() -> None:
    """From the moment on at which Python itself hears signals, long before the run does."""
    command = [sys.executable, str(ROOT / "train.py"), "experiment=demo"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    status, deadline = Path(f"/proc/{process.pid}/status"), time.monotonic() + 30
    while True:
        caught = next(line for line in status.read_text().splitlines() if line[:7] == "SigCgt:")
        if int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1:
            break
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == STOPPED, said
    assert said == "SIGTERM: stopped before anything was done; the same command starts it\n"


def test_a_state_that_cannot_be_written_is_a_refusal(tmp_path: Path, capsys) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(MemberFailed, match="exit code 2"):
        take_part(tmp_path / "runs" / "a", lambda: True)
    said = capsys.readouterr().err
    assert "refused: " in said and "Not a directory" in said and "Traceback" not in said


def test_a_refusal_inside_a_sweep_keeps_its_reason(tmp_path: Path) -> None:
    def refuse() -> bool:
        raise ConfigError(["steps=0: must be at least 1"])

    with pytest.raises(MemberFailed):
        take_part(tmp_path / "a", refuse)
    (row,) = sweep.statuses(tmp_path)
    assert (row["state"], row["fault"]) == ("refused", "- steps=0: must be at least 1")
