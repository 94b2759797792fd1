"""From windows of tokens to cross-entropy and z-loss, as sums over tokens: whoever divides knows the global count."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from lrattnres.data.packing import IGNORE, split_windows
from lrattnres.model.transformer import Observer, Transformer
from lrattnres.residual.base import ResidualPath


class Losses(NamedTuple):
    """Cross-entropy in nats, squared logsumexp, and whether there is a target: a token each, or summed."""

    cross_entropy: Tensor
    squared_logsumexp: Tensor
    tokens: Tensor

    def sums(self) -> Losses:
        """Float64 scalars."""
        return Losses(*(part.sum(dtype=torch.float64) for part in self))


def token_losses(logits: Tensor, targets: Tensor) -> Losses:
    """logits [B, T, V], targets [B, T] with IGNORE where there is none; float32 [B, T], zero without a target."""
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
    """The losses of windows [B, T+1]; `documents`: whether attention stays inside a document. An observed pass is eager."""
    inputs, targets, numbers = split_windows(windows, separator)
    device = model.head.weight.device
    mask = model.mask(numbers if documents else None, *inputs.shape)
    inputs, targets = inputs.to(device), targets.to(device)
    with nullcontext() if observe is None else torch.compiler.set_stance("force_eager"):
        return token_losses(model(inputs, mask, observe, path), targets)
