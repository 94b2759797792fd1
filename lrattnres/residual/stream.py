"""The plain residual stream of a PreNorm transformer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lrattnres.config import ModelConfig
from lrattnres.residual.base import Added, ResidualPath


class State(NamedTuple):
    stream: Tensor  # o_0 + Σ o_i


class Baseline(ResidualPath):
    """h_t = o_0 + o_1 + … + o_{t−1}"""

    residual, start, plain = "baseline", "bits", True

    def begin(self, embedding: Tensor) -> State:
        return State(embedding)

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        return State(state.stream + output)

    def hidden(self, state: State, site: int) -> Tensor:
        return state.stream

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        return Added(parameters=0, mixing=0, projections=0, carried=config.dim)
