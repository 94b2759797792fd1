"""Hyper-Connections: n residual streams in place of one, and weights that read, mix and write
them.

Zhu et al., "Hyper-Connections" (arXiv 2409.19606, section 2). S has n rows S_j, each of width
d, and starts as S_j = o_0. With Ŝ = norm(S), row by row, site t = 1 … M computes

    A = A^static_t + s^α_t · tanh(Ŝ W^α_t)   [n, n + 1]
    β = β^static_t + s^β_t · tanh(Ŝ w^β_t)   [n]
    h_t = Σ_j A_{j,0} S_j          S'_k = Σ_j A_{j,k} S_j          S_k = S'_k + β_k o_t

and the head reads h_{M+1} = Σ_k S_k. `dynamic=false` leaves A^static and β^static alone (SHC).

Start: A^static_t = (e_{(t−1) mod n} | I_n) and β^static = 1; W and w are zero, s is 0.01. All
streams are then the residual stream: every inner read is the baseline's to the last bit, and
the head's h is n times the baseline's, which its norm takes away.

Where paper and code differ: equation 10 does not name the norm; the paper's Algorithm 2 and
the public code of corl-team take LayerNorm, here without gain and bias (ε = 1e-5), PyPI's
hyper-connections takes RMSNorm, which is `norm=rms`. A layer of the paper is a sub-layer here.
The paper scales the initial output projections by √n and does not say whether up or down; here
the body's start is left alone. It decays W, w and s, and not the static weights; here Adam's
weights do not decay.

Costs M·n(n + 2) parameters and M·n(n + 2)·d multiply-adds a token; dynamic weights are M(d(n +
2) + 2) parameters more, and as many multiply-adds again. A state holds n + 1 vectors of width
d and the n numbers β.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import ModelConfig
from lrattnres.config.schema import option
from lrattnres.kernels.backends import DepthKernels
from lrattnres.kernels.launch import MOST_STREAMS
from lrattnres.kernels.reference import rms_norm, weighted_sum, wide
from lrattnres.residual.base import Added, ResidualPath, Role


class State(NamedTuple):
    """What a sub-layer leaves alone while it runs.

    Args:
        streams: S' of the next site, n of [..., d]; none for the head.
        write: β of the next site, float32 [..., n]; None for the head.
        hidden: its h, [..., d].
    """

    streams: tuple[Tensor, ...]
    write: Tensor | None
    hidden: Tensor


class Streams(ResidualPath):
    """n streams of width d; its subclasses say with which weights a site uses them."""

    backends = ("triton", "reference")

    def connections(self, streams: Sequence[Tensor], site: int) -> tuple[Tensor, Tensor]:
        """A [..., n, n + 1], whose first column reads, and β [..., n]; float32.

        Args:
            streams: n of [..., at least d]; the weights depend on the first d columns.
            site: below M.
        """
        raise NotImplementedError

    def joined(self, streams: Sequence[Tensor]) -> Tensor:
        """What the head reads of the last streams, float32 [..., d]."""
        raise NotImplementedError

    @classmethod
    def build(cls, config: ModelConfig, kernels: DepthKernels) -> ResidualPath:
        if kernels.name != "triton" or cls.beyond_kernels(config):
            return cls(config)
        from lrattnres.residual.fused.streams import IN_TRITON

        return IN_TRITON.get(cls, cls)(config)

    @classmethod
    def beyond_kernels(cls, config: ModelConfig) -> list[str]:
        n = cls.options_of(config).n
        return [f"model.path.n={n}"] if n > MOST_STREAMS else []

    def begin(self, embedding: Tensor) -> State:
        return self.arrive((embedding,) * self.options.n, 0)

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        assert state.write is not None
        written = state.write.unsqueeze(-1).unbind(-2)
        streams = [
            torch.addcmul(wide(stream), beta, wide(output)).to(output.dtype)
            for stream, beta in zip(state.streams, written, strict=True)
        ]
        return self.arrive(streams, site + 1)

    def arrive(self, streams: Sequence[Tensor], site: int) -> State:
        """All that `site` takes of its streams."""
        dtype = streams[0].dtype
        if site == 2 * self.config.layers:
            return State((), None, self.joined(streams).to(dtype))
        mixing, write = self.connections(streams, site)
        hidden, *mixed = (weighted_sum(weights, streams).to(dtype) for weights in mixing.unbind(-1))
        return State(tuple(mixed), write, hidden)

    def hidden(self, state: State, site: int) -> Tensor:
        return state.hidden


def sum_of(streams: Sequence[Tensor]) -> Tensor:
    """Σ_k S_k in float32."""
    total = wide(streams[0])
    for stream in streams[1:]:
        total = total + wide(stream)
    return total


class Norm(Enum):
    layer = "layer"
    rms = "rms"


class LearnedConnections(ResidualPath):
    """The weights of hyper-connections: static ones, and what a token adds to them."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        (count, width, outputs), sites = self.shape(config), 2 * config.layers
        self.static_alpha = nn.Parameter(torch.zeros(sites, count, outputs))
        self.static_beta = nn.Parameter(torch.zeros(sites, count))
        if self.options.dynamic:
            self.dynamic_alpha = nn.Parameter(torch.zeros(sites, width, outputs))
            self.dynamic_beta = nn.Parameter(torch.zeros(sites, width))
            self.scale_alpha = nn.Parameter(torch.zeros(sites))
            self.scale_beta = nn.Parameter(torch.zeros(sites))

    @classmethod
    def shape(cls, config: ModelConfig) -> tuple[int, int, int]:
        """How many parts are mixed, how wide each is, and how many mixtures a site makes."""
        raise NotImplementedError

    @classmethod
    def first_mixing(cls, site: int, count: int) -> Tensor:
        """A^static of a site at the start."""
        raise NotImplementedError

    def connections(self, streams: Sequence[Tensor], site: int) -> tuple[Tensor, Tensor]:
        """A [..., parts, mixtures] and β [..., parts], float32; no leading axes if not dynamic."""
        if not self.options.dynamic:
            return wide(self.static_alpha[site]), wide(self.static_beta[site])
        maps = self.maps(site)
        found = [self.normed(stream[..., : len(maps)]) @ maps for stream in streams]
        return self.formed(torch.stack(found, -2), site)

    def maps(self, site: int) -> Tensor:
        """(W w), float32 [width, mixtures + 1]."""
        return wide(torch.cat([self.dynamic_alpha[site], self.dynamic_beta[site, :, None]], dim=-1))

    def formed(self, found: Tensor, site: int) -> tuple[Tensor, Tensor]:
        """A and β of Ŝ (W w), float32 [..., parts, mixtures + 1]."""
        if self.options.tanh:
            found = found.tanh()
        alpha = wide(self.static_alpha[site]) + self.scale_alpha[site] * found[..., :-1]
        return alpha, wide(self.static_beta[site]) + self.scale_beta[site] * found[..., -1]

    def normed(self, stream: Tensor) -> Tensor:
        """Ŝ, float32."""
        if self.options.norm is Norm.rms:
            return rms_norm(wide(stream), self.eps)
        return F.layer_norm(wide(stream), stream.shape[-1:])

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        count = cls.shape(config)[0]

        def mixing(shape: torch.Size, generator: torch.Generator) -> Tensor:
            return torch.stack([cls.first_mixing(site, count) for site in range(shape[0])])

        roles = {
            "static_alpha": Role("adam", False, mixing),
            "static_beta": Role("adam", False, 1.0),
        }
        if cls.options_of(config).dynamic:
            for name in ("alpha", "beta"):
                roles[f"dynamic_{name}"] = Role("adam", True, 0.0)
                roles[f"scale_{name}"] = Role("adam", True, 0.01)
        return roles

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        (count, width, outputs), sites = cls.shape(config), 2 * config.layers
        parameters, weights = count * (outputs + 1), count * (outputs + 1) * width
        learned = width * (outputs + 1) + 2 if cls.options_of(config).dynamic else 0
        projections = weights if learned else 0
        return Added(
            parameters=sites * (parameters + learned),
            mixing=sites * weights,
            projections=sites * projections,
            carried=count * width + config.dim,
        )

    @classmethod
    def settled(cls, config: ModelConfig) -> tuple[ModelConfig, list[str]]:
        config, notes = super().settled(config)
        options, published = cls.options_of(config), cls.Options()
        if not options.dynamic:
            same = {"norm": published.norm.name, "tanh": published.tanh}
            for name in [name for name in same if config.path[name] != same[name]]:
                notes.append(
                    f"model.path.{name} has no meaning for model.path.dynamic=false: "
                    "recorded as the default"
                )
            config = replace(config, path=config.path | same)
        return config, notes


class HyperConnections(LearnedConnections, Streams):
    residual, start = "hc", "scaled"

    @dataclass(frozen=True)
    class Options:
        n: int = option("streams", 4, at_least=1, at_most=64)
        dynamic: bool = option("weights depend on the token", True)
        norm: Norm = option(
            "what dynamic weights are made of: layer (LayerNorm) or rms", Norm.layer
        )
        tanh: bool = option("dynamic weights are bounded by tanh", True)

    def joined(self, streams: Sequence[Tensor]) -> Tensor:
        return sum_of(streams)

    @classmethod
    def beyond_kernels(cls, config: ModelConfig) -> list[str]:
        static = [] if cls.options_of(config).dynamic else ["model.path.dynamic=false"]
        return [*super().beyond_kernels(config), *static]

    @classmethod
    def shape(cls, config: ModelConfig) -> tuple[int, int, int]:
        n = cls.options_of(config).n
        return n, config.dim, n + 1

    @classmethod
    def first_mixing(cls, site: int, count: int) -> Tensor:
        streams = torch.eye(count)
        return torch.cat([streams[:, site % count, None], streams], dim=1)
