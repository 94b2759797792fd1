"""From windows of tokens to the losses of single tokens."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from lrattnres.data.packing import split_windows
from lrattnres.model.attention import to_device
from lrattnres.model.head import Losses, Objective
from lrattnres.model.transformer import Observer, Transformer
from lrattnres.residual.base import ResidualPath


def window_objective(
    model: Transformer,
    windows: Tensor,
    separator: int,
    *,
    documents: bool,
    z_loss: float = 0.0,
    observe: Observer | None = None,
    path: ResidualPath | None = None,
) -> Objective:
    """What a forward pass over windows gives for training.

    Args:
        model: on any device; the result is there too.
        windows: int64 [B, T+1], IGNORE in unused positions; may lie on another device.
        separator: the token that opens a document.
        documents: whether attention stays inside a document.
        z_loss: the weight of the squared logsumexp.
        observe: called at every site; an observed pass is not compiled.
        path: the model's residual path in another form; None: as it is.
    """
    inputs, targets, numbers = split_windows(windows, separator)
    device = model.head.weight.device
    mask = model.mask(numbers if documents else None, *inputs.shape)
    inputs, targets = to_device(inputs, device), to_device(targets, device)
    with nullcontext() if observe is None else torch.compiler.set_stance("force_eager"):
        return model(inputs, mask, observe, path, targets, z_loss)


def window_losses(
    model: Transformer,
    windows: Tensor,
    separator: int,
    *,
    documents: bool,
    observe: Observer | None = None,
    path: ResidualPath | None = None,
) -> Losses:
    """The losses of single tokens, [B, T], without a gradient; arguments of `window_objective`."""
    return window_objective(
        model, windows, separator, documents=documents, observe=observe, path=path
    ).losses
