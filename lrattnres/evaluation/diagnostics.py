"""The papers' diagnostics of a trained model, over held-out tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from lrattnres.data.packing import IGNORE
from lrattnres.distributed.ranks import Ranks
from lrattnres.evaluation.heldout import shares
from lrattnres.model.loss import window_losses
from lrattnres.model.transformer import Transformer
from lrattnres.residual.probe import DepthProbe


@torch.no_grad()
def diagnose(
    model: Transformer,
    windows: Iterable[Tensor],
    separator: int,
    *,
    documents: bool,
    ranks: Ranks | None = None,
    pause: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Effective sources, mean and largest α, and the norm of h, per site: see `DepthProbe`.

    Every position that has a target counts once. No α outlives its batch: of each batch its sums
    are kept, which are added in the order of the batches, so the result is the same bit by bit for
    any number of ranks. All ranks take part in every pass, as the weights of a sharded model are
    gathered by all of them.

    Args:
        model: The model.
        windows: Batches of windows, int64 [B, T+1], whose padding is IGNORE.
        separator: The token that begins a document.
        documents: Whether attention stays inside a document.
        ranks: Those that share the windows; None: this process alone.
        pause: Is called before every pass by all ranks, and may end it all by raising.

    Returns:
        Plain values for JSON, a list over the sites for each measure.
    """
    ranks = ranks or Ranks()
    of_batches = []
    for batch in shares(windows, ranks):
        pause()
        probe = DepthProbe(model.router, trace=True)
        observe = partial(probe, valid=batch[:, 1:] != IGNORE)
        window_losses(
            model, batch, separator, documents=documents, observe=observe, path=probe.path
        )
        of_batches.append(torch.cat(probe.sums()))
    in_order = ranks.gather(torch.stack(of_batches)).transpose(0, 1).flatten(0, 1)
    total = DepthProbe(model.router, trace=True)
    sums = total.sums()
    for own, value in zip(
        sums, reduce(torch.add, in_order).split([len(own) for own in sums]), strict=True
    ):
        own.copy_(value)
    return total.results()
