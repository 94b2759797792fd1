"""Attention residuals with what the papers decided taken back, one setting each; docs/ablations.md has the equations.

Beside the ablations of `model.depth` this is the home of `model.gate`. With none of them set, everything here is the
definition in attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import BlockScale, LogitScale, ModelConfig, Sources
from lrattnres.kernels.reference import Scoring, depth_weights, rms_norm, weighted_sum
from lrattnres.residual.attention import AttentionResiduals, State
from lrattnres.residual.base import Added, Role, changed, normal
from lrattnres.residual.keys import Source
from lrattnres.residual.plan import plan_of

# The value of a depth block of n outputs, as a share of their sum.
BLOCK_SCALES = {
    BlockScale.sum: lambda n: 1.0,
    BlockScale.mean: lambda n: 1 / n,
    BlockScale.sqrt: lambda n: n**-0.5,
}
LOGIT_SCALES = {LogitScale.none: lambda width: 1.0, LogitScale.rsqrt: lambda width: width**-0.5}
# A factor of the query, and its start: a kernel need not know of them.
WITH_ANY_KERNEL = ("logit_scale", "query_std")


class Parameters(nn.Module):
    """What ablations learn.

    Args:
        query_projections: float32 [M, r, d], zero at the start; None unless `input_queries`.
        source_scales: float32, one for each source that the head may read, one at the start; None unless `learned_scale`.
    """

    def __init__(self, query_projections: Tensor | None, source_scales: Tensor | None):
        super().__init__()
        self.query_projections = (
            None if query_projections is None else nn.Parameter(query_projections)
        )
        self.source_scales = None if source_scales is None else nn.Parameter(source_scales)


class Ablated(AttentionResiduals):
    """`model.depth` and `model.gate`.

    Attributes:
        gates: float32 [M], zero at the start, with `model.gate`; else None.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        depth, plan, rank = config.depth, self.plan, self.rank
        count = sum(map(bool, plan.sources(plan.sublayers)))
        self.ablations = Parameters(
            torch.zeros(plan.sublayers, rank, self.dim) if depth.input_queries else None,
            torch.ones(count) if depth.learned_scale else None,
        )
        self.gates = nn.Parameter(torch.zeros(plan.sublayers)) if config.gate else None
        self.heads = depth.heads
        self.scoring = Scoring(depth.key_norm, depth.heads)
        self.block_scale = BLOCK_SCALES[depth.block_scale]
        self.logit_scale = LOGIT_SCALES[depth.logit_scale](rank // depth.heads)
        if not plan.embedding and not plan.states:
            self.embedding_key = None  # nobody reads the embedding, so nobody needs its key

    def first(self, embedding: Tensor) -> Source:
        source = super().first(embedding)
        if source.emitted is not None and self.plan.states:  # it is summed with the others
            return self.written(embedding, source.emitted)
        return source

    def written(self, value: Tensor, emitted: Tensor) -> Source:
        if self.emit_dim and not self.scoring.normalize:
            return Source(value, emitted)
        return super().written(value, emitted)

    def received(self, state: State, site: int, newest: Source) -> State:
        if self.plan.states and site:  # a source is the stream after it, with all keys so far
            before = (state.partial or state.sources[-1]).emitted
            assert state.stream is not None
            both = before is not None and newest.emitted is not None
            newest = Source(state.stream, before + newest.emitted if both else None)  # type: ignore[operator]
            state = state._replace(partial=None)
        state = super().received(state, site, newest)
        if self.completes(site):
            *before_it, last = state.sources
            return state._replace(sources=(*before_it, self.scaled(last, site)))
        return state

    def scaled(self, source: Source, site: int) -> Source:
        """The newest source of a site as it is read. An emitted key is not scaled with its value."""
        sources = self.plan.sources(site)
        factor, value = self.block_scale(len(sources[-1])), source.value
        scales = self.ablations.source_scales
        if scales is not None and (site > 0 or self.plan.embedding):
            wide = value if value.dtype == torch.float64 else value.float()
            scale = factor * scales[sum(map(bool, sources)) - 1]
            return source._replace(value=(wide * scale).to(value.dtype))
        return source if factor == 1 else source._replace(value=factor * value)

    def sources(self, state: State, site: int) -> tuple[Source, ...]:
        if state.partial is not None:
            state = state._replace(partial=self.scaled(state.partial, site))
        written = super().sources(state, site)
        written = written if self.plan.embedding or site == 0 else written[1:]
        return (written[-1].nothing(), *written) if self.plan.null and site else written

    def hidden(self, state: State, site: int) -> Tensor:
        if site == 0 or self.heads == 1:
            return super().hidden(state, site)
        sources = self.sources(state, site)
        weights, values = self.attend(site, sources), [source.value for source in sources]
        own = [self.scoring.split(value[..., : self.dim]) for value in values]
        mixture = self.scoring.join(weighted_sum(weights, own))
        if (
            values[0].shape[-1] > self.dim
        ):  # columns that belong to no head take the mean over heads
            rest = weighted_sum(weights.mean(-2), [value[..., self.dim :] for value in values])
            mixture = torch.cat([mixture, rest], dim=-1)
        return self.used(state, site, mixture)

    def attend(self, site: int, sources: tuple[Source, ...]) -> Tensor:
        keys = [self.rule.key(source, self.rank, self.dim) for source in sources]
        return depth_weights(self.query(site, sources[-1]), keys, self.scoring)

    def query(self, site: int, newest: Source) -> Tensor:
        """q_t, or q_t + W_t·RMSNorm(v) of the newest source v: [r] or [..., r], with the factor of the logits."""
        query, projections = super().query(site, newest), self.ablations.query_projections
        if projections is not None:
            value = newest.value[..., : self.dim]
            weight = projections[site - 1].to(value.dtype)
            query = query + F.linear(rms_norm(value), weight).to(query.dtype)
        return query if self.logit_scale == 1 else self.logit_scale * query

    def used(self, state: State, site: int, mixture: Tensor) -> Tensor:
        """With a gate γ and the plain stream s: s + γ(m − s), or s + γm where the mixture is added."""
        if self.gates is None or site == 0:
            return super().used(state, site, mixture)
        assert state.stream is not None
        mixture = mixture.to(state.stream.dtype)
        step = mixture - state.stream if self.replaces else mixture
        return state.stream + self.gates[site - 1].to(mixture.dtype) * step

    @classmethod
    def streams(cls, config: ModelConfig) -> bool:
        return super().streams(config) or plan_of(config).states or config.gate

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        depth, plan, roles = config.depth, plan_of(config), super().roles(config)
        if depth.query_std:
            roles["queries"] = Role("adam", False, normal(depth.query_std))
        if depth.input_queries:
            roles["ablations.query_projections"] = Role("adam", False, 0.0)
        if depth.learned_scale:
            roles["ablations.source_scales"] = Role("adam", False, 1.0)
        if config.gate:
            roles["gates"] = Role("adam", False, 0.0)
        if not plan.embedding and not plan.states:
            roles.pop("embedding_key.weight", None)
        return roles

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        added, plan, depth, dim = super().cost(config), plan_of(config), config.depth, config.dim
        rank = cls.rule.rank(config.rank, dim)
        unread = rank * dim if cls.rule.emits and not (plan.embedding or plan.states) else 0
        queries = plan.sublayers * rank * dim if depth.input_queries else 0
        gates = plan.sublayers if config.gate else 0
        scales = sum(map(bool, plan.sources(plan.sublayers))) if depth.learned_scale else 0
        scaled = depth.learned_scale or depth.block_scale is not BlockScale.sum
        factors = dim * (plan.sublayers + plan.embedding) if scaled else 0
        return added._replace(
            parameters=added.parameters - unread + queries + gates + scales,
            projections=added.projections - unread + queries + factors + gates * dim,
        )

    @classmethod
    def errors(cls, config: ModelConfig) -> Iterator[str]:
        yield from super().errors(config)
        depth, dim = config.depth, config.dim
        rank = cls.rule.rank(config.rank, dim)
        if depth.heads >= 1 and rank >= 1 and (rank % depth.heads or dim % depth.heads):
            both = [n for n in range(1, rank + 1) if rank % n == dim % n == 0]
            ranked = f"model.rank={rank} and " if cls.rule.ranked else ""
            near = min(both, key=lambda n: abs(n - depth.heads), default=1)
            yield (
                f"model.depth.heads={depth.heads}: must divide {ranked}model.dim={dim}; "
                f"write model.depth.heads={near}"
            )
        if depth.sources is Sources.states and depth.block_scale is not BlockScale.sum:
            yield (
                f"model.depth.block_scale={depth.block_scale.name}: model.depth.sources=states are "
                "no sums of blocks; write model.depth.block_scale=sum, or model.depth.sources=outputs"
            )

    @classmethod
    def beyond_kernels(cls, config: ModelConfig) -> list[str]:
        beyond = [
            setting
            for name, setting in changed(config.depth).items()
            if name not in WITH_ANY_KERNEL
        ]
        return super().beyond_kernels(config) + beyond


@cache
def ablated(path: type[AttentionResiduals]) -> type[AttentionResiduals]:
    """An attention-residual path with its ablations."""
    return type(f"Ablated{path.__name__}", (Ablated, path), {"__module__": __name__})
