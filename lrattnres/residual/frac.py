"""Frac-Connections: hyper-connections between the m fractions of one stream.

Zhu et al., "Frac-Connections: Fractional Extension of Hyper-Connections" (arXiv 2503.14125).
The stream, o_0 at first, is cut into m fractions S_j of width d/m. With A [m, 2m] and β [m]
made as in hc.py, norm and maps over d/m and shared by the fractions, site t = 1 … M computes

    h_t = concat_c Σ_j A_{j,c} S_j          S_k ← Σ_j A_{j,m+k} S_j + β_k · (fraction k of o_t)

and the head reads h_{M+1} = concat_k S_k.

Start: A^static = (I | I), β^static = 1, the dynamic maps are zero and their scales 0.01: a
model begins as its baseline, to the last bit.

Where sources differ: the equations are those of the public code of Hyper-Connection Factory,
and the number of parameters is that of the paper's Table 1, but for a gain of the norm, which
the maps take in. PyPI's hyper-connections mixes the fractions of an output by a full matrix of
ones and does not start as its baseline: not taken. As in hc.py the paper decays the dynamic
weights, and here nothing decays.

Costs M(2m² + m) parameters and M·d(2m + 1) multiply-adds a token; dynamic weights are
M((d/m)(2m + 1) + 2) parameters more, and as many multiply-adds again. A state holds two
vectors of width d and the m numbers β.

An output has no one coefficient: a matrix m × m says what each fraction takes of each of its
fractions. Values with more than d columns carry these matrices, and `hidden` gives the mean of
their diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lrattnres.config import ModelConfig
from lrattnres.config.schema import option
from lrattnres.kernels.reference import rms_norm, weighted_sum, wide
from lrattnres.residual.base import Read
from lrattnres.residual.hc import LearnedConnections, Norm


class Parts(NamedTuple):
    """The fractions of a value.

    Args:
        values: [..., m, d/m].
        marks: of a value with more than d columns, [..., m, columns, m]: what each fraction
            (first) takes of each fraction (last) of what the column stands for; else None.
    """

    values: Tensor
    marks: Tensor | None


class State(NamedTuple):
    stream: Parts  # mixed already for the next site; for the head, unmixed
    write: Tensor | None  # β of the next site, float32 [..., m]; None for the head
    hidden: Parts  # h of the next site


class FracConnections(LearnedConnections):
    residual, start = "frac", "bits"

    @dataclass(frozen=True)
    class Options:
        m: int = option(
            "fractions of the stream, a divisor of model.dim", 4, at_least=1, at_most=1024
        )
        dynamic: bool = option("weights depend on the token", True)
        norm: Norm = option(
            "what dynamic weights are made of: layer (LayerNorm) or rms", Norm.layer
        )
        tanh: bool = option("dynamic weights are bounded by tanh", True)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.linear = False

    def begin(self, embedding: Tensor) -> State:
        return self.arrive(self.cut(embedding), 0)

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        assert state.write is not None
        beta = state.write.unsqueeze(-1)

        def added(stream: Tensor, new: Tensor) -> Tensor:
            return torch.addcmul(wide(stream), beta, wide(new)).to(output.dtype)

        return self.arrive(of_each(added, state.stream, self.cut(output)), site + 1)

    def arrive(self, stream: Parts, site: int) -> State:
        """All that `site` takes of the stream."""
        if site == 2 * self.config.layers:
            return State(stream, None, stream)
        mixing, write = self.connections(stream.values.unbind(-2), site)
        hidden, mixed = mixing.chunk(2, dim=-1)
        return State(mixture(mixed, stream), write, mixture(hidden, stream))

    def read(self, state: State, site: int) -> Read:
        return Read(rms_norm(state.hidden.values.flatten(-2), self.eps))

    def hidden(self, state: State, site: int) -> Tensor:
        values, marks = state.hidden
        joined = values.flatten(-2)
        if marks is None:
            return joined
        return torch.cat([joined, marks.diagonal(dim1=-3, dim2=-1).mean(-1)], dim=-1)

    def cut(self, value: Tensor) -> Parts:
        """The fractions of a value."""
        m = self.options.m
        values, marks = value[..., : self.dim].unflatten(-1, (m, -1)), value[..., self.dim :]
        if not marks.shape[-1]:
            return Parts(values, None)
        own = torch.eye(m, dtype=value.dtype, device=value.device).unsqueeze(1)
        return Parts(values, own * marks[..., None, :, None])

    @classmethod
    def shape(cls, config: ModelConfig) -> tuple[int, int, int]:
        m = cls.options_of(config).m
        return m, config.dim // m, 2 * m

    @classmethod
    def first_mixing(cls, site: int, count: int) -> Tensor:
        return torch.eye(count).repeat(1, 2)

    @classmethod
    def errors(cls, config: ModelConfig) -> Iterator[str]:
        yield from (found := list(super().errors(config)))
        if not found and config.dim % (m := cls.options_of(config).m):
            divisors = [n for n in range(1, config.dim + 1) if config.dim % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - m))
            yield (
                f"model.path.m={m}: must divide model.dim={config.dim}; "
                f"write model.path.m={nearest}, or another divisor"
            )


def of_each(function: Callable[..., Tensor], *parts: Parts) -> Parts:
    """A function of values, and of their marks where there are some; it keeps the last axis."""
    values, marks = zip(*parts, strict=True)
    if marks[0] is None:
        return Parts(function(*values), None)
    flat = function(*(mark.flatten(-2) for mark in marks))
    return Parts(function(*values), flat.unflatten(-1, marks[0].shape[-2:]))


def mixture(weights: Tensor, stream: Parts) -> Parts:
    """Σ_j A_{j,c} S_j for each c; weights: A, float32 [..., m, m]."""

    def mixed(fractions: Tensor) -> Tensor:
        sources = [fraction.unsqueeze(-2) for fraction in fractions.unbind(-2)]
        return weighted_sum(weights.mT, sources).to(fractions.dtype)

    return of_each(mixed, stream)
