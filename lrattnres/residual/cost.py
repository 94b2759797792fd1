"""What depth routing costs, counted from the plan: Appendix A of the low-rank paper.

Compute is in multiply-adds a token. Softmax and normalisation are of lower order and left out, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from lrattnres.config import BlockScale, ModelConfig, QKNorm
from lrattnres.residual.keys import KeyRule
from lrattnres.residual.plan import plan_of


@dataclass(frozen=True)
class Cost:
    """In multiply-adds a token: core: L(4d² + 3dm), the plain transformer without embedding and head; scores: r·S;
    mixtures: d·S; projection: the key rows, r[L(d + m) + d], and what is not published: M·r·d for queries that depend on
    the input, a factor on each of the (M + 1)·d values written for scaled sources, and M·d for gates; attention: QKᵀ and αV
    over a causal window, L·d·T; head: d·vocabulary.

    beside: parameters of the embedding, if it is not the head, and of the gains of norms; parameters: what routing adds;
    cache: values a token that are kept as sources, K·d, and K·r more for keys of their own.
    """

    core: int
    scores: int
    mixtures: int
    projection: int
    attention: int
    head: int
    beside: int
    parameters: int
    cache: int

    @property
    def routing(self) -> int:
        """What the reads cost, (d + r)·S."""
        return self.scores + self.mixtures

    @property
    def added_percent(self) -> float:
        """What the residual path adds, in percent of the core: the axis of the paper's Figure 1."""
        return 100 * (self.routing + self.projection) / self.core

    @property
    def training_flops(self) -> int:
        """FLOPs a token of a training step: a multiply-add is two, and the backward pass twice the forward."""
        return 6 * (self.core + self.routing + self.projection + self.attention + self.head)

    @property
    def model_parameters(self) -> int:
        """Of the whole model: each weight of the core and of the head is used once a token."""
        return self.core + self.head + self.beside + self.parameters


def cost(config: ModelConfig, keys: KeyRule | None) -> Cost:
    """The cost of a model whose keys are made by `keys`; None for the plain residual stream."""
    layers, dim, width = config.layers, config.dim, config.mlp_width
    plan, depth = plan_of(config), config.depth
    rank = 0 if keys is None else config.rank if keys.ranked and config.rank else dim
    heads = config.heads * config.head_width
    keyed = dim if plan.embedding or plan.states else 0  # the embedding's key, if a site reads it
    rows = rank * (layers * (heads + width) + keyed) if keys and keys.emits else 0
    written = plan.sublayers + plan.embedding
    queries = plan.sublayers * rank * dim if keys and depth.input_queries else 0
    scaled = (
        dim * written
        if keys and (depth.learned_scale or depth.block_scale is not BlockScale.sum)
        else 0
    )
    gated = plan.sublayers * dim if keys and config.gate else 0
    scales = sum(map(bool, plan.sources(plan.sublayers))) if keys and depth.learned_scale else 0
    gains = dim * (2 * layers + 1) * config.gains + 2 * config.head_width * layers * (
        config.qk_norm is QKNorm.gains
    )
    return Cost(
        core=layers
        * (2 * dim * (heads + config.value_heads * config.head_width) + 3 * dim * width),
        scores=rank * plan.reads,
        mixtures=dim * plan.reads if keys else 0,
        projection=rows + queries + scaled + gated,
        attention=layers * heads * config.context,
        head=dim * (config.vocabulary or 0),
        beside=(0 if config.tied else dim * (config.vocabulary or 0)) + gains,
        parameters=rows
        + plan.sublayers * (rank + (keys is not None and config.gate))
        + queries
        + scales,
        cache=plan.retained * (dim + (rank if keys.emits else 0)) if keys else 0,
    )
