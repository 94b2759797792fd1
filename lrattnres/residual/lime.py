"""LIMe: attention mixes the keys and values of all blocks before it.

Gerasimov et al., "You Do Not Fully Utilize Transformer's Representation Capacity" (arXiv
2502.09245; the authors' code is corl-team/lime, src/lm/lime.py, StaticRouter). The stream is the
baseline's. k_{l,g} and v_{l,g} are the keys and values that the attention of block l makes, for
head g of R heads. Block b ≥ 2 attends with

    Σ_{l ≤ b, g'} R_b[g, (l, g')] k_{l,g'}        Σ_{l ≤ b, g'} R_b[g, (l, g')] v_{l,g'}

in place of its own: one router R_b [R, b·R] for both. They are mixed before keys are normalised and
rotated; the authors' body has no norm there, so the other order would be as faithful.

Start: the identity on a block's own heads, last among the columns, and uniform in ±√(3/b·R)
elsewhere, as the code has it. `start=neutral` makes these zero: a model then begins as its
baseline, to the last bit. Weight decay is not published: none.

Costs R²(L(L + 1)/2 − 1) parameters, and 2e multiply-adds a token for each, e the width of a head. A
state holds the stream and the keys and values of all blocks; in decoding the mixed ones are cached,
as many as the baseline's. The coefficients are the baseline's: a read is the sum of all outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lrattnres.config import ModelConfig
from lrattnres.config.schema import option
from lrattnres.kernels.reference import wide
from lrattnres.residual.base import Added, Change, Raw, ResidualPath, Role, unchanged


class Begin(Enum):
    published = "published"
    neutral = "neutral"


class State(NamedTuple):
    stream: Tensor  # what the next site reads
    keys: tuple[Tensor, ...]  # of each block so far, [..., heads, head_dim]
    values: tuple[Tensor, ...]


class LIMe(ResidualPath):
    residual, start = "lime", "other"

    @dataclass(frozen=True)
    class Options:
        start: Begin = option(
            "weights of earlier blocks: published (uniform) or neutral (zero)", Begin.published
        )

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        heads = config.value_heads
        self.router = nn.ParameterDict(
            {str(b): torch.zeros(heads, (b + 1) * heads) for b in range(1, config.layers)}
        )

    def begin(self, embedding: Tensor) -> State:
        return State(embedding, (), ())

    def write(self, state: State, site: int, output: Tensor, raw: Raw | None = None) -> State:
        state = state._replace(stream=state.stream + output)
        if raw is None or site // 2 + 1 == self.config.layers:  # nobody reads the last block's
            return state
        key, value = raw
        assert value is not None
        return state._replace(keys=(*state.keys, key), values=(*state.values, value))

    def change(self, state: State, site: int) -> Change | None:
        if site == 0 or site % 2:
            return unchanged
        return partial(mixtures, self.router[str(site // 2)], state.keys, state.values)

    def hidden(self, state: State, site: int) -> Tensor:
        return state.stream

    @classmethod
    def begins(cls, config: ModelConfig) -> str:
        return "bits" if cls.options_of(config).start is Begin.neutral else "other"

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        neutral = cls.options_of(config).start is Begin.neutral

        def own_heads(shape: torch.Size, generator: torch.Generator) -> Tensor:
            heads, columns = shape
            bound = 0.0 if neutral else (3 / columns) ** 0.5
            weights = torch.empty(shape).uniform_(-bound, bound, generator=generator)
            weights[:, -heads:] = torch.eye(heads)
            return weights

        return {"router.*": Role("adam", False, own_heads)}

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        heads, layers = config.value_heads, config.layers
        weights = heads**2 * (layers * (layers + 1) // 2 - 1)
        kept = 2 * heads * config.head_width * (layers - 1)
        return Added(weights, 2 * config.head_width * weights, 0, config.dim + kept)

    @classmethod
    def errors(cls, config: ModelConfig) -> Iterator[str]:
        yield from super().errors(config)
        if config.layers < 2:
            yield ("model.residual=lime: no block has one before it; write model.layers=2 or more")


def mixtures(
    weights: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    key: Tensor,
    value: Tensor | None,
) -> Raw:
    """The keys and values of a block, mixed with those of the blocks before."""
    assert value is not None
    return mixture(weights, (*keys, key)), mixture(weights, (*values, value))


def mixture(weights: Tensor, blocks: tuple[Tensor, ...]) -> Tensor:
    """Σ R[g, (l, g')] x_{l,g'}, summed in float32, [..., heads, head_dim] as each of `blocks`."""
    stacked = torch.cat(blocks, dim=-2)
    return (wide(weights) @ wide(stacked)).to(stacked.dtype)
