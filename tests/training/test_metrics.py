"""metrics.jsonl under kills and cuts, what a person sees, and W&B without key or network."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from omegaconf import OmegaConf

from lrattnres.config import LoggerConfig, LoggerName, parse
from lrattnres.entry import REFUSED, attempt
from lrattnres.runs.folder import RunFolder
from lrattnres.runs.metrics import MetricsError, MetricsFile
from lrattnres.training import sinks
from lrattnres.training.progress import ProgressBar
from lrattnres.training.sinks import NullSink, WandbSink, build_sink, run_id
from tests import programs
from tests.programs import Program

CONFIGS = Path(__file__).parents[2] / "configs" / "logger"


def filled(path: Path, steps: int) -> bytes:
    metrics = MetricsFile(path)
    for step in range(1, steps + 1):
        metrics.write({"step": step, "loss": 1 / step, "norms": [0.1 * step, 2.0]})
    metrics.close()
    return path.read_bytes()


def chained_crc(content: bytes) -> list[int]:
    """What the page says of `crc`, from the objects alone."""
    found, before = [], 0
    for line in content.splitlines():
        record = json.loads(line)
        del record["crc"]
        before = zlib.crc32(json.dumps(record, ensure_ascii=False).encode(), before)
        found.append(before)
    return found


# --- metrics.jsonl --------------------------------------------------------------------------------


def test_records_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": 0.1 + 0.2, "mfu": None},
        {"step": 1, "val_loss": 5e-324, "text": "ä\n"},
    ]
    for number, record in enumerate(records, start=1):
        metrics.write(record)
        assert len(path.read_bytes().splitlines()) == number  # at once, not when it is closed
    assert MetricsFile.read(path) == records
    metrics.write({"step": 2, "loss": float("nan"), "norms": [float("-inf")]})
    assert json.loads(path.read_text().splitlines()[-1]) == {
        "step": 2,
        "loss": "nan",
        "norms": ["-inf"],
        "crc": f"{chained_crc(path.read_bytes())[-1]:08x}",
    }
    last = MetricsFile.read(path)[-1]
    assert last["loss"] != last["loss"] and last["norms"] == [-float("inf")]


def test_every_cut_loses_one_record_at_most(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content, records = filled(path, 3), MetricsFile.read(path)
    second = content.index(b"\n") + 1
    for length in range(second, len(content) + 1):
        path.write_bytes(content[:length])
        whole = records[: content[:length].count(b"\n")]
        assert MetricsFile.read(path) == whole
        metrics = MetricsFile(path)
        metrics.write({"step": 9})
        metrics.close()
        assert MetricsFile.read(path) == [*whole, {"step": 9}]


def test_rewinding(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content = filled(path, 5)
    path.write_bytes(content + b'{"step": 6, "lo')
    metrics = MetricsFile(path)
    metrics.rewind(3)
    assert path.read_bytes() == b"".join(content.splitlines(keepends=True)[:3])
    metrics.write({"step": 4})
    metrics.rewind(3)
    metrics.write({"step": 5})
    assert [record["step"] for record in MetricsFile.read(path)] == [1, 2, 3, 5]
    MetricsFile(tmp_path / "none").rewind(3)
    assert not (tmp_path / "none").exists()


def lacking(content: bytes, number: int) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(lines[:number] + lines[number + 1 :])


@pytest.mark.parametrize("step", range(1, 6))
def test_a_missing_line_is_said(tmp_path: Path, step: int) -> None:
    path = tmp_path / "metrics.jsonl"
    content = filled(path, 5)
    assert MetricsFile.gaps(path) == []
    path.write_bytes(lacking(content, step - 1))
    gaps = MetricsFile.gaps(path)
    assert len(gaps) == (step < 5) and all(f"line {step} (step {step + 1})" in gap for gap in gaps)
    assert (
        len(MetricsFile(path).rewind(5, last=5)) == 1
    )  # the last one too, where its step is known
    metrics = MetricsFile(path)  # what is written afterwards is whole again
    metrics.write({"step": 6})
    assert MetricsFile.gaps(path) == gaps and MetricsFile(path).rewind(step - 1) == []


def test_no_flipped_bit_goes_unseen(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content, records = filled(path, 3), MetricsFile.read(path)
    for place in range(len(content)):
        for bit in range(7):
            flipped = bytes([content[place] ^ 1 << bit])
            path.write_bytes(content[:place] + flipped + content[place + 1 :])
            try:
                said = MetricsFile.gaps(path) or len(MetricsFile.read(path)) == 2  # torn at the end
            except MetricsError:
                continue
            assert said or MetricsFile.read(path) == records, (place, bit)


def test_lines_of_earlier_versions_have_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    metrics = MetricsFile(path)
    metrics.write({"step": 3})
    metrics.write({"step": 4})
    assert [record["step"] for record in MetricsFile.read(path)] == [1, 2, 3, 4]
    assert MetricsFile.gaps(path) == []


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"",
        b"[1]",
        b'{"loss": 1}',
        b'{"step": 1.5}',
        b'{"step": true}',
        b'{"step": 2, "x": NaN}',
        b"\0\0",
    ],
)
def test_any_other_fault_is_named_and_nothing_is_dropped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    first, second = filled(path, 2).splitlines(keepends=True)
    content = first + line + b"\n" + second
    path.write_bytes(content)
    for fails in (lambda: MetricsFile.read(path), lambda: MetricsFile(path).rewind(1)):
        with pytest.raises(MetricsError, match=r"metrics\.jsonl, line 2"):
            fails()
    assert path.read_bytes() == content
    assert attempt(lambda: bool(MetricsFile.read(path)))[0] == REFUSED


def test_records_that_are_none(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    records: tuple[dict[str, Any], ...] = (
        {"loss": 1.0},
        {"step": 1.0},
        {"step": True},
        {"step": 1, "loss": object()},
    )
    for record in records:
        with pytest.raises(MetricsError, match="step"):
            metrics.write(record)
    assert not (tmp_path / "metrics.jsonl").exists()


KILLED = """
import sys
from pathlib import Path
from lrattnres.runs.metrics import MetricsFile
metrics, step = MetricsFile(Path(sys.argv[1])), 0
while True:
    step += 1
    metrics.write({"step": step, "loss": [1 / step] * 5000})
"""


def test_killed_while_writing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for round in range(1, 4):
        process = Program(["-c", KILLED, path])
        size = path.stat().st_size if path.exists() else 0
        deadline = time.monotonic() + 20
        while not path.exists() or path.stat().st_size < size + 1_000_000:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert [record["step"] for record in MetricsFile.read(path)].count(1) == round


FULL = """
import resource, sys
from pathlib import Path
from lrattnres.runs.metrics import MetricsFile
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
metrics = MetricsFile(Path(sys.argv[1]))
for step in range(100):
    try:
        metrics.write({"step": step, "text": "x" * 80})
    except OSError as fault:
        print(fault)
        break
"""


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """The system takes only a part of the last line, as it does when the disk is full."""
    path = tmp_path / "metrics.jsonl"
    run = programs.run("-c", FULL, path)
    assert run.returncode == 0, run.stderr
    assert str(path) in run.stdout and path.read_bytes().endswith(b"}\n")
    assert [record["step"] for record in MetricsFile.read(path)] == list(
        range(len(path.read_bytes().splitlines()))
    )


# --- progress -------------------------------------------------------------------------------------

RECORD = {
    "loss": 3.14159,
    "lr_muon": 0.01,
    "lr_adam": 0.003,
    "tokens_per_second": 12345.6,
    "mfu": 0.417,
    "batch_hash": "ab",
}


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(
        "lrattnres.training.progress.time", SimpleNamespace(monotonic=lambda: clock[0])
    )
    stream = io.StringIO()
    progress = ProgressBar(200, 40, stream=stream)
    progress.update(50, {})
    clock[0] = 200.0  # 20 of the 160 steps that were left took 100 seconds, so 140 take 700
    progress.update(60, RECORD)
    progress.update(60, RECORD)  # too soon after a line to be one
    progress.note("saved")
    progress.update(60, {"val_loss": float("nan"), "mfu": None})
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step  60/200, loss 3.1416, muon 1.0e-02, adam 3.0e-03, 12,346 tokens/s, MFU 41.7%, 11:40 "
        "left",
        "saved",
        "step  60/200, held-out loss nan, 11:40 left",
    ]


def on_terminal(columns: int) -> str:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    with os.fdopen(theirs, "w") as terminal:
        progress = ProgressBar(200, 40, stream=terminal)
        progress.update(60, RECORD)
        progress.note("saved")
        progress.close()
        shown = ""
        while select.select([ours], [], [], 0.5)[0]:  # a terminal hands its text over in parts
            shown += os.read(ours, 65536).decode()
    os.close(ours)
    return shown


def test_a_bar_on_a_terminal() -> None:
    shown = on_terminal(150)
    assert "60/200" in shown and "loss 3.1416" in shown and "MFU 41.7%" in shown and "30%" in shown
    assert re.search(r"\rsaved\r?\n", shown)
    assert re.match(r"step  60/200, loss 3.1416.*\nsaved\r\n$", on_terminal(0), re.DOTALL)


# --- sinks ----------------------------------------------------------------------------------------


def test_the_shipped_choices() -> None:
    names = {
        path.stem: parse(LoggerConfig, OmegaConf.to_container(OmegaConf.load(path))).name
        for path in CONFIGS.iterdir()
    }  # type: ignore[arg-type]
    assert names == {name.name: name for name in LoggerName} and set(sinks.SINKS) == set(LoggerName)


def test_none(tmp_path: Path) -> None:
    sink = build_sink(LoggerConfig(), RunFolder(tmp_path), {}, pytest.fail)
    sink.write({"step": 1})
    sink.close()
    assert isinstance(sink, NullSink) and not list(tmp_path.iterdir())


REAL = """
import sys, time
from pathlib import Path
from lrattnres.config import LoggerConfig, LoggerName
from lrattnres.training import sinks
from lrattnres.runs.folder import RunFolder
sinks.PATIENCE = 2.0
notes = open(sys.argv[2], "w")
begin = time.monotonic()
run, say = RunFolder(Path(sys.argv[1])), lambda text: print(text, file=notes)
sink = sinks.build_sink(LoggerConfig(LoggerName.wandb), run, {"seed": 0}, say)
for step in (1, 2, 2, 3):
    sink.write({"step": step, "loss": float("nan"), "norms": [1.0, 2.0]})
sink.close()
print(time.monotonic() - begin, file=notes)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, "no API key was found"),
        (
            {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},
            "connection refused|deadline",
        ),
    ],
)
def test_the_real_library_without_key_or_network(
    tmp_path: Path, environment: dict[str, str], reason: str
) -> None:
    """On a terminal, where it could ask for a key: it asks nothing, prints nothing, and records
    offline.
    """
    pytest.importorskip("wandb")
    run, notes = tmp_path / "demo", tmp_path / "notes"
    run.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", REAL, str(run), str(notes)],
        env=kept | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")} | environment,
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    assert process.wait(30) == 0
    os.set_blocking(ours, False)
    with pytest.raises(BlockingIOError):
        raise AssertionError(f"printed {os.read(ours, 65536).decode()!r}")
    os.close(ours)
    os.close(theirs)
    note, seconds = notes.read_text().splitlines()
    assert re.fullmatch(
        rf"W&B records offline in {run}/wandb \(.*({reason}).*\); `wandb sync` .*", note
    ), note
    assert float(seconds) < 12
    (recorded,) = run.glob("wandb/offline-run-*/*.wandb")
    assert recorded.stat().st_size > 500


class Flaky:
    """As much of the library as the sink uses; whatever is named in `broken` raises."""

    class Settings:
        model_fields: ClassVar[dict[str, Any]] = {}

    def __init__(self, *broken: str):
        self.broken = broken
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **options: Any) -> Any:
            self.calls.append((name, options))
            if name in self.broken:
                raise RuntimeError(f"{name} is broken\nwith a long explanation")
            return self

        return call


@pytest.mark.parametrize("broken", ["setup", "login", "define_metric", "log", "finish"])
def test_no_failure_of_the_library_reaches_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    library, notes = Flaky(broken), list[str]()
    monkeypatch.setitem(sys.modules, "wandb", library)
    sink = WandbSink(LoggerConfig(LoggerName.wandb), RunFolder(tmp_path), {}, notes.append)
    for step in (1, 2, 3):
        sink.write({"step": step})
    sink.close()
    sink.close()
    assert (
        len(notes) == 1
        and f"{broken} is broken." in notes[0]
        and "metrics.jsonl has everything" in notes[0]
    )


def test_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setitem(sys.modules, "wandb", None)
    sink = WandbSink(LoggerConfig(LoggerName.wandb), RunFolder(tmp_path), {}, notes.append)
    sink.write({"step": 1})
    assert len(notes) == 1 and "pip install lrattnres[wandb]" in notes[0]


def test_a_continued_run_goes_on_and_a_new_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Flaky()
    monkeypatch.setitem(sys.modules, "wandb", library)
    run = RunFolder(tmp_path)
    ids = []
    for starts in (["monday"], ["monday", "tuesday"], ["wednesday"]):
        run.environment_path.write_text(json.dumps({"starts": [{"time": time} for time in starts]}))
        WandbSink(LoggerConfig(LoggerName.wandb), run, {}, pytest.fail).close()
        (options,) = [options for name, options in library.calls if name == "init"]
        library.calls.clear()
        assert options["resume"] == "allow" and options["id"] == run_id(run)
        ids.append(options["id"])
    assert ids[0] == ids[1] != ids[2]
