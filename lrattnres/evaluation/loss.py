"""From windows of tokens to cross-entropy and z-loss, as sums over tokens.

Whoever divides them knows the global count.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from lrattnres.data.packing import IGNORE, split_windows
from lrattnres.model.transformer import Observer, Transformer


class Losses(NamedTuple):
    """Losses of each token, or their sums.

    Attributes:
        cross_entropy: Nats.
        squared_logsumexp: What z-loss weighs.
        tokens: Whether there is a target; summed, how many there are.
    """

    cross_entropy: Tensor
    squared_logsumexp: Tensor
    tokens: Tensor

    def sums(self) -> Losses:
        """Float64 scalars."""
        return Losses(*(part.sum(dtype=torch.float64) for part in self))


def token_losses(logits: Tensor, targets: Tensor) -> Losses:
    """The losses of each token.

    Args:
        logits: [B, T, V], of any floating-point type.
        targets: int64 [B, T], IGNORE where there is none.

    Returns:
        float32 [B, T] each, zero without a target; `tokens` is bool.
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
) -> Losses:
    """The losses of each token of windows.

    Args:
        model: The model.
        windows: int64 [B, T+1], padded with IGNORE.
        separator: The token that begins a document.
        documents: Whether attention stays inside a document.
        observe: Is called at every site; such a pass is not compiled.
    """
    inputs, targets, numbers = split_windows(windows, separator)
    device = model.head.weight.device
    mask = model.mask(numbers if documents else None, *inputs.shape)
    inputs, targets = inputs.to(device), targets.to(device)
    with nullcontext() if observe is None else torch.compiler.set_stance("force_eager"):
        return token_losses(model(inputs, mask, observe), targets)
