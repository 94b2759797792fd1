"""`torchrun … train.py …` as a user starts it: killed, signalled, stopped, continued on other
numbers of ranks.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lrattnres.runs.checkpoint import Checkpoints
from lrattnres.runs.metrics import MetricsFile
from tests import programs
from tests.paths import ROOT
from tests.programs import Program

ENVIRONMENT = programs.ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"}
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]


class Job:
    """One `torchrun` (or, for one rank, plain Python) in a session of its own: nothing of it
    outlives the test.
    """

    def __init__(self, ranks: int, output: Path, *arguments: str, script: str = "train.py"):
        self.output = output
        launcher = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks > 1 else []
        with output.open("w") as file:
            self.process = Program(
                [*launcher, ROOT / script, *arguments],
                **{"stdout": file, "stderr": subprocess.STDOUT},
                env=ENVIRONMENT,
                new_session=True,
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        workers = self.workers()
        for pid in [self.process.pid, *workers.values()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def workers(self) -> dict[int, int]:
        """rank -> process."""
        found = {}
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}").glob("children"):
            for pid in map(int, child.read_text().split()):
                try:
                    environment = dict(
                        line.partition("=")[::2]
                        for line in Path(f"/proc/{pid}/environ").read_text().split("\0")
                    )
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if "RANK" in environment:
                    found[int(environment["RANK"])] = pid
        return found

    def ends(self, limit: float = 120) -> tuple[int, str]:
        """(exit code, everything printed)."""
        code = self.process.wait(limit)
        return code, self.output.read_text()

    def until_step(self, metrics: Path, step: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= step:
                return
            time.sleep(0.002)
        pytest.fail(f"step {step} was not seen:\n{self.output.read_text()}")


@pytest.fixture
def start(tmp_path: Path):
    """start(ranks, *settings): a Job with the output in a file of its own."""
    count = iter(range(1000))
    return lambda ranks, *settings, **options: Job(
        ranks, tmp_path / f"output{next(count)}.txt", *settings, **options
    )


def finish(job: Job, code: int = 0) -> str:
    with job:
        found, output = job.ends()
    assert found == code, output
    return output


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in MetricsFile.read(folder / "metrics.jsonl")]


def assert_same_course(one: Path, other: Path) -> None:
    """Nothing lost, nothing repeated, the same batches, and the same losses to the rounding of a
    sum.
    """
    expected, found = (MetricsFile.read(folder / "metrics.jsonl") for folder in (one, other))
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    assert [record["batch_hash"] for record in found] == [
        record["batch_hash"] for record in expected
    ]
    assert [record["tokens"] for record in found] == [record["tokens"] for record in expected]
    assert losses(other) == pytest.approx(losses(one), rel=1e-4)
    assert found[-1]["val_loss"] == pytest.approx(expected[-1]["val_loss"], rel=1e-4)


@pytest.mark.slow
def test_a_run_moves_from_one_rank_to_two_to_four_and_back(tiny_run, start, tmp_path: Path) -> None:
    settings = tiny_run(
        "checkpoint.every=4", "checkpoint.asynchronous=true", "steps=24", "evaluation.every=null"
    )
    finish(start(1, *settings, "name=straight"))
    folder = tmp_path / "runs" / "moved"
    for ranks, step in ((1, 9), (2, 15), (4, 20)):
        with start(ranks, *settings, "name=moved") as job:
            job.until_step(folder / "metrics.jsonl", step)
            os.kill(
                random.choice(list(job.workers().values()) if ranks > 1 else [job.process.pid]),
                signal.SIGKILL,
            )
            code, output = job.ends()
        assert code != 0 and ("continuing from step" in output) == (step != 9), output
    assert "continuing from step" in finish(start(1, *settings, "name=moved"))
    assert_same_course(tmp_path / "runs" / "straight", folder)
    output = finish(start(2, f"run={folder}", "threads=1", "diagnostics=true", script="eval.py"))
    assert output.count("held-out loss") == 1


def test_a_killed_rank_ends_the_job_and_is_named(tiny_run, start, tmp_path: Path) -> None:
    settings = tiny_run("checkpoint.every=4", "steps=4000")
    with start(2, *settings) as job:
        job.until_step(tmp_path / "runs" / "run" / "metrics.jsonl", 6)
        begin = time.monotonic()
        os.kill(job.workers()[1], signal.SIGKILL)
        code, output = job.ends(60)
        assert time.monotonic() - begin < 45
    assert (
        code != 0
        and "broken off: rank 1 (in step" in output
        and "Traceback" not in output.split("broken off")[0]
    ), output


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_and_named(tiny_run, start, tmp_path: Path) -> None:
    settings = tiny_run("checkpoint.every=4", "steps=4000", "parallel.timeout=10")
    with start(2, *settings) as job:
        job.until_step(tmp_path / "runs" / "run" / "metrics.jsonl", 6)
        begin = time.monotonic()
        os.kill(job.workers()[0], signal.SIGSTOP)
        code, output = job.ends(100)
        assert time.monotonic() - begin < 75
    assert code != 0 and "broken off: rank 0 (in step" in output, output


@pytest.mark.parametrize("to", ["rank 1", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_signal_to_one_stops_all_at_the_same_step(
    tiny_run, start, tmp_path: Path, to: str
) -> None:
    settings = tiny_run("checkpoint.every=1000", "steps=4000", "evaluation.every=null")
    folder = tmp_path / "runs" / "run"
    with start(2, *settings) as job:
        job.until_step(folder / "metrics.jsonl", 5)
        os.kill(job.workers()[1] if to == "rank 1" else job.process.pid, signal.SIGTERM)
        code, output = job.ends()
    assert code != 0 and output.count("SIGTERM: saved at step") == 1, output
    (step,) = Checkpoints(folder / "checkpoints").steps()
    assert MetricsFile.read(folder / "metrics.jsonl")[-1]["step"] == step


@pytest.mark.slow
def test_twenty_kills_lose_and_repeat_nothing(tiny_run, start, tmp_path: Path) -> None:
    settings = tiny_run(
        "checkpoint.every=3", "steps=900", "evaluation.every=null", "instruments.depth=null"
    )
    finish(start(2, *settings, "name=straight"))
    folder, choose, kills = tmp_path / "runs" / "cut", random.Random(5), 0
    while kills < 20:
        with start(2, *settings, "name=cut") as job:
            seen = len(losses(folder)) if (folder / "metrics.jsonl").exists() else 0
            early = choose.random() < 0.3  # while it starts and reads its checkpoint
            if not early:
                job.until_step(folder / "metrics.jsonl", seen + 1)
            while not (workers := job.workers()):
                time.sleep(0.01)
            time.sleep(choose.uniform(0, 5.0 if early else 0.3))
            os.kill(choose.choice(list(workers.values())), signal.SIGKILL)
            assert job.ends()[0] != 0
            kills += 1
    finish(start(2, *settings, "name=cut"))
    assert_same_course(tmp_path / "runs" / "straight", folder)
