"""The two kinds of sub-layer: each takes a normalised read [B, T, d] and writes [B, T, d +
emit_dim].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import ModelConfig, QKNorm, RopeKind, RopeScaling
from lrattnres.kernels.reference import rms_norm, wide
from lrattnres.model.attention import AttentionBackend, Mask
from lrattnres.residual.base import Change, Raw, Read


class Context(NamedTuple):
    """What all sub-layers of one forward pass share: which positions see each other, and the rotary
    angles.
    """

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


class Gain(nn.Module):
    """The learned gain of a norm, float32 [width]; the norm itself has been taken already."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.to(x.dtype)


def gain(width: int, wanted: bool) -> nn.Module:
    """A gain, or nothing in its place."""
    return Gain(width) if wanted else nn.Identity()


def _linear(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    return frequencies / scaling.factor


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """With n periods in the first context: as they are above `high`, divided below `low`, between
    the two in between.
    """
    periods = scaling.first_context * frequencies / (2 * math.pi)
    kept = ((periods - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


SCALINGS = {RopeKind.linear: _linear, RopeKind.llama3: _llama3}


def rotation(
    length: int,
    head_dim: int,
    base: float,
    device: torch.device,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, float32 [T, head_dim / 2], positions counted from
    the window's start.
    """
    frequencies = base ** (
        -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    )
    if scaling and scaling.kind is not RopeKind.none:
        frequencies = SCALINGS[scaling.kind](frequencies, scaling)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns the interleaved pairs (0,1), (2,3), … of x [B, T, heads, head_dim] by the angle of
    their position.

    A pair is a complex number, and its product with another is one pass over memory. Compilers of
    torch make no code for complex numbers, so what is compiled has the same arithmetic in reals.
    """
    pairs = wide(x).unflatten(-1, (-1, 2))
    cosines, sines = (part.unsqueeze(-2).to(pairs.dtype) for part in (cosines, sines))
    if torch.compiler.is_compiling():
        even, odd = pairs.unbind(-1)
        turned = torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cosines, sines))
    return turned.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Causal attention inside documents, with RMS-normalised and rotated queries and keys.

    Several query heads may share a key and a value.

    Args:
        config: the model's.
        emit_dim: columns that the output projection has beyond d.
        backend: how it is computed; see model/attention.py.
        values: whether it makes values; else the residual path brings them.
    """

    def __init__(
        self, config: ModelConfig, emit_dim: int, backend: AttentionBackend, values: bool = True
    ):
        super().__init__()
        self.config, self.backend = config, backend
        self.width = config.head_width
        kept = config.value_heads
        self.heads = (config.heads, kept, kept) if values else (config.heads, kept)  # of q, k, v
        self.gain = gain(config.dim, config.gains)
        self.input = Linear(config.dim, sum(self.heads) * self.width)
        gains = config.qk_norm is QKNorm.gains
        self.query_gain, self.key_gain = gain(self.width, gains), gain(self.width, gains)
        self.output = Linear(config.heads * self.width, config.dim + emit_dim)

    def forward(
        self, read: Read, context: Context, change: Change | None = None
    ) -> tuple[Tensor, Raw | None]:
        """What the sub-layer writes, [B, T, d + emit_dim].

        Args:
            read: what it reads, [B, T, d].
            context: the mask and the rotary angles.
            change: what the residual path makes of the raw keys and values, each [B, T, heads,
                head_dim]; if it is given, these are returned too.
        """
        query, key, *values = self.project(read)
        value = values[0] if values else None
        raw = None
        if change is not None:
            raw = (key, value)
            key, value = change(key, value)
        assert value is not None
        if self.config.qk_norm is not QKNorm.none:
            query, key = (rms_norm(part, self.config.norm_eps) for part in (query, key))
        query, key = self.query_gain(query), self.key_gain(key)
        query, key = (rotate(part, *context.rotation) for part in (query, key))
        if self.heads[0] != self.heads[1] and not self.backend.shares:
            shared = self.heads[0] // self.heads[1]
            key, value = (part.repeat_interleave(shared, dim=-2) for part in (key, value))
        attended = self.backend.attend(query, key, value, context.mask)
        return self.output(attended.flatten(-2)), raw

    def project(self, read: Read) -> tuple[Tensor, ...]:
        """Queries, keys and values, [B, T, heads, head_dim] each."""
        if read.key is None and read.value is None:
            heads = self.input(self.gain(read.x)).unflatten(-1, (sum(self.heads), -1))
            return heads.split(self.heads, dim=-2)
        rows = self.input.weight.split([count * self.width for count in self.heads])
        inputs = [read.x if part is None else part for part in read]
        return tuple(
            F.linear(self.gain(part), weight.to(part.dtype)).unflatten(-1, (-1, self.width))
            for part, weight in zip(inputs[: len(rows)], rows, strict=True)
        )


class SwiGLU(nn.Module):
    """silu(gate)·up, with up and gate from one projection; called as Attention is."""

    def __init__(self, config: ModelConfig, emit_dim: int):
        super().__init__()
        self.gain = gain(config.dim, config.gains)
        self.input = Linear(config.dim, 2 * config.mlp_width)
        self.output = Linear(config.mlp_width, config.dim + emit_dim)

    def forward(
        self, read: Read, context: Context, change: Change | None = None
    ) -> tuple[Tensor, None]:
        up, gate = self.input(self.gain(read.x)).chunk(2, dim=-1)
        return self.output(F.silu(gate) * up), None
