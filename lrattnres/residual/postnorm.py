"""PostNorm: the stream is normalised after every sub-layer, as in the first transformer; and
DeepNorm.

Vaswani et al., "Attention Is All You Need" (arXiv 1706.03762); Wang et al., "DeepNet: Scaling
Transformers to 1,000 Layers" (arXiv 2203.00555). With s_0 = RMSNorm(o_0), sub-layer t = 1 … M
reads s_{t−1} as it is, and

    s_t = RMSNorm(g·s_{t−1} + o_t)          the head reads RMSNorm(s_M)

g is `branch`: 1 for PostNorm, (2L)^¼ for the DeepNorm of a decoder.

Start: "other"; a normalised stream cannot begin as its baseline. DeepNorm also multiplies the
initial output projections, values and MLPs by (8L)^−¼; here the body's start is left alone,
and `model.init_std` changes all of it. The papers normalise by LayerNorm with gain and bias,
and give o_0 to the first sub-layer as it is; here every read is normalised, as the body
promises, and the norm is the body's. Needs a learning rate of 3e-4 or less.

Costs no parameters, and nothing; DeepNorm Md multiply-adds a token. A state holds one vector
of width d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lrattnres.config import ModelConfig
from lrattnres.config.schema import option
from lrattnres.kernels.reference import rms_norm, wide
from lrattnres.residual.base import Added, Read, ResidualPath


class State(NamedTuple):
    stream: Tensor  # s


class PostNorm(ResidualPath):
    residual, start = "postnorm", "other"

    @dataclass(frozen=True)
    class Options:
        branch: float = option(
            "g, the factor of the stream; DeepNorm: (2·model.layers)^(1/4)", 1.0, at_least=1e-6
        )

    def begin(self, embedding: Tensor) -> State:
        return State(self.normed(wide(embedding)).to(embedding.dtype))

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        total = self.options.branch * wide(state.stream) + wide(output)
        return State(self.normed(total).to(output.dtype))

    def normed(self, value: Tensor) -> Tensor:
        """Divided by the root mean square of its first d columns."""
        own = value[..., : self.dim]
        return value * torch.rsqrt(own.square().mean(-1, keepdim=True) + self.eps)

    def hidden(self, state: State, site: int) -> Tensor:
        return state.stream

    def read(self, state: State, site: int) -> Read:
        if site < 2 * self.config.layers:
            return Read(state.stream)
        return Read(rms_norm(state.stream, self.eps))

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        scaled = cls.options_of(config).branch != 1
        return Added(0, 2 * config.layers * config.dim * scaled, 0, config.dim)
