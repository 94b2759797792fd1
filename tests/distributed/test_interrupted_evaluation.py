"""A signal in the middle of an evaluation: all ranks leave it together, and the next start makes
it, as if nothing had been.
"""

import itertools
import os
import signal
from pathlib import Path

import pytest
import torch

from lrattnres.data.errors import UnreadableError
from lrattnres.distributed.ranks import RankError
from lrattnres.runs.checkpoint import Checkpoints
from lrattnres.training.trainer import Trainer
from tests.distributed.launch import launch
from tests.distributed.test_training import build


class Signalling:
    """A dataset that sends its process a SIGTERM with the third batch of its evaluation number
    `evaluation`, from 1.
    """

    def __init__(self, dataset, evaluation: int):
        self._dataset, self._left, self.heard_late = dataset, evaluation, False

    def __getattr__(self, name: str):
        return getattr(self._dataset, name)

    def held_out_windows(self, tokens: int, batch: int):
        self._left -= 1
        for number, window in enumerate(self._dataset.held_out_windows(tokens, batch), start=1):
            if self._left == 0 and number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            self.heard_late |= self._left < 0 or (
                self._left == 0 and number > 4
            )  # the two ranks' next batches
            yield window


def trainer_of(settings: list[str], folder: Path) -> Trainer:
    trainer = build(settings)
    trainer.checkpoints = Checkpoints(folder, ranks=trainer.ranks.apart(30.0))
    del trainer.save
    trainer.diagnoses = []
    trainer.write_diagnostics = lambda step, found: trainer.diagnoses.append((step, found))
    return trainer


def cut_and_continue(
    rank: int, settings: list[str], folder: Path, evaluation: int, at: int
) -> list[dict]:
    """The records of a run whose last rank has a signal in an evaluation, at step `at`, and of its
    two continuations.
    """
    first = trainer_of(settings, folder)
    if rank == first.ranks.world - 1:
        first.dataset = Signalling(first.dataset, evaluation)
    assert not first.fit() and first.progress.step == at and first.stopped_by == signal.SIGTERM
    assert not getattr(first.dataset, "heard_late", False)
    assert first.records[-1]["step"] == at - 1

    again = trainer_of(settings, folder)  # interrupted where it begins: in that same evaluation
    again.restore(again.checkpoints.at(at))
    again.dataset = Signalling(again.dataset, 1)
    assert not again.fit() and again.progress.step == at and again.records == []

    last = trainer_of(settings, folder)
    last.restore(last.checkpoints.at(at))
    assert last.fit()
    assert (
        last.checkpoints.newest(print).details.keys() == {"tokens", "recorded", "seconds"}
        or at == last.config.steps
    )
    diagnosed = {4, 8} if last.config.evaluation.diagnostics_every else set()
    assert {step for step, _ in first.diagnoses + last.diagnoses} == diagnosed
    return first.records + last.records


def comparable(records: list[dict]) -> list[dict]:
    return [
        {name: value for name, value in record.items() if name not in ("tokens_per_second", "mfu")}
        for record in records
    ]


EVERY = [
    "steps=8",
    "optimizer.warmup=2",
    "evaluation.every=4",
    "evaluation.tokens=500",
    "evaluation.batch=2",
]


DIAGNOSED = ["evaluation.diagnostics_every=4", "evaluation.diagnostics_tokens=500"]


@pytest.mark.parametrize(
    ("evaluation", "at", "also"),
    [
        (1, 4, []),
        (3, 8, DIAGNOSED),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 8, []), (1, 4, DIAGNOSED), (2, 4, DIAGNOSED))
        ),
    ],
)
def test_one_process(tiny_run, tmp_path: Path, evaluation: int, at: int, also: list[str]) -> None:
    settings = tiny_run(*EVERY, *also)
    straight = build(settings)
    assert straight.fit() and "val_loss" in straight.records[3]
    found = cut_and_continue(0, settings, tmp_path / "cut", evaluation, at)
    assert comparable(found) == comparable(straight.records)  # to the last bit


@pytest.mark.parametrize("also", [pytest.param([], marks=pytest.mark.slow), DIAGNOSED])
def test_two_ranks(tiny_run, tmp_path: Path, also: list[str]) -> None:
    settings = tiny_run(*EVERY, *also)
    straight = build(settings)
    assert straight.fit()
    for found in launch(
        cut_and_continue, 2, settings, tmp_path / "cut", 1, 4, group=False, limit=120
    ):
        assert [record["step"] for record in found] == list(range(1, 9))
        assert [record["batch_hash"] for record in found] == [
            record["batch_hash"] for record in straight.records
        ]
        for step in (3, 7):
            assert found[step]["val_loss"] == pytest.approx(
                straight.records[step]["val_loss"], rel=1e-5
            )


class Unreadable(Signalling):
    """A dataset whose held-out texts cannot be read from the third batch on."""

    def held_out_windows(self, tokens: int, batch: int):
        yield from itertools.islice(self._dataset.held_out_windows(tokens, batch), 2)
        raise UnreadableError("the held-out texts are gone")


def unreadable(rank: int, settings: list[str], folder: Path) -> tuple[list[dict], str]:
    first = trainer_of(settings, folder)
    if rank == first.ranks.world - 1:
        first.dataset = Unreadable(first.dataset, 0)
    with pytest.raises((UnreadableError, RankError)) as fault:
        first.fit()
    again = trainer_of(settings, folder)
    again.restore(again.checkpoints.at(4))
    assert again.fit()
    return first.records + again.records, str(fault.value)


def test_unreadable_held_out_texts_lose_no_step(tiny_run, tmp_path: Path) -> None:
    settings = tiny_run(*EVERY)
    straight = build(settings)
    assert straight.fit()
    records, fault = unreadable(0, settings, tmp_path / "one")
    assert fault.startswith("the held-out texts are gone\nsaved at step 4; once")
    assert comparable(records) == comparable(straight.records)
    (first, elsewhere), (_, fault) = launch(
        unreadable, 2, settings, tmp_path / "two", group=False, limit=120
    )
    assert elsewhere == "rank 1: the held-out texts are gone" and "saved at step 4" in fault
    assert [record["step"] for record in first] == list(range(1, 9))


def test_a_pause_that_raises_ends_an_evaluation(tiny_run) -> None:
    from lrattnres.evaluation.heldout import evaluate

    trainer, calls = build(tiny_run()), iter(range(100))

    def pause() -> None:
        if next(calls) == 2:
            raise InterruptedError

    windows = iter(trainer.dataset.held_out_windows(500, 2))
    with pytest.raises(InterruptedError):
        evaluate(trainer.model, windows, trainer.dataset.tokenizer, documents=True, pause=pause)
    assert len(list(windows)) == len(list(trainer.dataset.held_out_windows(500, 2))) - 3
    assert torch.is_grad_enabled()
