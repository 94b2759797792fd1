"""DeepCrossAttention: queries, keys and values each read their own weighted sum of all outputs.

Heddes et al., "DeepCrossAttention: Supercharging Transformer Residual Connections" (arXiv
2502.06785, section 3). With Δ_0 = o_0 and Δ_b = o_{2b−1} + o_{2b}, what block b adds, the sources
of block b = 1 … L, and of the head b = L + 1, are G = (Δ_0, …, Δ_{b−1}); with `last` = k they are
(Δ_0, the sum of those between, Δ_{b−k}, …, Δ_{b−1}) where that is fewer. Way c is a generalised
residual network (GRN):

    ω_{c,j} = B_{b,c,j}                                    version 1: a number, 2: one a channel
    ω_{c,j} = B_{b,c,j} + ReLU(w_{b,c} · RMSNorm(G_j))     version 3: and one that the token chooses
    h^c = Σ_j ω_{c,j} ⊙ G_j

Attention reads h^q, h^k, h^v (`ways=3`) or one h (`ways=1`, a GRN alone); the block's own residual
stream is h^q, so h_{2b} = h^q + o_{2b−1}. The head has one way.

Start: B is one and w normal with standard deviation 0.01 (at zero its ReLU would have no gradient).
Versions 1 and 2 begin as the baseline but for rounding; version 3 is near, its logits within some
percent.

Where the source is open: there is no code of the authors. The figure does not show which read the
block's own stream carries: h^q, as PyPI's deep-cross-attention. RMSNorm before w is that code's. It
leaves the sources between out, the paper sums them. Weight decay is not published: none.

Costs, with s_b sources and w_b ways at b: Σ w_b·s_b parameters for version 1, Σ w_b·s_b·d for 2 and
Σ w_b·(s_b·d + d) for 3; d·Σ w_b·s_b multiply-adds a token, for version 3 twice. A state holds the
sources and three reads, or one. Of versions 2 and 3 a coefficient is the mean over the channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lrattnres.config import ModelConfig
from lrattnres.config.schema import option
from lrattnres.kernels.reference import rms_norm, wide
from lrattnres.residual.base import Added, Read, ResidualPath, Role, normal


class State(NamedTuple):
    """What has been written.

    Args:
        sources: G of the open block, or of the head.
        reads: h^q, h^k, h^v of the attention, or h of one way; h alone for MLP and head.
        attended: o_{2b−1} while the MLP runs; else None.
    """

    sources: tuple[Tensor, ...]
    reads: tuple[Tensor, ...]
    attended: Tensor | None


class DeepCrossAttention(ResidualPath):
    residual, start = "dca", "other"

    @dataclass(frozen=True)
    class Options:
        version: int = option(
            "what a weight is: 1 (a number), 2 (one a channel), 3 (and one of the token)",
            3,
            at_least=1,
            at_most=3,
        )
        ways: int = option(
            "3: queries, keys and values read apart; 1: they read one sum", 3, at_least=1, at_most=3
        )
        last: int | None = option(
            "newest sources that are read one by one, the older ones as a sum; null: all",
            None,
            at_least=1,
        )

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        version, dim = self.options.version, self.dim
        self.linear = version == 1
        self.weight, self.score = nn.ParameterDict(), nn.ParameterDict()
        for block, (ways, sources) in self.shapes(config).items():
            shape = (ways, sources) if version == 1 else (ways, sources, dim)
            self.weight[str(block)] = torch.zeros(shape)
            if version == 3:
                self.score[str(block)] = torch.zeros(ways, dim)

    def begin(self, embedding: Tensor) -> State:
        return self.enter((embedding,), 1)

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        if state.attended is None:  # attention
            return State(state.sources, (state.reads[0] + output,), output)
        block = site // 2 + 1
        return self.enter(self.shortened((*state.sources, state.attended + output)), block + 1)

    def enter(self, sources: tuple[Tensor, ...], block: int) -> State:
        """The state before a block, counted from 1, or before the head, block L + 1."""
        weights = self.weight[str(block)]
        added = None
        if self.options.version == 3:
            normed = torch.stack([rms_norm(wide(g[..., : self.dim]), self.eps) for g in sources])
            found = torch.relu(normed @ wide(self.score[str(block)]).T)  # [sources, ..., ways]
            added = found.unsqueeze(-1).unbind(-2)
        reads = []
        for way, weight in enumerate(weights.unbind(0)):
            total: Tensor | float = 0.0
            for j, source in enumerate(sources):
                omega = wide(weight[j]).reshape(-1)
                if beyond := source.shape[-1] - self.dim:
                    omega = torch.cat([omega.expand(self.dim), omega.mean().expand(beyond)])
                total = total + (omega if added is None else omega + added[way][j]) * wide(source)
            reads.append(total.to(sources[0].dtype))  # type: ignore[union-attr]
        return State(sources, tuple(reads), None)

    def shortened(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The sources that are left when the two oldest sums but the embedding are one."""
        last = self.options.last
        if last is None or len(sources) <= last + 2:
            return sources
        first, old, older, *others = sources
        return (first, old + older, *others)

    def read(self, state: State, site: int) -> Read:
        return Read(*(rms_norm(read, self.eps) for read in state.reads))

    def hidden(self, state: State, site: int) -> Tensor:
        return state.reads[0]

    @classmethod
    def errors(cls, config: ModelConfig) -> Iterator[str]:
        yield from (found := list(super().errors(config)))
        if found:
            return
        options, layers = cls.options_of(config), config.layers
        if options.ways not in (1, 3):
            yield f"model.path.ways={options.ways}: must be 1 or 3"
        if options.last is not None and options.last >= layers:
            yield (
                f"model.path.last={options.last}: with model.layers={layers} no source would be "
                "summed; write model.path.last=null"
            )

    @classmethod
    def begins(cls, config: ModelConfig) -> str:
        return "other" if cls.options_of(config).version == 3 else "scaled"

    @classmethod
    def shapes(cls, config: ModelConfig) -> dict[int, tuple[int, int]]:
        """Ways and sources of each block, counted from 1, and of the head."""
        options, layers = cls.options_of(config), config.layers
        most = layers + 1 if options.last is None else options.last + 2
        return {
            block: (options.ways if block <= layers else 1, min(block, most))
            for block in range(1, layers + 2)
        }

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        roles = {"weight.*": Role("adam", False, 1.0)}
        if cls.options_of(config).version == 3:
            roles["score.*"] = Role("adam", False, normal(0.01))
        return roles

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        options, dim, shapes = cls.options_of(config), config.dim, cls.shapes(config).values()
        pairs, ways = sum(w * s for w, s in shapes), sum(w for w, _ in shapes)
        dynamic, channels = options.version == 3, 1 if options.version == 1 else dim
        return Added(
            parameters=pairs * channels + dynamic * ways * dim,
            mixing=pairs * dim,
            projections=dynamic * pairs * dim,
            carried=(max(s for _, s in list(shapes)[:-1]) + max(options.ways, 2)) * dim,
        )
