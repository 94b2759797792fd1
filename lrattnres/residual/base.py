"""What every residual path gives the rest of the package: how it starts, who updates it, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Role(NamedTuple):
    """How one parameter of a residual path is treated.

    Args:
        owner: "adam" or "muon", the algorithm that updates it.
        decay: whether the published recipe decays it. This project decays only what Muon owns.
        start: its initial value: a constant, or a function (shape, generator) -> float32 tensor.
    """

    owner: str
    decay: bool
    start: float | Callable[[torch.Size, torch.Generator], Tensor]
