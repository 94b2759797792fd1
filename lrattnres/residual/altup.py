"""Recycled-AltUp: n streams, of which one runs through each transformer block and corrects the
others.

Baykal et al., "Alternating Updates for Efficient Transformers" (arXiv 2301.13310). S has n
rows S_j, each of width d, and starts as S_j = o_0. Block b = 1 … L, with a = (b − 1) mod n,
computes

    G_k = Σ_j p_{k,j} S_j              the guesses
    h_{2b−1} = G_a,   h_{2b} = G_a + o_{2b−1},   Δ = o_{2b−1} + o_{2b}
    S_k = G_k + g_k Δ                  the corrections

and the head reads h_{M+1} = Σ_k S_k. With `dynamic` (Gemma 3n, code in transformers), p and g
depend on the token: m(x) = tanh(R·RMSNorm(x)), and mat(P·m(S_a)) [n, n], row after row, is
added to p, C·m(G_a + Δ) to g.

Start: p = I, g = 1, P and C zero, R N(0, init_std²). All streams are the residual stream, and
the head's h is n times the baseline's, to rounding: Δ is summed first. Gemma 3n divides the
input of R by d, which R takes in, and keeps a at 0; alternating is the paper's. Decay is not
published: none.

Costs L(n² + n) parameters and L(n² + n)d multiply-adds a token; `dynamic` L(nd + n³ + n²) and
L(2nd + n³ + n²) more. A state holds n + 1 vectors of width d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import ModelConfig
from lrattnres.config.schema import option
from lrattnres.kernels.reference import rms_norm, weighted_sum, wide
from lrattnres.residual.base import Added, ResidualPath, Role, normal
from lrattnres.residual.hc import sum_of


class State(NamedTuple):
    guesses: tuple[Tensor, ...]  # G of the block; for the head, the last streams
    delta: Tensor | None  # o of the block's attention; None before it has run


class AltUp(ResidualPath):
    residual, start = "altup", "scaled"

    @dataclass(frozen=True)
    class Options:
        n: int = option("streams", 2, at_least=1, at_most=64)
        dynamic: bool = option("guesses and corrections depend on the token", False)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        blocks, n = config.layers, self.options.n
        self.predict = nn.Parameter(torch.zeros(blocks, n, n))
        self.correct = nn.Parameter(torch.zeros(blocks, n))
        if self.options.dynamic:
            self.router = nn.Parameter(torch.zeros(blocks, n, self.dim))
            self.predict_router = nn.Parameter(torch.zeros(blocks, n * n, n))
            self.correct_router = nn.Parameter(torch.zeros(blocks, n, n))

    def begin(self, embedding: Tensor) -> State:
        return self.arrive((embedding,) * self.options.n, 0)

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        block = site // 2
        if state.delta is None:
            return state._replace(delta=output)
        delta = wide(state.delta) + wide(output)
        gains = self.correct[block]
        if self.options.dynamic:
            left = wide(state.guesses[block % self.options.n]) + delta
            gains = gains + self.routed(self.correct_router, left, block)
        streams = [
            torch.addcmul(wide(guess), gain, delta).to(output.dtype)
            for guess, gain in zip(state.guesses, gains.unsqueeze(-1).unbind(-2), strict=True)
        ]
        return self.arrive(streams, block + 1)

    def arrive(self, streams: Sequence[Tensor], block: int) -> State:
        """The guesses of a block, from 0; the streams themselves after the last."""
        if block == self.config.layers:
            return State(tuple(streams), None)
        n, mixing = self.options.n, self.predict[block]
        if self.options.dynamic:
            found = self.routed(self.predict_router, streams[block % n], block)
            mixing = mixing + found.unflatten(-1, (n, n))
        guesses = (weighted_sum(row, streams).to(streams[0].dtype) for row in mixing.unbind(-2))
        return State(tuple(guesses), None)

    def routed(self, maps: Tensor, x: Tensor, block: int) -> Tensor:
        """A map of m(x), float32."""
        normed = rms_norm(wide(x[..., : self.dim]), self.eps)
        modes = torch.tanh(F.linear(normed, self.router[block].to(normed.dtype)))
        return F.linear(modes, maps[block].to(modes.dtype))

    def hidden(self, state: State, site: int) -> Tensor:
        if site == 2 * self.config.layers:
            return sum_of(state.guesses).to(state.guesses[0].dtype)
        active = state.guesses[site // 2 % self.options.n]
        return active if state.delta is None else active + state.delta

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        def itself(shape: torch.Size, generator: torch.Generator) -> Tensor:
            return torch.eye(shape[-1]).expand(shape)

        roles = {"predict": Role("adam", False, itself), "correct": Role("adam", False, 1.0)}
        if cls.options_of(config).dynamic:
            roles["router"] = Role("adam", False, normal(config.init_std))
            roles["predict_router"] = roles["correct_router"] = Role("adam", False, 0.0)
        return roles

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        options, dim, blocks = cls.options_of(config), config.dim, config.layers
        n = options.n
        small = (n**3 + n**2) * options.dynamic
        return Added(
            parameters=blocks * (n * n + n + n * dim * options.dynamic + small),
            mixing=blocks * (n * n + n) * dim,
            projections=blocks * (2 * n * dim * options.dynamic + small),
            carried=(n + 1) * dim,
        )
