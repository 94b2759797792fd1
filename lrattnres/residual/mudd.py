"""MUDDFormer: after every block, four streams are made of all blocks by weights of the token.

Xiao et al., "MUDDFormer: Breaking Residual Bottlenecks in Transformers via Multiway Dynamic Dense
Connections" (arXiv 2502.12170, equations 3 to 10; the authors' code is Caiyun-AI/MUDDFormer).
Block b reads four streams: attention takes its queries of x^q, its keys of x^k, its values of x^v,
and x^r is the residual stream. With X_0 = o_0, which all streams of the first block are,

    h_{2b−1} = (x^q, x^k, x^v),   h_{2b} = x^r + o_{2b−1},   X_b = h_{2b} + o_{2b}
    W_b = a_b + mat(U_b GELU(V_b RMSNorm(X_b)))   [C_b, b + 1]
    norms=false:  Z_j = X_j                     x^c = Σ_{j ≤ b} W_{b,c,j} Z_j
    norms=true:   Z_j = g_j ⊙ RMSNorm(X_j)      x^c = X_b + Σ_j W_{b,c,j} Z_j, for c = q, k, v
                                                x^r = X_b + g'_b ⊙ RMSNorm(Σ_j W_{b,r,j} Z_j)

for the next block; after block L there is one stream, made as x^r, which the head reads. C_b is
`ways` (4, or 1: one stream for all), C_L = 1. V_b has K_b = C_b(b + 1) rows, four times as many for
b = L with `expand_last`, and (⌊K_b/64⌋ + 1)·64 with `round64`. `dynamic=false` leaves W_b = a_b.

Start: U is zero, V normal with variance 1/d, g is 1 and g' 0.001; a_b is one for X_b and zero else,
or with norms all zero. So a model begins as its baseline, to the last bit, whatever its options.

Where paper and code differ: equation 10 normalises every stream after the sum, the JAX code only
x^r, as here; the PyTorch code has no norms. They are the default here, as for the authors' models
of 24 layers and more: without them training is reported to diverge at that depth. MLPs that widen
with depth (section 2.4) are not part of the path. The JAX code decays all of it; here Adam's
weights do not decay.

Costs Σ_b C_b(b + 1) + K_b·d + K_b·C_b(b + 1) parameters, with norms (2L + 1)d more, and as many
multiply-adds a token, but d for each weight of a sum. A state holds the streams and Z_0 … Z_b. With
norms a coefficient counts a gain by its mean over the channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import ModelConfig
from lrattnres.config.schema import option
from lrattnres.kernels.reference import rms_norm, weighted_sum, wide
from lrattnres.residual.base import Added, Read, ResidualPath, Role, normal

POST_GAIN = 1e-3


class State(NamedTuple):
    """What has been written.

    Args:
        stream: x^r of the open block; with the attention's output added, while the MLP runs.
        reads: x^q, x^k and x^v while the attention runs, if they are not x^r.
        sources: Z_0 … Z_{b−1}.
    """

    stream: Tensor
    reads: tuple[Tensor, ...]
    sources: tuple[Tensor, ...]


class MUDDFormer(ResidualPath):
    residual, start = "mudd", "bits"

    @dataclass(frozen=True)
    class Options:
        ways: int = option(
            "4: streams for queries, keys, values and residual; 1: one for all",
            4,
            at_least=1,
            at_most=4,
        )
        dynamic: bool = option("weights depend on the token", True)
        expand_last: bool = option("V of the last block has four times the rows", True)
        round64: bool = option("rows of V are rounded up to a multiple of 64", True)
        norms: bool = option("sources are normalised, and the sum of the residual stream", True)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        dim, options = self.dim, self.options
        self.linear = not options.norms
        self.static, self.w1, self.w2 = (nn.ParameterDict() for _ in range(3))  # a, V, U
        self.pre_gain, self.post_gain = nn.ParameterDict(), nn.ParameterDict()  # g, g'
        for block, (ways, width) in self.shapes(config).items():
            name, weights = str(block), ways * (block + 1)
            self.static[name] = torch.zeros(ways, block + 1)
            if options.dynamic:
                self.w1[name] = torch.zeros(width, dim)
                self.w2[name] = torch.zeros(weights, width)
            if options.norms:
                self.post_gain[name] = torch.zeros(dim)
        for block in range(config.layers + 1) if options.norms else ():
            self.pre_gain[str(block)] = torch.zeros(dim)

    def begin(self, embedding: Tensor) -> State:
        return State(embedding, (), (self.source(embedding, 0),))

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        stream = state.stream + output
        if site % 2 == 0:  # attention
            return State(stream, (), state.sources)
        block = site // 2 + 1
        sources = (*state.sources, self.source(stream, block))
        weights = self.weights_of(stream, block)
        *reads, last = (weighted_sum(way, sources) for way in weights.unbind(-2))
        if self.options.norms:
            reads = [wide(stream) + read for read in reads]
            last = wide(stream) + self.gained(last, self.post_gain[str(block)])
        reads = [read.to(stream.dtype) for read in reads]
        kept = sources if block < self.config.layers else ()
        return State(last.to(stream.dtype), tuple(reads), kept)

    def source(self, block: Tensor, number: int) -> Tensor:
        """Z of the stream after a block."""
        if not self.options.norms:
            return block
        return self.gained(wide(block), self.pre_gain[str(number)]).to(block.dtype)

    def gained(self, x: Tensor, gain: Tensor) -> Tensor:
        """g ⊙ RMSNorm(x), float32; the norm is that of the first d columns."""
        own = x[..., : self.dim]
        scale = torch.rsqrt(own.square().mean(-1, keepdim=True) + self.eps)
        if beyond := x.shape[-1] - self.dim:
            gain = torch.cat([gain, gain.mean().expand(beyond)])
        return x * scale * wide(gain)

    def weights_of(self, stream: Tensor, block: int) -> Tensor:
        """W of a block, float32 [..., C, b + 1]."""
        name = str(block)
        static = wide(self.static[name])
        if not self.options.dynamic:
            return static
        normed = rms_norm(wide(stream[..., : self.dim]), self.eps)
        inner = F.gelu(F.linear(normed, wide(self.w1[name])))
        return static + F.linear(inner, wide(self.w2[name])).unflatten(-1, static.shape)

    def read(self, state: State, site: int) -> Read:
        return Read(*(rms_norm(x, self.eps) for x in state.reads or (state.stream,)))

    def hidden(self, state: State, site: int) -> Tensor:
        return state.reads[0] if state.reads else state.stream

    @classmethod
    def shapes(cls, config: ModelConfig) -> dict[int, tuple[int, int]]:
        """C_b and K_b of each block, counted from 1."""
        options, layers, shapes = cls.options_of(config), config.layers, {}
        for block in range(1, layers + 1):
            ways = options.ways if block < layers else 1
            width = ways * (block + 1)
            if block == layers and options.expand_last:
                width *= 4
            shapes[block] = ways, (width // 64 + 1) * 64 if options.round64 else width
        return shapes

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        options = cls.options_of(config)

        def newest_alone(shape: torch.Size, generator: torch.Generator) -> Tensor:
            return torch.eye(shape[1])[-1].expand(shape)

        roles = {"static.*": Role("adam", True, 0.0 if options.norms else newest_alone)}
        if options.dynamic:
            roles["w1.*"] = Role("adam", True, normal(config.dim**-0.5))
            roles["w2.*"] = Role("adam", True, 0.0)
        if options.norms:
            roles["pre_gain.*"] = Role("adam", True, 1.0)
            roles["post_gain.*"] = Role("adam", True, POST_GAIN)
        return roles

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        options, dim = cls.options_of(config), config.dim
        weights = maps = 0
        for block, (ways, width) in cls.shapes(config).items():
            count = ways * (block + 1)
            weights += count
            maps += options.dynamic * width * (dim + count)
        gains = options.norms * (2 * config.layers + 1) * dim
        streams = options.ways if config.layers > 1 else 1
        return Added(
            parameters=weights + maps + gains,
            mixing=weights * dim + gains,
            projections=maps,
            carried=(config.layers + streams) * dim,
        )

    @classmethod
    def errors(cls, config: ModelConfig) -> Iterator[str]:
        yield from (found := list(super().errors(config)))
        if not found and (ways := cls.options_of(config).ways) not in (1, 4):
            yield f"model.path.ways={ways}: must be 1 or 4"

    @classmethod
    def settled(cls, config: ModelConfig) -> tuple[ModelConfig, list[str]]:
        config, notes = super().settled(config)
        options, published = cls.options_of(config), cls.Options()
        if not options.dynamic:
            same = {"expand_last": published.expand_last, "round64": published.round64}
            for name in [name for name in same if config.path[name] != same[name]]:
                notes.append(
                    f"model.path.{name} has no meaning for model.path.dynamic=false: "
                    "recorded as the default"
                )
            config = replace(config, path=config.path | same)
        return config, notes
