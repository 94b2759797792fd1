"""What one rank meets, all decide together: faults of data, steps that are not finite, and what
they agree on at all.
"""

import math
import os
import time
from types import SimpleNamespace

import pytest
import torch

from lrattnres.config import Compile, ConfigError
from lrattnres.config.checks import resolve
from lrattnres.data.dataset import Dataset
from lrattnres.data.errors import DataError
from lrattnres.distributed.ranks import PATIENCE, RankError, Ranks, start_ranks
from lrattnres.evaluation.diagnostics import diagnose
from lrattnres.evaluation.heldout import evaluate
from lrattnres.runs.checkpoint import CheckpointError
from lrattnres.training.run import train
from lrattnres.training.signals import Stopped
from lrattnres.training.trainer import TrainingError
from tests.config.test_config import composed
from tests.distributed.launch import launch
from tests.distributed.test_training import build, whole


def agree(rank: int) -> None:
    ranks = start_ranks("cpu", 30.0)
    assert (ranks.rank, ranks.world, ranks.local, ranks.first) == (rank, 3, rank, rank == 0)
    assert (
        int(ranks.sum(torch.tensor(2**62 + rank))) == 3 * 2**62 + 3 - 2**64
    )  # wraps, as hashes need it
    assert ranks.largest(torch.tensor([rank, -rank])).tolist() == [2, 0]
    assert ranks.gather(torch.tensor([rank, 7])).tolist() == [[0, 7], [1, 7], [2, 7]]
    assert ranks.of_first(lambda: f"from {rank}") == "from 0"
    with pytest.raises(
        ValueError if rank == 1 else RankError, match="^mine" if rank == 1 else "^rank 1: mine"
    ):
        ranks.all_succeed(lambda: fail() if rank == 1 else rank)
    with pytest.raises(ValueError if rank == 0 else RankError):
        ranks.of_first(fail)
    with pytest.raises((OSError, ValueError, RankError)) as first:  # of two, the first counts
        ranks.all_succeed(lambda: {1: fail_otherwise, 2: fail}.get(rank, int)())
    assert ranks.words(first.value) == "rank 1: first" and (rank == 1) == (first.type is OSError)
    with pytest.raises(CheckpointError, match=r"^the same words$"):
        ranks.apart(30.0).collect(lambda: share() if rank == 2 else rank)
    assert ranks.collect(lambda: {"rank": rank}) == [{"rank": other} for other in range(3)]
    for interrupt in (Stopped("SIGTERM"), KeyboardInterrupt()):
        told = RankError if rank != 1 and type(interrupt) is KeyboardInterrupt else type(interrupt)
        with pytest.raises(told, match=r"SIGTERM|KeyboardInterrupt|^$"):
            ranks.all_succeed(lambda: interrupted(interrupt) if rank == 1 else rank)  # noqa: B023
    assert ranks.liveness.lost() is None


def prepare(rank: int) -> None:
    ranks = start_ranks("cpu", 2.0)
    assert ranks.apart(PATIENCE).all_succeed(lambda: time.sleep(4.0 * rank) or rank) == rank
    with pytest.raises(ValueError if rank == 1 else RankError):
        ranks.apart(PATIENCE).all_succeed(lambda: fail() if rank == 1 else rank)


def test_preparing_may_take_longer_than_an_answer() -> None:
    launch(prepare, 2, group=False)


def fail() -> int:
    raise ValueError("mine")


def fail_otherwise() -> int:
    raise OSError("first")


def share() -> int:
    raise CheckpointError("the same words")


def interrupted(interrupt: BaseException) -> int:
    raise interrupt


def test_ranks_agree() -> None:
    launch(agree, 3, group=False)


def one_rank_overflows(rank: int, settings: list[str]) -> None:
    trainer = build(settings)
    trainer.train_step()
    before = {name: tensor.clone() for name, tensor in trainer.state()["model"].items()}
    hook = trainer.model.head.register_forward_pre_hook(
        lambda module, given: (given[0] * (math.inf if rank == 1 else 1), *given[1:])
    )
    trainer.train_step()
    assert (trainer.progress.step, trainer.progress.bad_steps, trainer.progress.bad_in_a_row) == (
        2,
        1,
        1,
    )
    assert all(
        torch.equal(whole(before[name]), whole(tensor))
        for name, tensor in trainer.state()["model"].items()
    )
    hook.remove()
    trainer.train_step()
    assert (trainer.progress.bad_steps, trainer.progress.bad_in_a_row) == (1, 0)


def test_a_step_that_is_not_finite_on_one_rank_is_left_out_by_all(tiny_run) -> None:
    launch(one_rank_overflows, 2, tiny_run(), group=False)


def data_end_on_one(rank: int, settings: list[str]) -> tuple[list[torch.Tensor], str]:
    """What each rank saves as its place in the data, two whole batches on, and how it ends."""
    trainer = build(settings)
    straight = trainer.dataset.streams(trainer.ranks.rank, trainer.ranks.world)
    for _ in range(2):
        straight.next_batch()
    saved: list[torch.Tensor] = []
    trainer.save = lambda: saved.append(trainer.streams.state())
    trainer.checkpoints = SimpleNamespace(wait=lambda: None)
    next_batch, count = trainer.streams.next_batch, iter(range(100))

    def short() -> torch.Tensor:
        if rank == 1 and next(count) == 2:
            raise DataError("the texts end here")
        return next_batch()

    trainer.streams.next_batch = short
    with pytest.raises((DataError, RankError)) as fault:
        trainer.fit()
    assert trainer.progress.step == 2
    return [*saved, straight.state()], f"{fault.type.__name__}: {fault.value}"


def test_the_end_of_data_on_one_rank_ends_all_at_the_same_step(tiny_run) -> None:
    settings = tiny_run("evaluation.every=null", "checkpoint.every=1000")
    (first, one), (second, other) = launch(data_end_on_one, 2, settings, group=False)
    assert one == "RankError: rank 1: the texts end here"
    assert other.startswith("UnreadableError: the texts end here") and "saved at step 2" in other
    for saved, straight in (
        first,
        second,
    ):  # rank 0 had its part of the third batch, which is not to be lost
        assert torch.equal(saved, straight)


def disk_is_full(rank: int, settings: list[str]) -> str:
    trainer = build(settings)

    def write(record: dict) -> None:
        if rank == 0 and record["step"] == 3:
            raise OSError("no space left")

    waited: list[int] = []  # for a save that may be on its way
    trainer.write, trainer.checkpoints = (
        write,
        SimpleNamespace(wait=lambda: waited.append(trainer.progress.step)),
    )
    with pytest.raises((TrainingError, RankError)) as fault:
        trainer.fit()
    assert trainer.progress.step == 3 and waited == [3]
    return str(fault.value)


def test_metrics_that_cannot_be_written_end_all_ranks_at_the_same_step(tiny_run) -> None:
    first, other = launch(disk_is_full, 2, tiny_run("evaluation.every=null"), group=False)
    assert first == "the metrics of step 3 cannot be written: no space left"
    assert other == f"rank 0: {first}"


def started_differently(rank: int, settings: list[str], kind: str) -> None:
    changes = {"settings": [f"steps={40 + rank}", f"threads={1 + rank}"], "texts": []}[kind]
    if kind == "texts" and rank == 2:
        Dataset.identity = property(lambda dataset: {"corpus": "other"})  # type: ignore[assignment]
    expected = {
        "settings": r"steps=40 on rank 0, 41 on rank 1: start all",
        "texts": r"corpus=.* on rank 0, other on rank 2: all",
    }
    with pytest.raises(
        ConfigError if rank == 0 else RankError,
        match=expected[kind] if rank == 0 else f"(?s)^rank 0: .*{expected[kind]}",
    ) as fault:
        train(*resolve(composed(*settings, *changes)))
    assert "threads" not in str(fault.value)


@pytest.mark.parametrize(
    ("kind", "world"), [("settings", 2), pytest.param("texts", 3, marks=pytest.mark.slow)]
)
def test_ranks_that_would_train_different_runs_are_refused(
    tiny_run, tmp_path, kind: str, world: int
) -> None:
    launch(started_differently, world, tiny_run("global_batch=12"), kind, group=False, limit=120)
    assert not (tmp_path / "runs").exists()


def measure(
    rank: int, settings: list[str], ranks: Ranks | None = None
) -> tuple[float, int, int, dict]:
    """Of a model that is whole on each rank, as `eval.py` has it."""
    trainer = build(settings) if ranks else alone(settings)
    ranks = ranks or start_ranks("cpu", 30.0)
    dataset, model = trainer.dataset, trainer.model
    found = evaluate(
        model, dataset.held_out_windows(500, 3), dataset.tokenizer, documents=True, ranks=ranks
    )
    windows = dataset.held_out_windows(500, 3)
    depth = diagnose(model, windows, dataset.tokenizer.separator, documents=True, ranks=ranks)
    return found.loss, found.tokens, found.bytes, depth


def alone(settings: list[str]) -> SimpleNamespace:
    """The same model without a mesh, whatever the environment says."""
    names = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    trainer = build(settings)
    os.environ.update(names)
    start_ranks.cache_clear()
    return SimpleNamespace(dataset=trainer.dataset, model=trainer.model)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_evaluation_gives_one_number_for_any_number_of_ranks(tiny_run, world: int) -> None:
    expected = measure(0, tiny_run(), Ranks())
    for found in launch(measure, world, tiny_run(), group=False):
        assert found == expected


def diagnose_in_training(rank: int, settings: list[str]) -> dict:
    """Of a model whose weights lie in shards; 500 tokens are two batches of 16 windows, and so one
    round of two ranks.
    """
    trainer = build(settings)
    trainer.write_diagnostics = lambda step, diagnostics: found.append((step, diagnostics))
    found: list[tuple[int, dict]] = []
    trainer.fit()
    return {
        "found": found,
        "mean": trainer.mean_grad_norm,
        "norms": [record["grad_norm"] for record in trainer.records],
    }


def test_diagnostics_in_training_are_those_of_one_process(tiny_run) -> None:
    settings = tiny_run(
        "steps=3",
        "optimizer.warmup=1",
        "evaluation.diagnostics_every=2",
        "evaluation.diagnostics_tokens=530",
    )
    (expected,) = launch(diagnose_in_training, 1, settings, group=False)
    assert [step for step, _ in expected["found"]] == [2, 3] and expected["found"][1][1][
        "tokens"
    ] == 530
    assert expected["mean"] == pytest.approx(sum(expected["norms"]) / 3, rel=1e-12)
    for found in launch(diagnose_in_training, 2, settings, group=False):
        assert found["mean"] == pytest.approx(expected["mean"], rel=1e-4)
        for name in ("hidden_norm", "effective_sources", "largest_weight"):
            ours, one = (run["found"][1][1][name][1:] for run in (found, expected))
            assert ours == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize(
    ("world", "settings", "words"),
    [
        (
            2,
            ["parallel.mode=none"],
            ["parallel.mode=none", "each would train the whole run", "auto"],
        ),
        (1, ["parallel.mode=fsdp"], ["parallel.mode=fsdp", "torchrun --nproc_per_node=N"]),
        (4, ["parallel.mode=hsdp"], ["parallel.shard_degree=null", "write 2"]),
        (
            8,
            ["parallel.mode=hsdp", "parallel.shard_degree=3"],
            ["parallel.shard_degree=3", "write 2 or 4"],
        ),
        (
            3,
            ["parallel.mode=hsdp", "parallel.shard_degree=3", "global_batch=9", "micro_batch=3"],
            ["3 cannot be", "fsdp"],
        ),
        (4, ["parallel.shard_degree=2"], ["parallel.shard_degree=2", "parallel.mode=hsdp"]),
        (3, [], ["global_batch=16", "3 processes"]),
        (1, ["cluster.requeue=true"], ["cluster.requeue=true", "SLURM_JOB_ID", "cluster=local"]),
        (1, ["parallel.prefetch=-1"], ["parallel.prefetch=-1", "at least 0"]),
    ],
)
def test_impossible_layouts_are_refused(
    monkeypatch, world: int, settings: list[str], words: list[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name, value in {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0}.items():
        if world > 1:
            monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError) as refusal:
        resolve(composed("experiment=demo", "name=x", *settings))
    (fault,) = refusal.value.errors
    assert all(word in fault for word in words), fault


def test_the_command_for_one_gpu_is_the_command_for_many(monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    config, notes = resolve(composed("experiment=demo", "name=x", "compile=model"))
    assert config.compile is Compile.regions and "compile=regions" in notes[0]
