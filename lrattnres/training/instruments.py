"""What is measured on gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from lrattnres.model.transformer import Transformer


def gradient_norm(parameters: Iterable[nn.Parameter], clip: float | None) -> Tensor:
    """The norm of the whole gradient before it is clipped, in place, to `clip`; None only measures."""
    return nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)


def block_norms(model: Transformer) -> list[Tensor]:
    """Gradient norm of each transformer block: an attention and the MLP after it, in order."""
    pairs = [list(model.sublayers[i : i + 2].parameters()) for i in range(0, len(model.sublayers), 2)]
    return [nn.utils.get_total_norm([p.grad for p in pair if p.grad is not None]) for pair in pairs]


def parameter_count(model: nn.Module) -> int:
    """Elements of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
