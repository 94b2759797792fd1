"""Attention residuals with what the papers decided taken back, one setting each; docs/ablations.md
has the equations.

Beside the ablations of `model.depth` this is the home of `model.gate`. With none of them set,
everything here is the definition in attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import (
    BlockScale,
    DepthConfig,
    LogitScale,
    Mixing,
    ModelConfig,
    NormScope,
    Sources,
)
from lrattnres.kernels.reference import (
    Scoring,
    depth_logits,
    depth_weights,
    rms_norm,
    weighted_sum,
    wide,
)
from lrattnres.residual.attention import AttentionResiduals, State
from lrattnres.residual.base import Added, Role, changed, normal
from lrattnres.residual.keys import Source
from lrattnres.residual.plan import DepthPlan, ends_of, plan_of

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
        source_scales: float32, one for each source that the head may read, one at the start; None
            unless `learned_scale`.
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
        count = kept_sources(plan, plan.sublayers)
        self.ablations = Parameters(
            torch.zeros(plan.sublayers, rank, self.dim) if depth.input_queries else None,
            torch.ones(count) if depth.learned_scale else None,
        )
        self.gates = nn.Parameter(torch.zeros(plan.sublayers)) if config.gate else None
        self.heads = depth.heads
        self.scoring = Scoring(depth.key_norm, depth.heads, depth.norm_scope is NormScope.full)
        self.mixing = depth.mixing
        self.attends = depth.mixing is Mixing.softmax  # type: ignore[misc]
        if depth.mixing is Mixing.scalars:
            self.queries = None  # type: ignore[assignment]
            sizes = [len(plan.sources(site)) for site in plan.sites[1:]]
            self.weight = nn.ParameterDict(
                {str(site): torch.zeros(size) for site, size in enumerate(sizes, start=1)}
            )
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
            keys = None
            if before is not None and newest.emitted is not None:
                keys = before + newest.emitted
            newest = Source(state.stream, keys)
            state = state._replace(partial=None)
        state = super().received(state, site, newest)
        if self.completes(site):
            *before_it, last = state.sources
            state = state._replace(sources=(*before_it, self.scaled(last, site)))
        if self.plan.window is not None:  # what has left the window is not read again
            first, *blocks = state.sources
            left = len(blocks) + (state.partial is not None) - self.plan.window
            state = state._replace(sources=(first, *blocks[max(left, 0) :]))
        return state

    def scaled(self, source: Source, site: int) -> Source:
        """A site's newest source as it is read. An emitted key is not scaled with its value."""
        sources = self.plan.sources(site)
        factor, value = self.block_scale(len(sources[-1])), source.value
        scales = self.ablations.source_scales
        if scales is not None and (site > 0 or self.plan.embedding):
            scale = factor * scales[kept_sources(self.plan, site) - 1]
            return source._replace(value=(wide(value) * scale).to(value.dtype))
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
        """α of the mixing that is set, float32 [..., sources], or [sources] of scalars."""
        if self.mixing is Mixing.scalars:
            return wide(self.weight[str(site)])
        keys = [self.rule.key(source, self.rank, self.dim) for source in sources]
        mixed = depth_weights if self.mixing is Mixing.softmax else sigmoid_weights
        return mixed(self.query(site, sources[-1]), keys, self.scoring)

    def weights(self, state: State, site: int) -> Tensor | None:
        return super().weights(state, site) if self.attends else None

    def query(self, site: int, newest: Source) -> Tensor:
        """q_t, or q_t + W_t·RMSNorm(v) of the newest source v: [r] or [..., r], with the factor of
        the logits.
        """
        query, projections = super().query(site, newest), self.ablations.query_projections
        if projections is not None:
            value = newest.value[..., : self.dim]
            weight = projections[site - 1].to(value.dtype)
            query = query + F.linear(rms_norm(value), weight).to(query.dtype)
        return query if self.logit_scale == 1 else self.logit_scale * query

    def used(self, state: State, site: int, mixture: Tensor) -> Tensor:
        """With a gate γ and the plain stream s: s + γ(m − s), or s + γm if the mixture is added."""
        if self.gates is None or site == 0:
            return super().used(state, site, mixture)
        assert state.stream is not None
        mixture = mixture.to(state.stream.dtype)
        step = mixture - state.stream if self.replaces else mixture
        return state.stream + self.gates[site - 1].to(mixture.dtype) * step

    @classmethod
    def begins(cls, config: ModelConfig) -> str:
        depth = config.depth
        if config.gate:
            return "bits"
        same = depth.embedding_source and depth.sources is Sources.outputs and not depth.query_std
        whole = depth.window is None and depth.block_scale is BlockScale.sum
        return super().begins(config) if same and whole else "other"

    @classmethod
    def streams(cls, config: ModelConfig) -> bool:
        return super().streams(config) or plan_of(config).states or config.gate

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        depth, plan, roles = config.depth, plan_of(config), super().roles(config)
        if depth.mixing is Mixing.scalars:
            roles = {"weight.*": Role("adam", False, mean)}
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
        scales = kept_sources(plan, plan.sublayers) if depth.learned_scale else 0
        scaled = depth.learned_scale or depth.block_scale is not BlockScale.sum
        factors = dim * (plan.sublayers + plan.embedding) if scaled else 0
        if depth.mixing is Mixing.scalars:
            added = added._replace(
                parameters=added.parameters - plan.sublayers * rank + plan.reads,
                mixing=dim * plan.reads,
            )
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
                "no sums of blocks; write model.depth.block_scale=sum, or "
                "model.depth.sources=outputs"
            )

        if depth.mixing is not Mixing.softmax:
            yield from cls.mixing_errors(config)

    @classmethod
    def mixing_errors(cls, config: ModelConfig) -> Iterator[str]:
        """What a mixing without a softmax has no place for."""
        given, mixing = changed(config.depth), config.depth.mixing.name
        unused = {"null_source": "nothing is weighed against a source without a value"}
        if config.depth.mixing is Mixing.scalars:
            if cls.rule.ranked:
                yield (
                    "model.depth.mixing=scalars: there are no keys, so "
                    f"model.residual={cls.residual} would not differ from attn_res; "
                    "write model.residual=attn_res"
                )
            scored = (
                "key_norm",
                "logit_scale",
                "query_std",
                "heads",
                "input_queries",
                "norm_scope",
            )
            unused |= dict.fromkeys(scored, "there are no queries and keys")
        for name in [name for name in unused if name in given]:
            yield (
                f"{given[name]}: {unused[name]} in model.depth.mixing={mixing}; leave "
                f"model.depth.{name} out, or write model.depth.mixing=softmax"
            )

    @classmethod
    def settled(cls, config: ModelConfig) -> tuple[ModelConfig, list[str]]:
        config, notes = super().settled(config)
        depth, count = config.depth, len(ends_of(config.blocks, 2 * config.layers))
        without = {}
        if depth.window is not None and depth.window >= count:
            without["window"] = f"{count} depth blocks"
        if depth.norm_scope is NormScope.full and (depth.heads == 1 or not depth.key_norm):
            without["norm_scope"] = "one head" if depth.heads == 1 else "keys without a norm"
        for name, why in without.items():
            setting = changed(depth)[name]
            notes.append(f"{setting} has no meaning for {why}: recorded as the default")
        usual = {name: getattr(DepthConfig(), name) for name in without}
        return replace(config, depth=replace(depth, **usual)), notes

    @classmethod
    def beyond_kernels(cls, config: ModelConfig) -> list[str]:
        beyond = [
            setting
            for name, setting in changed(config.depth).items()
            if name not in WITH_ANY_KERNEL
        ]
        return super().beyond_kernels(config) + beyond


def kept_sources(plan: DepthPlan, site: int) -> int:
    """The embedding and the depth blocks that are there at a site, in or out of its window."""
    return (plan.embedding or site == 0) + len(plan.written(site))


def sigmoid_weights(query: Tensor, keys: Sequence[Tensor], scoring: Scoring) -> Tensor:
    """σ(query · RMSNorm(key)) of every source: as `depth_weights`, but each by itself."""
    return torch.sigmoid(depth_logits(query, keys, scoring))


def mean(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A start: the weights of a mean."""
    return torch.full(shape, 1 / shape[0])


@cache
def ablated(path: type[AttentionResiduals]) -> type[AttentionResiduals]:
    """An attention-residual path with its ablations."""
    return type(f"Ablated{path.__name__}", (Ablated, path), {"__module__": __name__})
