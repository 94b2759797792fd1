"""Highway networks: a gate decides how much of an output replaces the stream.

Srivastava, Greff, Schmidhuber, "Highway Networks" (arXiv 1505.00387). With x_1 = o_0 and h_t =
x_t, sub-layer t = 1 … M computes

    T_t = σ(W_t·RMSNorm(x_t) + b_t)          x_{t+1} = T_t ⊙ o_t + (1 − T_t) ⊙ x_t

`gate=scalar` has one T a token (W_t [1, d]), `gate=vector` one a channel (W_t [d, d], the
paper's, which costs a sixth of the model's compute).

Start: "other". W is N(0, init_std²) and b is −2: the paper asks for a negative one, −1 to −3.
The paper's gate reads its input as it is; here it is normalised, as every sub-layer's. Decay
is not published.

Costs M(d + 1) parameters and 3Md multiply-adds a token; the vector gate M(d² + d) and M(d² +
2d). A state holds one vector of width d. With a vector gate an output has a coefficient for
each channel: what `hidden` gives in further columns is weighted by the mean of T over
channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import ModelConfig
from lrattnres.config.schema import option
from lrattnres.kernels.reference import rms_norm, wide
from lrattnres.residual.base import Added, ResidualPath, Role, normal


class Gate(Enum):
    scalar = "scalar"
    vector = "vector"


class State(NamedTuple):
    stream: Tensor  # x


class Highway(ResidualPath):
    residual, start = "highway", "other"

    @dataclass(frozen=True)
    class Options:
        gate: Gate = option("scalar: one gate a token; vector: one for each channel", Gate.scalar)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        sites, width = 2 * config.layers, self.gates(config)
        self.linear = self.options.gate is Gate.scalar
        self.gate = nn.Parameter(torch.zeros(sites, width, self.dim))
        self.gate_bias = nn.Parameter(torch.zeros(sites, width))

    def begin(self, embedding: Tensor) -> State:
        return State(embedding)

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        stream = wide(state.stream)
        gate = self.carry(stream, site)
        return State((gate * wide(output) + (1 - gate) * stream).to(output.dtype))

    def carry(self, stream: Tensor, site: int) -> Tensor:
        """T, float32 [..., 1], or as wide as the stream."""
        normed = rms_norm(stream[..., : self.dim], self.eps)
        weight, bias = self.gate[site].to(normed.dtype), self.gate_bias[site].to(normed.dtype)
        gate = torch.sigmoid(F.linear(normed, weight, bias))
        beyond = stream.shape[-1] - self.dim
        if self.linear or not beyond:
            return gate
        return torch.cat([gate, gate.mean(-1, keepdim=True).expand(*gate.shape[:-1], beyond)], -1)

    def hidden(self, state: State, site: int) -> Tensor:
        return state.stream

    @classmethod
    def gates(cls, config: ModelConfig) -> int:
        """Gates of a token."""
        return 1 if cls.options_of(config).gate is Gate.scalar else config.dim

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        return {
            "gate": Role("adam", False, normal(config.init_std)),
            "gate_bias": Role("adam", False, -2.0),
        }

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        sites, dim, gates = 2 * config.layers, config.dim, cls.gates(config)
        return Added(sites * gates * (dim + 1), 2 * sites * dim, sites * gates * dim, dim)
