"""What depth routing costs, counted from the plan: Appendix A of the low-rank paper.

Compute is in multiply-adds a token. Softmax and normalisation are of lower order and left out, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from lrattnres.config import ModelConfig
from lrattnres.depth.keys import KeyRule
from lrattnres.depth.plan import DepthPlan


@dataclass(frozen=True)
class Cost:
    """core: L(4d² + 3dm), the plain transformer without embedding and head; routing: scores and mixtures,
    (d + r)·S; projection: the key rows, r[L(d + m) + d]; attention: QKᵀ and αV over a causal window, L·d·T;
    head: d·vocabulary. All in multiply-adds a token. parameters: what routing adds.
    """

    core: int
    routing: int
    projection: int
    attention: int
    head: int
    parameters: int

    @property
    def added_percent(self) -> float:
        """What the residual path adds, in percent of the core: the axis of the paper's Figure 1."""
        return 100 * (self.routing + self.projection) / self.core

    @property
    def training_flops(self) -> int:
        """FLOPs a token of a training step: a multiply-add is two, and the backward pass twice the forward."""
        return 6 * (self.core + self.routing + self.projection + self.attention + self.head)


def cost(config: ModelConfig, keys: KeyRule | None) -> Cost:
    """The cost of a model whose keys are made by `keys`; None for the plain residual stream."""
    layers, dim, width = config.layers, config.dim, config.mlp_width
    plan = DepthPlan(2 * layers, config.blocks)
    rank = 0 if keys is None else config.rank if keys.ranked and config.rank else dim
    rows = rank * (layers * (dim + width) + dim) if keys and keys.emits else 0
    return Cost(
        core=layers * (4 * dim**2 + 3 * dim * width),
        routing=(dim + rank) * plan.reads if keys else 0,
        projection=rows,
        attention=layers * dim * config.context,
        head=dim * (config.vocabulary or 0),
        parameters=rows + plan.sublayers * rank,
    )
