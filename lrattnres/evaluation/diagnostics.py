"""The papers' diagnostics of a trained model, over held-out tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lrattnres.depth.probe import DepthProbe
from lrattnres.evaluation.loss import window_losses
from lrattnres.model.transformer import Transformer
from lrattnres.ranks import Ranks


@torch.no_grad()
def diagnose(
    model: Transformer, windows: Iterable[Tensor], separator: int, *, documents: bool, ranks: Ranks | None = None
) -> dict[str, Any]:
    """Effective sources, mean and largest α, and the norm of h, per site: see `DepthProbe`.

    Every position of every window counts once; the padding of the last window is cut off row by row.
    Rank r of W, each with a whole model, takes batches r, r + W, …, and all get the result of all.
    """
    ranks = ranks or Ranks()
    probe = DepthProbe(model.router)
    for batch in itertools.islice(windows, ranks.rank, None, ranks.world):
        for window in _unpadded(batch):
            window_losses(model, window, separator, documents=documents, observe=probe)
    for sums in probe.sums():
        ranks.sum(sums)
    return probe.results()


def _unpadded(batch: Tensor) -> list[Tensor]:
    """The whole windows as one batch, and a cut window as a batch of its own length."""
    lengths = (batch >= 0).sum(dim=1)
    whole = lengths == batch.shape[1]
    parts = [batch[whole]] if whole.any() else []
    return parts + [row[:length].unsqueeze(0) for row, length in zip(batch[~whole], lengths[~whole], strict=True)]
