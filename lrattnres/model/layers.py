"""The two kinds of sub-layer. Both take a normalised read [B, T, d] and return [B, T, d + emit_dim]."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.kernels.reference import rms_norm
from lrattnres.model.attention import AttentionBackend, Mask


class Context(NamedTuple):
    """What all sub-layers of one forward pass share: which positions see each other, and the rotary angles."""

    mask: Mask
    rotation: tuple[Tensor, Tensor]


class Linear(nn.Linear):
    """A linear map without bias; float32 weights are used in the precision of the input."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: `initialize` fills every weight of a model."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def rotation(length: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, float32 [T, head_dim / 2], positions counted from the window's start."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns the interleaved pairs (0,1), (2,3), … of x [B, T, heads, head_dim] by the angle of their position."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosines, sines = cosines.unsqueeze(-2), sines.unsqueeze(-2)
    turned = torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head attention with RMS-normalised, rotated queries and keys."""

    def __init__(self, dim: int, heads: int, emit_dim: int, backend: AttentionBackend):
        super().__init__()
        self.heads, self.backend = heads, backend
        self.input = Linear(dim, 3 * dim)
        self.output = Linear(dim, dim + emit_dim)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        query, key, value = self.input(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        query, key = (rotate(rms_norm(part), *context.rotation) for part in (query, key))
        return self.output(self.backend.attend(query, key, value, context.mask).flatten(-2))


class SwiGLU(nn.Module):
    """silu(gate)·up, with up and gate from one projection."""

    def __init__(self, dim: int, width: int, emit_dim: int):
        super().__init__()
        self.input = Linear(dim, 2 * width)
        self.output = Linear(width, dim + emit_dim)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        up, gate = self.input(x).chunk(2, dim=-1)
        return self.output(F.silu(gate) * up)
