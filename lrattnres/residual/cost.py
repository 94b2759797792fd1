"""What a model costs: the plain transformer, counted here, and what its residual path adds, which the path says.

Compute is in multiply-adds a token. Softmax and normalisation are of lower order and left out, as in the papers.
"""

from __future__ import annotations

from dataclasses import dataclass

from lrattnres.config import ModelConfig, QKNorm
from lrattnres.residual.base import Added, path_of


@dataclass(frozen=True)
class Cost:
    """The cost of one model.

    Args:
        core: multiply-adds a token of the plain transformer without embedding and head, L(4d² + 3dm).
        attention: those of QKᵀ and αV over a causal window, L·d·T.
        head: d·vocabulary.
        beside: parameters of the embedding, if it is not the head, and of the gains of norms.
        added: what the residual path adds.
    """

    core: int
    attention: int
    head: int
    beside: int
    added: Added

    @property
    def added_compute(self) -> int:
        """Multiply-adds a token of the residual path."""
        return self.added.mixing + self.added.projections

    @property
    def added_percent(self) -> float:
        """What the residual path adds, in percent of the core: the axis of the low-rank paper's Figure 1."""
        return 100 * self.added_compute / self.core

    @property
    def training_flops(self) -> int:
        """FLOPs a token of a training step: a multiply-add is two, and the backward pass twice the forward."""
        return 6 * (self.core + self.added_compute + self.attention + self.head)

    @property
    def model_parameters(self) -> int:
        """Of the whole model: each weight of the core and of the head is used once a token."""
        return self.core + self.head + self.beside + self.added.parameters


def cost(config: ModelConfig) -> Cost:
    """The cost of a model. `config.residual` must be in the table of paths."""
    layers, dim, width = config.layers, config.dim, config.mlp_width
    heads, vocabulary = config.heads * config.head_width, config.vocabulary or 0
    gains = dim * (2 * layers + 1) * config.gains
    gains += 2 * config.head_width * layers * (config.qk_norm is QKNorm.gains)
    projections = 2 * dim * (heads + config.value_heads * config.head_width)
    return Cost(
        core=layers * (projections + 3 * dim * width),
        attention=layers * heads * config.context,
        head=dim * vocabulary,
        beside=(0 if config.tied else dim * vocabulary) + gains,
        added=path_of(config).cost(config),
    )
