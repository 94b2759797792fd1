"""The SLURM script of docs/scaling.md, as it stands there: two nodes over gloo, pre-empted, requeued, continued."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lrattnres.runs.checkpoint import Checkpoints
from lrattnres.runs.metrics import MetricsFile
from tests.distributed.test_training_cli import ENVIRONMENT, assert_same_course
from tests.paths import ROOT
from tests.test_cli import run


def page_script() -> str:
    (script,) = re.findall(
        r"```bash\n(#!/bin/bash\n.*?)```", (ROOT / "docs" / "scaling.md").read_text(), re.DOTALL
    )
    return script


class Allocation:
    """One start of a batch job, by a stand-in for SLURM: its variables, `srun` and `scontrol` (tests/slurm)."""

    def __init__(self, folder: Path, ranks: int, number: int, restarts: int, *settings: str):
        script = folder / "job.sh"
        script.write_text(page_script())
        nodes = re.search(
            r"^#SBATCH --nodes=(\d+) --ntasks-per-node=1 ", script.read_text(), re.MULTILINE
        )
        assert nodes is not None
        names = {
            "SLURM_JOB_ID": number, "SLURM_NNODES": nodes[1], "SLURM_GPUS_ON_NODE": ranks, "FAKE_TASKS": 1,
            "SLURM_JOB_NODELIST": ",".join(["localhost"] * int(nodes[1])), "FAKE_SLURM": folder,
            "PATH": f"{ROOT}/tests/slurm:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        names |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
        environment = ENVIRONMENT | {name: str(value) for name, value in names.items()}
        self._srun, self._log = folder / "srun.pid", folder / f"job{restarts}.txt"
        self._srun.unlink(missing_ok=True)
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", script, *settings],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def until_step(self, metrics: Path, step: int) -> None:
        deadline = time.monotonic() + 150
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
            assert time.monotonic() < deadline and self.process.poll() is None, self.output
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """As SLURM sends it: to the tasks of the job step, not to the script."""
        os.kill(int(self._srun.read_text()), number)

    def ends(self) -> int:
        try:
            return self.process.wait(150)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            pytest.fail(self.output)


def free_number() -> int:
    """Of a job for which the script chooses a port that nobody uses."""
    for number in range(os.getpid() % 10_000, 10_000):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", 20_000 + number))
            return number
    pytest.fail("every port from 20000 to 29999 is in use")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_of_the_page_survives_its_preemption(
    tiny_run, tmp_path: Path, ranks: int
) -> None:
    settings = [
        word
        for word in tiny_run("checkpoint.every=1000", "steps=60", "evaluation.every=null")
        if word != "name=run"
    ]
    run("train.py", *settings, "name=straight")
    folder, number = tmp_path / "runs" / "job", free_number()

    first = Allocation(tmp_path, ranks, number, 0, *settings, "name=job")
    first.until_step(folder / "metrics.jsonl", 8)
    first.signal(signal.SIGUSR1)
    assert first.ends() != 0
    assert first.output.count("SIGUSR1: saved at step") == 1, first.output
    assert (
        f"SLURM job {number} is in the queue again" in first.output
        and "Traceback" not in first.output.split("SIGUSR1")[0]
    )
    assert (tmp_path / "scontrol.txt").read_text() == f"requeue {number}\n"
    (step,) = Checkpoints(folder / "checkpoints").steps()
    assert 8 <= step < 60 and MetricsFile.read(folder / "metrics.jsonl")[-1]["step"] == step

    again = Allocation(tmp_path, ranks, number, 1, *settings, "name=job")  # what SLURM does next
    assert again.ends() == 0, again.output
    assert f"ranks {2 * ranks}" in again.output and f"continuing from step {step}" in again.output
    assert_same_course(tmp_path / "runs" / "straight", folder)


def test_the_script_of_the_page_is_one_that_bash_can_read() -> None:
    assert subprocess.run(["bash", "-n"], input=page_script(), text=True).returncode == 0
