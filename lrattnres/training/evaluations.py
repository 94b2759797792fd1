"""What a run measures on held-out tokens while it trains, and at which steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lrattnres.config import TrainConfig
from lrattnres.data.dataset import Dataset
from lrattnres.distributed.ranks import Ranks
from lrattnres.evaluation.diagnostics import diagnose
from lrattnres.evaluation.heldout import evaluate
from lrattnres.model.transformer import Transformer
from lrattnres.training.instruments import due


class Interrupted(Exception):
    """A signal came during an evaluation; the next start does it."""


def measure(
    config: TrainConfig,
    dataset: Dataset,
    model: Transformer,
    ranks: Ranks,
    step: int,
    pause: Callable[[], None],
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Measures on held-out tokens what is due after a step. Collective.

    Args:
        config: Says what is measured, and when.
        dataset: Has the held-out windows.
        model: Whole or sharded.
        ranks: The ranks that take part.
        step: The number of steps done.
        pause: Called before every forward pass, on all ranks before the same one. What it raises
            ends the measurement.

    Returns:
        The held-out loss and what follows from it, as part of a record ({} if it is not due); and
        the depth diagnostics (None if they are not due).

    Raises:
        DataError: This rank cannot read its windows.
        RankError: Another rank cannot.
    """
    settings, separator, documents = (
        config.evaluation,
        dataset.tokenizer.separator,
        config.documents,
    )
    held_out, diagnostics = {}, None
    if due(settings.diagnostics_every, step, config.steps):
        windows = _together(dataset, settings.diagnostics_tokens, settings.batch, ranks)
        diagnostics = diagnose(
            model, windows, separator, documents=documents, ranks=ranks, pause=pause
        )
    if due(settings.every, step) or step == config.steps:
        tokens = settings.tokens
        if step != config.steps and settings.tokens_in_training is not None:
            tokens = min(tokens, settings.tokens_in_training)
        windows = _together(dataset, tokens, settings.batch, ranks)
        held_out = evaluate(
            model, windows, dataset.tokenizer, documents=documents, ranks=ranks, pause=pause
        ).record()
    return held_out, diagnostics


def _together(dataset: Dataset, tokens: int, batch: int, ranks: Ranks) -> Iterator[Tensor]:
    """Held-out windows of this rank.

    If a rank cannot read its windows, all ranks raise, so that none waits for it.

    Raises:
        DataError: This rank cannot read its windows.
        RankError: Another rank cannot.
    """
    windows = ranks.all_succeed(lambda: iter(dataset.held_out_windows(tokens, batch)))
    while (window := ranks.all_succeed(lambda: next(windows, None))) is not None:
        yield window
