"""Beginning, continuing and ending a run in one process: full disks, lost texts, chosen steps, gaps
in what was measured.
"""

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from lrattnres.config.checks import resolve
from lrattnres.data.errors import DataError
from lrattnres.entry import REFUSED, attempt
from lrattnres.report.read import read_run
from lrattnres.runs import files, folder
from lrattnres.runs.checkpoint import Checkpoints
from lrattnres.runs.metrics import MetricsFile
from lrattnres.training.run import train
from lrattnres.training.signals import STOPPED
from tests.config.test_config import composed

SIZE = ("steps=8", "optimizer.warmup=2", "evaluation.every=null", "checkpoint.every=2")


@pytest.fixture
def command(tiny_run, texts, tmp_path):
    """command(*changes): trains in this process, over texts of its own that may be taken away;
    whether it finished.
    """
    own = tmp_path / "texts"
    shutil.copytree(texts, own)

    def run(*changes: str) -> bool:
        settings = tiny_run(*SIZE, f"data.root={own}", "checkpoint.keep_last=9", *changes)
        return train(*resolve(composed(*settings)))[1]

    return run


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_chosen_step_names_the_later_checkpoints_and_keeps_them(
    command, tmp_path: Path, capsys, monkeypatch
) -> None:
    assert command()
    run = tmp_path / "runs" / "run"
    before = (run / "metrics.jsonl").read_bytes().splitlines()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*_: object) -> None:
        raise full

    with monkeypatch.context() as disk:
        disk.setattr(torch, "save", refuse)
        code, _ = attempt(lambda: command("resume=4"))
    said = capsys.readouterr()
    assert code == 3 and "No space left" in said.err
    assert "resume=4: the checkpoints of steps 6, 8 are set aside" in said.out
    assert Checkpoints(run / "checkpoints").at(8).step == 8  # still there, as nothing new is
    assert command("resume=4")
    assert kept(run) == [f"step_{step:06d}" for step in (2, 4, 6, 8)]
    again = (run / "metrics.jsonl").read_bytes().splitlines()
    assert (
        before[:4] == again[:4]
        and len(again) == 8
        and MetricsFile.gaps(run / "metrics.jsonl") == []
    )


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda lines: lines[:2], "ends at step 2; the records up to step 6 are missing"),
        (
            lambda lines: lines[:3] + lines[4:],
            "line 4 (step 5): it was changed, or lines before it",
        ),
        (
            lambda lines: [line.replace(b'"tokens": 7', b'"tokens": 6') for line in lines],
            "line 3 (step 3): it was changed",
        ),
    ],
    ids=["cut", "a line gone", "a bit flipped"],
)
def test_a_gap_in_the_metrics_is_said(command, tmp_path: Path, capsys, damage, says: str) -> None:
    assert command()
    run, metrics = tmp_path / "runs" / "run", tmp_path / "runs" / "run" / "metrics.jsonl"
    assert not read_run(run).errors
    whole = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(damage(whole)))
    if len(damage(whole)) != 2:
        (error,) = read_run(run).errors
        assert says in error
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step_000008")
    if len(damage(whole)) == 2:  # as the checkpoint knows
        (error,) = read_run(run).errors
        assert says in error
    capsys.readouterr()
    assert command()
    assert says in capsys.readouterr().out
    assert MetricsFile.read(metrics)[-1]["step"] == 8


def test_the_last_record_is_not_made_up(command, tmp_path: Path, capsys) -> None:
    assert command()
    run = tmp_path / "runs" / "run"
    (run / "summary.json").unlink()
    whole = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(whole[:-1]))
    assert attempt(command)[0] == REFUSED
    assert "the record of step 8 is missing" in capsys.readouterr().err
    assert command("resume=6")


def test_a_finished_run_needs_no_texts(command, tmp_path: Path, capsys) -> None:
    assert command()
    shutil.rmtree(tmp_path / "texts")
    capsys.readouterr()
    assert command()
    said = capsys.readouterr().out
    assert "finished at step 8, held-out loss" in said and "no such file or folder" in said
    for changes in (["resume=6"], ["seed=3"]):
        with pytest.raises(DataError, match="no such file or folder"):
            command(*changes)
    (tmp_path / "runs" / "run" / "summary.json").unlink()
    with pytest.raises(DataError, match="no such file or folder"):
        command()


@pytest.mark.parametrize(
    "file",
    [".lock", "config.yaml", "record_choices"],
)
def test_a_full_disk_refuses_a_new_run(
    command, tmp_path: Path, capsys, monkeypatch, file: str
) -> None:
    """Whichever file of the run folder is the first that does not fit."""
    write, opened, count = files.write_atomic, Path.open, iter(range(99))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refusing(path: Path, content: str | bytes) -> None:
        if path.name == file or (
            file == "record_choices" and path.name == "environment.json" and next(count) == 1
        ):
            raise full
        write(path, content)

    def refusing_lock(path: Path, *arguments, **options):
        if path.name == file:
            raise full
        return opened(path, *arguments, **options)

    monkeypatch.setattr(folder, "write_atomic", refusing)
    monkeypatch.setattr(Path, "open", refusing_lock)
    assert attempt(command)[0] == REFUSED
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "runs/run" in line and "No space left on device" in line


def test_a_full_disk_refuses_a_continuation(command, tmp_path: Path, capsys, monkeypatch) -> None:
    assert command()
    (tmp_path / "runs" / "run" / "summary.json").unlink()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lrattnres.runs.metrics.write_atomic", refuse)
    assert attempt(command)[0] == REFUSED
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(folder.RunFolder, "finish", refuse)
    assert attempt(command)[0] == 3
    assert "its summary cannot be written" in capsys.readouterr().err
    monkeypatch.undo()
    assert command() and json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())


@pytest.mark.parametrize("runs", ["x" * 300, "file/runs", "link"])
def test_a_place_that_cannot_hold_runs(command, tmp_path: Path, capsys, runs: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert attempt(lambda: command(f"runs={tmp_path}/{runs}"))[0] == REFUSED
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(
        f"refused: {tmp_path}/{runs}/run: cannot be used as a run folder: [Errno"
    )


def test_a_job_that_is_stopped_before_it_trains_is_requeued(
    command, capsys, monkeypatch, tmp_path: Path
) -> None:
    def signalled(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(5)

    monkeypatch.setattr("lrattnres.training.run._open_data", signalled)
    monkeypatch.setattr("lrattnres.training.run.requeue", lambda: "4711")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert attempt(lambda: command("cluster.requeue=true"))[0] == STOPPED
    said = capsys.readouterr()
    assert "SLURM job 4711 is in the queue again" in said.out
    assert said.err.startswith("SIGUSR1: stopped outside of training")
    assert not (tmp_path / "runs").exists()
