"""Sweeps and SLURM: what is kept of each run, what would be submitted, and what a signal does inside a job."""

import csv
import os
import signal
from pathlib import Path

import pytest

from lrattnres.entry import folder_name
from lrattnres.runs.sweep import STATES, statuses, write_status
from lrattnres.training.signals import requeue
from tests import programs
from tests.paths import ROOT
from tests.programs import ENVIRONMENT
from tests.test_cli import run, start, wait_for_step


def rows(runs: Path) -> dict[str, dict[str, str]]:
    with (runs / "sweep.csv").open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def test_a_sweep_goes_on_after_failures_and_tells_what_became_of_each_run(
    tiny_run, tmp_path: Path
) -> None:
    settings = [
        setting
        for setting in tiny_run("steps=10", "evaluation.every=null")
        if setting != "name=run"
    ]
    settings = [setting for setting in settings if not setting.startswith("model.rank")]
    sweep = ("-m", *settings, "max_bad_steps=2", "model.rank=99,2", "optimizer.muon_lr=1e30,0.01")
    output = run("train.py", *sweep, code=1)
    assert "Traceback" not in output and "Error executing" not in output
    assert output.count("see failure.txt there, and sweep.csv beside it") == 3
    found, runs = rows(tmp_path / "runs"), tmp_path / "runs"
    assert sorted(row["state"] for row in found.values()) == [
        "failed",
        "finished",
        "refused",
        "refused",
    ], output
    for name, row in found.items():
        failure = runs / name / "failure.txt"
        assert failure.exists() == (row["state"] != "finished")
        if row["state"] == "failed":
            assert "2 steps in a row" in row["fault"] and "TrainingError" in failure.read_text()
        elif row["state"] == "refused":
            assert "model.rank=99" in row["fault"] and "ConfigError" in failure.read_text()
        else:
            assert float(row["val_loss"]) > 0 and row["step"] == "10"
            finished = (runs / name / "metrics.jsonl").stat().st_mtime_ns
    shown = programs.run(ROOT / "scripts" / "sweep_status.py", runs)
    assert shown.returncode == 1 and "2 refused" in shown.stdout and "1 finished" in shown.stdout

    run("train.py", *sweep, code=1)  # the finished one is left alone
    (name,) = (name for name, row in rows(runs).items() if row["state"] == "finished")
    assert (runs / name / "metrics.jsonl").stat().st_mtime_ns == finished


def test_a_status_follows_its_run(tmp_path: Path) -> None:
    write_status(tmp_path / "b", "running")
    write_status(tmp_path / "a", "failed", ValueError("first\nsecond"))
    assert [(row["name"], row["state"], row["fault"]) for row in statuses(tmp_path)] == [
        ("a", "failed", "first"), ("b", "running", None),
    ]  # fmt: skip
    assert "ValueError: first\nsecond" in (tmp_path / "a" / "failure.txt").read_text()
    write_status(tmp_path / "a", "finished")
    assert (
        rows(tmp_path)["a"]["state"] == "finished" and not (tmp_path / "a" / "failure.txt").exists()
    )
    with pytest.raises(AssertionError):
        write_status(tmp_path / "a", "well")
    assert len(set(STATES)) == 5


def test_names_of_folders_stay_apart_when_they_are_cut() -> None:
    assert folder_name("a b=c") == "a_b=c"
    for letter in "x数é𝒳":
        long = [folder_name("y" + letter * n + end) for n in (36, 130, 200) for end in "ab"]
        assert len(set(long)) == len(long)
        for name in long:
            assert len(os.fsencode(name)) <= 150 and "\ufffd" not in name


def test_what_would_be_submitted_is_printed(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    script = ROOT / "scripts" / "submission.py"
    settings = [
        "model.residual=baseline,s_lr",
        "seed=0,1",
        "hydra.launcher.partition=gpu",
        f"runs={tmp_path}/runs",
    ]
    environment = ENVIRONMENT | {"PATH": "/usr/bin:/bin"}
    shown = programs.run(script, *settings, env=environment, cwd=tmp_path, timeout=120)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    wanted = [
        "array=0-3%4",
        "partition=gpu",
        "nodes=1",
        "gpus-per-node=8",
        "ntasks-per-node=8",
        "signal=USR1@120",
        "requeue",
    ]
    assert all(f"#SBATCH --{word}" in lines for word in wanted), shown.stdout
    assert [line for line in lines if line.startswith("3: ")] == [
        f"3: python train.py model.residual=s_lr seed=1 runs={tmp_path}/runs cluster=slurm"
    ]
    assert lines[-1] == "4 jobs, none of them submitted" and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_sweep_runs_as_slurm_jobs_of_two_ranks(tiny_run, tmp_path: Path, monkeypatch) -> None:
    """Through submitit as it is; only the commands of SLURM itself are stood in for (tests/slurm)."""
    pytest.importorskip("submitit")
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{ROOT}/tests/slurm:{os.environ['PATH']}")
    monkeypatch.setitem(ENVIRONMENT, "FAKE_SLURM", str(tmp_path))
    monkeypatch.setitem(ENVIRONMENT, "GLOO_SOCKET_IFNAME", "lo")
    settings = [
        setting
        for setting in tiny_run("steps=10", "evaluation.every=null", "seed=0,1")
        if setting != "name=run"
    ]
    run(
        "train.py",
        "-m",
        *settings,
        "cluster=slurm",
        "hydra.launcher.gpus_per_node=null",
        "hydra.launcher.tasks_per_node=2",
    )
    assert [row["state"] for row in rows(tmp_path / "runs").values()] == ["finished", "finished"]
    logs = [path.read_text() for path in (tmp_path / "runs" / ".submitit").rglob("*_log.out")]
    assert len(logs) == 4 and sum("parallel fsdp, ranks 2" in log for log in logs) == 2


def test_slurm_without_a_sweep_is_refused() -> None:
    output = run("train.py", "experiment=demo", "cluster=slurm", code=2)
    assert "cluster=slurm" in output and "train.py -m" in output


def test_a_signal_in_a_slurm_job_saves_requeues_and_the_job_goes_on(
    tiny_run, tmp_path: Path, monkeypatch
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.txt\n')
    (commands / "scontrol").chmod(0o755)
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setitem(ENVIRONMENT, "SLURM_JOB_ID", "4711")
    settings = tiny_run(
        "checkpoint.every=1000", "steps=150", "evaluation.every=null", "cluster.requeue=true"
    )
    folder = tmp_path / "runs" / "run"
    process = start("train.py", *settings)
    wait_for_step(process, folder / "metrics.jsonl", 3)
    process.send_signal(signal.SIGUSR1)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75 and "SLURM job 4711 is in the queue again" in output, output
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 4711\n"
    output = run("train.py", *settings)  # what SLURM does next
    assert "continuing from step" in output and "finished at step 150" in output


def test_a_refused_requeue_says_what_slurm_said(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho slurm_load_jobs error >&2\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with pytest.raises(
        RuntimeError, match=r"`scontrol requeue 4711` failed: slurm_load_jobs error"
    ):
        requeue()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(RuntimeError, match="scontrol"):
        requeue()
