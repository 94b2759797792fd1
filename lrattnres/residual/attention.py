"""Attention over depth: every sub-layer chooses what it reads by a softmax over all that was
written before it.

    α_t = softmax over sources i of q_t · RMSNorm(k_i)        m_t = Σ_i α_{t,i} v_i

    h_t = m_t, or o_0 + Σ_{i<t} o_i + m_t

A source's value v_i is the embedding, an output, or the sum of the outputs of a depth block. q_t is
a learned vector of site t, the same for all tokens and zero at the start, so that every read begins
as the mean of its sources. The first site has one source, and reads it: o_0.

The published systems make three choices: how the key k_i is made (keys.py), which sources there are
(plan.py), and whether the mixture replaces the residual stream or is added to it. This file is
their definition, one site at a time. Ablations are in ablated.py, and fused/ reads several sites at
once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import DepthConfig, ModelConfig, Routing
from lrattnres.kernels.backends import DepthKernels
from lrattnres.kernels.reference import depth_weights, rms_norm, weighted_sum
from lrattnres.residual.base import Added, ResidualPath, Role, changed, normal
from lrattnres.residual.keys import PROJECTED, SLICED, VALUE, KeyRule, Source
from lrattnres.residual.plan import ends_of, error_of, named, plan_of


class State(NamedTuple):
    """All that has been written.

    Args:
        sources: the embedding and the complete depth blocks.
        partial: the open block's sum so far; None where the last block is complete.
        stream: o_0 + Σ o_i, if it is read; else None.
    """

    sources: tuple[Source, ...]
    partial: Source | None
    stream: Tensor | None


class AttentionResiduals(ResidualPath):
    """The definition of the attention-residual paths.

    Attributes:
        rule: how a key is made.
        published: what the paper does with the mixture; `model.routing` can change it.
        queries: float32 [M, r], one for each site but the first.
        embedding_key: W_0 [r, d], if keys are emitted: the key of the embedding is W_0·o_0.
    """

    rule: ClassVar[KeyRule]
    published: ClassVar[Routing] = Routing.replace
    start, attends = "scaled", True
    backends = ("triton", "compiled", "reference")
    uses = frozenset({"blocks", "routing", "gate", "depth"})

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.plan = plan_of(config)
        self.rank = self.rule.rank(config.rank, config.dim)
        self.emit_dim = self.rank if self.rule.emits else 0
        self.replaces = (config.routing or self.published) is Routing.replace
        self.keeps_stream = type(self).streams(config)
        self.queries = nn.Parameter(torch.zeros(self.plan.sublayers, self.rank))
        self.embedding_key = nn.Linear(self.dim, self.rank, bias=False) if self.emit_dim else None

    def begin(self, embedding: Tensor) -> State:
        state = State((), None, embedding if self.keeps_stream else None)
        return self.received(state, 0, self.first(embedding))

    def first(self, embedding: Tensor) -> Source:
        """The embedding as a source."""
        if self.embedding_key is None:
            return Source(embedding)
        weight = self.embedding_key.weight.to(embedding.dtype)
        return Source(embedding, F.linear(embedding[..., : self.dim], weight))

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        value, emitted = output.split([output.shape[-1] - self.emit_dim, self.emit_dim], dim=-1)
        if state.stream is not None:
            state = state._replace(stream=state.stream + value)
        return self.received(state, site + 1, self.written(value, emitted))

    def written(self, value: Tensor, emitted: Tensor) -> Source:
        """An output as a source. Emitted keys are normalised before a block sums them."""
        return Source(value, rms_norm(emitted) if self.emit_dim else None)

    def received(self, state: State, site: int, newest: Source) -> State:
        """The state that `site` reads, with the source written last: on its own, or added to its
        block.
        """
        source = newest if state.partial is None else state.partial.plus(newest)
        if self.completes(site):
            return state._replace(sources=(*state.sources, source), partial=None)
        return state._replace(partial=source)

    def completes(self, site: int) -> bool:
        """Whether what was written just before a site is the embedding, or ends a depth block."""
        return site == 0 or self.plan.closes(site - 1)

    def hidden(self, state: State, site: int) -> Tensor:
        if site == 0:  # one source has all the weight
            value = state.sources[0].value
            return weighted_sum(value.new_ones(1), [value])
        sources = self.sources(state, site)
        weights = self.attend(site, sources)
        return self.used(state, site, weighted_sum(weights, [source.value for source in sources]))

    def attend(self, site: int, sources: tuple[Source, ...]) -> Tensor:
        """α of a site over its sources, float32 [..., sources]."""
        keys = [self.rule.key(source, self.rank, self.dim) for source in sources]
        return depth_weights(self.query(site, sources[-1]), keys)

    def sources(self, state: State, site: int) -> tuple[Source, ...]:
        """What a site reads."""
        return state.sources if state.partial is None else (*state.sources, state.partial)

    def query(self, site: int, newest: Source) -> Tensor:
        """q of a site, float32 [r]."""
        return self.queries[site - 1]

    def used(self, state: State, site: int, mixture: Tensor) -> Tensor:
        """h of a site from its mixture m. The first site adds nothing: its mixture is the whole
        stream.
        """
        if self.replaces or site == 0:
            return mixture
        assert state.stream is not None
        return state.stream + mixture.to(state.stream.dtype)

    def weights(self, state: State, site: int) -> Tensor | None:
        return self.attend(site, self.sources(state, site)) if site else None

    def sources_of(self, site: int) -> tuple[range, ...]:
        return self.plan.sources(site)

    @classmethod
    def variant(cls, config: ModelConfig) -> type[ResidualPath]:
        if not (changed(config.depth) or config.gate):
            return cls
        from lrattnres.residual.ablated import ablated

        return ablated(cls)  # type: ignore[arg-type]

    @classmethod
    def build(cls, config: ModelConfig, kernels: DepthKernels) -> ResidualPath:
        if kernels.name == "reference" or cls.beyond_kernels(config):
            return cls(config)
        from lrattnres.residual.fused.executor import together

        return together(cls)(config, kernels)  # type: ignore[arg-type]

    @classmethod
    def streams(cls, config: ModelConfig) -> bool:
        """Whether a read needs the plain stream too."""
        return (config.routing or cls.published) is Routing.add

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        roles = {"queries": Role("adam", False, 0.0)}
        if cls.rule.emits:
            roles["embedding_key.weight"] = Role("muon", True, normal(config.init_std))
        return roles

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        """Appendix A of the low-rank paper: (d + r)·S for the reads, r[L(d + m) + d] for emitted
        keys.
        """
        plan, dim, rank = plan_of(config), config.dim, cls.rule.rank(config.rank, config.dim)
        hidden = config.heads * config.head_width + config.mlp_width
        rows = rank * (config.layers * hidden + dim) if cls.rule.emits else 0
        return Added(
            parameters=rows + plan.sublayers * rank,
            mixing=(dim + rank) * plan.reads,
            projections=rows,
            carried=plan.retained * (dim + rank * cls.rule.emits) + cls.streams(config) * dim,
        )

    @classmethod
    def errors(cls, config: ModelConfig) -> Iterator[str]:
        yield from super().errors(config)
        rank = config.rank
        if cls.rule.ranked and rank is None:
            yield (
                f"model.rank=null: {config.residual} needs a key width; "
                f"write model.rank=… (1 to model.dim={config.dim})"
            )
        elif cls.rule.ranked and rank is not None and not 1 <= rank <= config.dim:
            yield f"model.rank={rank}: must be between 1 and model.dim={config.dim}"
        if error := error_of(config.blocks, 2 * config.layers):
            yield error

    @classmethod
    def settled(cls, config: ModelConfig) -> tuple[ModelConfig, list[str]]:
        config, notes = super().settled(config)
        published, most = DepthConfig().block_scale, 2 * config.layers
        ends = ends_of(config.blocks, most)
        if isinstance(config.blocks, Sequence) and ends == ends_of(len(ends), most):
            sizes = ",".join(map(str, config.blocks))
            notes.append(f"model.blocks=[{sizes}]: recorded as {len(ends)}, the same depth blocks")
            config = dataclasses.replace(config, blocks=len(ends))
        if len(ends) == most and config.depth.block_scale is not published:
            setting = changed(config.depth)["block_scale"]
            notes.append(
                f"{setting} has no meaning for depth blocks of one sub-layer: "
                "recorded as the default"
            )
            depth = dataclasses.replace(config.depth, block_scale=published)
            config = dataclasses.replace(config, depth=depth)
        return config, notes

    @classmethod
    def beyond_kernels(cls, config: ModelConfig) -> list[str]:
        rank = cls.rule.rank(config.rank, config.dim)
        if cls.rule.emits or cls.rule.is_tail(rank, config.dim):
            return []
        return [f"the keys of model.residual={cls.residual}"]

    @classmethod
    def other_routing(cls, routing: str | None) -> str | None:
        return None if routing == cls.published.name else routing

    @classmethod
    def label(cls, config: ModelConfig) -> list[str]:
        routing = [config.routing.name] if config.routing else []
        blocks = named(config.blocks)
        return [
            *routing,
            f"N{blocks}" if config.blocks else blocks,
            *([f"r{config.rank}"] if config.rank else []),
        ]

    @classmethod
    def description(cls, config: ModelConfig) -> str:
        blocks = f"{named(config.blocks)} blocks" if config.blocks else "every sub-layer a source"
        rank = f"rank {cls.rule.rank(config.rank, config.dim)}"
        routing = [f"routing={config.routing.name}"] if config.routing else []
        gate = ["gated"] if config.gate else []
        ablations = changed(config.depth).values()
        return ", ".join([config.residual, blocks, rank, *routing, *gate, *ablations])


class AttnRes(AttentionResiduals):
    """Attention Residuals (arXiv 2603.15031): k_i = v_i, all d columns."""

    residual, rule = "attn_res", VALUE


class ProjectedLowRank(AttentionResiduals):
    """Projected Low-Rank Attention Residuals (arXiv 2607.09694): k_i are r rows more of the
    projection that wrote v_i.
    """

    residual, rule = "p_lr", PROJECTED
    uses = AttentionResiduals.uses | {"rank"}


class SlicedLowRank(AttentionResiduals):
    """Sliced Low-Rank Attention Residuals (arXiv 2607.09694): k_i are the last r columns of v_i."""

    residual, rule = "s_lr", SLICED
    uses = AttentionResiduals.uses | {"rank"}


class Delta(AttentionResiduals):
    """Delta Attention Residuals (arXiv 2605.18855): k_i = v_i, and the mixture is added to the
    stream.
    """

    residual, rule, published = "delta", VALUE, Routing.add
