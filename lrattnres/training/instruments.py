"""When something is measured, and what is measured on gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lrattnres.model.transformer import Transformer


def due(every: int | None, step: int, last: int | None = None) -> bool:
    """Whether something is to be done at a step.

    Args:
        every: It is done at multiples of this; None: never.
        step: The number of steps done.
        last: A step at which it is done too; None: there is no such step.
    """
    return every is not None and (step % every == 0 or step == last)


def gradient_norm(parameters: Iterable[nn.Parameter], clip: float | None) -> Tensor:
    """The 2-norm of the whole gradient over all ranks, before the gradient is clipped in place.

    Args:
        parameters: Those that have gradients; the same on all ranks, whole or sharded.
        clip: The largest norm that stays; None: nothing is clipped.

    Returns:
        A scalar on their device.
    """
    parameters = list(parameters)
    norm = _total_norm(parameters)
    nn.utils.clip_grads_with_norm_(parameters, math.inf if clip is None else clip, norm)
    return norm


def block_norms(model: Transformer) -> list[Tensor]:
    """Gradient norm (a scalar) of each transformer block, in order."""
    return [_total_norm(block) for block in transformer_blocks(model)]


def transformer_blocks(model: Transformer) -> list[list[nn.Parameter]]:
    """The parameters of each transformer block (an attention and the MLP after it), in order."""
    layers = model.sublayers
    return [list(layers[i : i + 2].parameters()) for i in range(0, len(layers), 2)]


def _total_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    norm = nn.utils.get_total_norm(
        [parameter.grad for parameter in parameters if parameter.grad is not None]
    )
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
