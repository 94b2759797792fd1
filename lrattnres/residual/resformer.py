"""ResFormer and SVFormer: later blocks use the values of the first block's attention again.

Zhou et al., "Value Residual Learning" (arXiv 2410.17897; the authors' code is
Zcchill/Value-Residual-Learning). The stream is the baseline's. v_b are the values that the
attention of block b makes of its read. Block b ≥ 2 attends with

    resformer:   λ_{b,1} v_1 + λ_{b,2} v_b        svformer:   v_1

in their place. λ starts at (½, ½), which the released code keeps ("identity") and the paper's
learned variant starts from; `learn=false` keeps it. `sparse` lists the blocks that mix; null is all
of 2 … L. Neither path begins as its baseline, but a resformer with `start=neutral`, λ = (0, 1),
does, to the last bit. Weight decay is not published: none.

svformer has no use for the value rows of later blocks, so they are not there, and in decoding one
cache of values serves all blocks: (L + 1)/2L of the baseline's keys and values.

Costs, with values of width w: resformer 2 parameters and 2w multiply-adds a token for each block
that mixes, svformer −(L − 1)·d·w of each. A state holds the stream and v_1. The coefficients are
the baseline's: a read is the sum of all outputs.
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


class State(NamedTuple):
    stream: Tensor  # what the next site reads
    values: Tensor | None  # v_1, [..., heads, head_dim], once it is there


class ValueResidual(ResidualPath):
    """The baseline's stream, and v_1 beside it."""

    def begin(self, embedding: Tensor) -> State:
        return State(embedding, None)

    def write(self, state: State, site: int, output: Tensor, raw: Raw | None = None) -> State:
        values = raw[1] if site == 0 and raw else state.values
        return State(state.stream + output, values)

    def hidden(self, state: State, site: int) -> Tensor:
        return state.stream

    @classmethod
    def value_width(cls, config: ModelConfig) -> int:
        """Width of v_1."""
        return config.value_heads * config.head_width


def mixture(first: Tensor, weights: Tensor, key: Tensor, value: Tensor | None) -> Raw:
    """λ_1 v_1 + λ_2 v in the place of v."""
    assert value is not None
    one, own = wide(weights)
    return key, (one * wide(first) + own * wide(value)).to(value.dtype)


def first_values(first: Tensor, key: Tensor, value: Tensor | None) -> Raw:
    """v_1 in the place of v."""
    return key, first


class Begin(Enum):
    published = "published"
    neutral = "neutral"


STARTS = {Begin.published: (0.5, 0.5), Begin.neutral: (0.0, 1.0)}


class ResFormer(ValueResidual):
    residual, start = "resformer", "other"

    @dataclass(frozen=True)
    class Options:
        learn: bool = option("λ is learned; false: it stays as it starts", True)
        sparse: list[int] | None = option("the blocks that mix, from 2 to L; null: all", None)
        start: Begin = option("λ at the start: published (½, ½) or neutral (0, 1)", Begin.published)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.rows = {block: row for row, block in enumerate(self.mixing(config))}
        if self.options.learn:
            self.value_mix = nn.Parameter(torch.zeros(len(self.rows), 2))

    def change(self, state: State, site: int) -> Change | None:
        row = self.rows.get(site // 2 + 1)
        if row is None or state.values is None:
            return unchanged
        start = STARTS[self.options.start]
        weights = self.value_mix[row] if self.options.learn else state.stream.new_tensor(start)
        return partial(mixture, state.values, weights)

    @classmethod
    def begins(cls, config: ModelConfig) -> str:
        return "bits" if cls.options_of(config).start is Begin.neutral else "other"

    @classmethod
    def mixing(cls, config: ModelConfig) -> list[int]:
        """The blocks that mix, counted from 1."""
        sparse = cls.options_of(config).sparse
        return list(range(2, config.layers + 1)) if sparse is None else sorted(sparse)

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        options = cls.options_of(config)
        start = torch.tensor(STARTS[options.start])
        role = Role("adam", False, lambda shape, generator: start.expand(shape))
        return {"value_mix": role} if options.learn else {}

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        blocks, width = len(cls.mixing(config)), cls.value_width(config)
        learned = 2 * blocks * cls.options_of(config).learn
        return Added(learned, 2 * blocks * width, 0, config.dim + width)

    @classmethod
    def errors(cls, config: ModelConfig) -> Iterator[str]:
        yield from (found := list(super().errors(config)))
        if found:
            return
        blocks, layers = cls.mixing(config), config.layers
        if not blocks:
            yield (
                f"model.layers={layers}: no block of model.residual=resformer would mix; write "
                "model.layers=2 or more"
                if layers < 2
                else "model.path.sparse=[]: no block would mix; write model.path.sparse=null for "
                "all of them"
            )
        elif not set(blocks) <= set(range(2, layers + 1)) or len(set(blocks)) < len(blocks):
            yield (
                f"model.path.sparse={cls.options_of(config).sparse}: must be different blocks "
                f"from 2 to model.layers={layers}"
            )


class SVFormer(ValueResidual):
    residual, start = "svformer", "other"

    def change(self, state: State, site: int) -> Change | None:
        return unchanged if state.values is None else partial(first_values, state.values)

    @classmethod
    def value_site(cls, config: ModelConfig, site: int) -> int:
        return 0

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        width = cls.value_width(config)
        rows = (config.layers - 1) * config.dim * width
        return Added(-rows, 0, -rows, config.dim + width)

    @classmethod
    def errors(cls, config: ModelConfig) -> Iterator[str]:
        yield from super().errors(config)
        if config.layers < 2:
            yield (
                "model.residual=svformer: no block would use the values of the first again; "
                "write model.layers=2 or more"
            )
