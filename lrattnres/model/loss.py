"""From windows of tokens to the losses of single tokens.

They are summed, never averaged: only whoever divides knows how many targets there are in all.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from lrattnres.data.packing import IGNORE, split_windows
from lrattnres.model.transformer import Observer, Transformer
from lrattnres.residual.base import ResidualPath


class Losses(NamedTuple):
    """Losses of single tokens, or their sums.

    Args:
        cross_entropy: nats.
        squared_logsumexp: (log Σ exp logits)², what z-loss weighs.
        tokens: whether there is a target; as a sum, the number of targets.
    """

    cross_entropy: Tensor
    squared_logsumexp: Tensor
    tokens: Tensor

    def sums(self) -> Losses:
        """The sums over all tokens, float64 scalars."""
        return Losses(*(part.sum(dtype=torch.float64) for part in self))


def token_losses(logits: Tensor, targets: Tensor) -> Losses:
    """The losses of every position, computed in float32.

    Args:
        logits: [B, T, vocabulary], any floating dtype.
        targets: int64 [B, T]; IGNORE where there is none.

    Returns:
        Float32 [B, T], zero where there is no target; `tokens` is bool [B, T].
    """
    valid = targets != IGNORE
    logits = logits.float()
    logsumexp = logits.logsumexp(-1)
    chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return Losses((logsumexp - chosen) * valid, logsumexp.square() * valid, valid)


def window_losses(
    model: Transformer,
    windows: Tensor,
    separator: int,
    *,
    documents: bool,
    observe: Observer | None = None,
    path: ResidualPath | None = None,
) -> Losses:
    """The losses of a forward pass over windows.

    Args:
        model: on any device; the result is there too.
        windows: int64 [B, T+1], IGNORE in unused positions; may lie on another device.
        separator: the token that opens a document.
        documents: whether attention stays inside a document.
        observe: called at every site; an observed pass is not compiled.

    Returns:
        What `token_losses` gives, [B, T].
    """
    inputs, targets, numbers = split_windows(windows, separator)
    device = model.head.weight.device
    mask = model.mask(numbers if documents else None, *inputs.shape)
    inputs, targets = inputs.to(device), targets.to(device)
    with nullcontext() if observe is None else torch.compiler.set_stance("force_eager"):
        return token_losses(model(inputs, mask, observe, path), targets)
