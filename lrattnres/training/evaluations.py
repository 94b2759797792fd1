"""What a run measures on held-out tokens while it trains, at the steps at which its settings want it."""

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


class Interrupted(Exception):
    """A signal came during an evaluation, which is left to the next start."""


def due(config: TrainConfig, every: int | None, step: int) -> bool:
    """Whether something that is wanted every so many steps, and at the last one, is wanted at this step."""
    return every is not None and (step % every == 0 or step == config.steps)


def measure(
    config: TrainConfig,
    dataset: Dataset,
    model: Transformer,
    ranks: Ranks,
    step: int,
    pause: Callable[[], None],
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(the held-out loss and what follows from it, depth diagnostics), as far as they are due. Collective.

    `pause` is called before every pass, by all ranks at the same one; what it raises ends the measurement. Raises
    DataError on a rank that cannot read its windows, and Elsewhere on the others.
    """
    settings, separator, documents = (
        config.evaluation,
        dataset.tokenizer.separator,
        config.documents,
    )
    held_out, diagnostics = {}, None
    if due(config, settings.diagnostics_every, step):
        windows = _together(dataset, settings.diagnostics_tokens, settings.batch, ranks)
        diagnostics = diagnose(
            model, windows, separator, documents=documents, ranks=ranks, pause=pause
        )
    if due(config, settings.every, step) or step == config.steps:
        windows = _together(dataset, settings.tokens, settings.batch, ranks)
        held_out = evaluate(
            model, windows, dataset.tokenizer, documents=documents, ranks=ranks, pause=pause
        ).record()
    return held_out, diagnostics


def _together(dataset: Dataset, tokens: int, batch: int, ranks: Ranks) -> Iterator[Tensor]:
    """Held-out windows; a rank that cannot read its own leaves no other waiting in the pass over them."""
    windows = ranks.together(lambda: iter(dataset.held_out_windows(tokens, batch)))
    while (window := ranks.together(lambda: next(windows, None))) is not None:
        yield window
