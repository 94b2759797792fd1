"""What a run measures on held-out tokens while it trains, at the steps at which its settings want
it.
"""

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
    """A signal came during an evaluation, which is left to the next start."""


def measure(
    config: TrainConfig,
    dataset: Dataset,
    model: Transformer,
    ranks: Ranks,
    step: int,
    pause: Callable[[], None],
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Measures what is due after `step` on held-out tokens. Collective.

    Args:
        config: Says what is wanted, and when.
        dataset: Has the held-out windows.
        model: Whole or sharded.
        ranks: Who takes part.
        step: The number of steps done.
        pause: Called before every pass, by all ranks at the same one; what it raises ends the
            measurement.

    Returns:
        The held-out loss and what follows from it, as a part of a record; and the depth
        diagnostics. {} and None where they are not due.

    Raises:
        DataError: This rank cannot read its windows.
        RankError: Another one cannot.
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
        windows = _together(dataset, settings.tokens, settings.batch, ranks)
        held_out = evaluate(
            model, windows, dataset.tokenizer, documents=documents, ranks=ranks, pause=pause
        ).record()
    return held_out, diagnostics


def _together(dataset: Dataset, tokens: int, batch: int, ranks: Ranks) -> Iterator[Tensor]:
    """Held-out windows; a rank that cannot read its own leaves no other waiting in the pass over
    them.
    """
    windows = ranks.all_succeed(lambda: iter(dataset.held_out_windows(tokens, batch)))
    while (window := ranks.all_succeed(lambda: next(windows, None))) is not None:
        yield window
