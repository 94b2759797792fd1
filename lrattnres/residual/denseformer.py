"""DenseFormer: after a transformer block the stream is replaced by a weighted average over depth.

Pagliardini et al., "DenseFormer: Enhancing Information Flow in Transformers via Depth Weighted
Averaging" (arXiv 2402.02622). With X_b the stream after block b, X_0 = o_0 and Y_0 = X_0:

    X_b = Y_{b−1} + o_{2b−1} + o_{2b}
    Y_b = Σ_{j ≤ b, (b − j) mod k = 0} α_{b,j} X_j   if p divides b,   else X_b

    h_{2b−1} = Y_{b−1},   h_{2b} = Y_{b−1} + o_{2b−1},   h_{M+1} = Y_L

α_{b,b} starts at one and the others at zero, so a model begins as its baseline, to the last bit.
Where p > 1, the X_j of blocks without an average are sources like the others. The released code
decays α; here Adam's weights do not decay.
Costs A = Σ_{b ≤ L, p | b} (⌊b/k⌋ + 1) parameters and A·d multiply-adds a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lrattnres.config import ModelConfig
from lrattnres.config.schema import option
from lrattnres.kernels.reference import weighted_sum
from lrattnres.residual.base import Added, ResidualPath, Role


class State(NamedTuple):
    stream: Tensor  # what the next site reads
    blocks: tuple[Tensor, ...]  # X_0 … X_b


class DenseFormer(ResidualPath):
    residual, start = "denseformer", "bits"

    @dataclass(frozen=True)
    class Options:
        dilation: int = option("k: an average takes every k-th earlier block", 1, at_least=1)
        period: int = option("p: there is an average after every p-th block", 1, at_least=1)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        sizes = self.averages(config)
        self.alpha = nn.ParameterDict({str(b): torch.zeros(n) for b, n in sizes.items()})

    def begin(self, embedding: Tensor) -> State:
        return State(embedding, (embedding,))

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        stream, block = state.stream + output, (site + 1) // 2
        if site % 2 == 0:  # attention: the block goes on
            return state._replace(stream=stream)
        blocks = (*state.blocks, stream)
        if block % self.options.period == 0:
            taken = blocks[block % self.options.dilation :: self.options.dilation]
            stream = weighted_sum(self.alpha[str(block)], taken).to(stream.dtype)
        return State(stream, blocks)

    def hidden(self, state: State, site: int) -> Tensor:
        return state.stream

    @classmethod
    def averages(cls, config: ModelConfig) -> dict[int, int]:
        """Of each block with an average, counted from 1: how many sources it has."""
        k, p = cls.options_of(config).dilation, cls.options_of(config).period
        return {b: b // k + 1 for b in range(p, config.layers + 1, p)}

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        def newest_alone(shape: torch.Size, generator: torch.Generator) -> Tensor:
            return torch.eye(shape[0])[-1]

        return {"alpha.*": Role("adam", True, newest_alone)}

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        weights = sum(cls.averages(config).values())
        return Added(weights, weights * config.dim, 0, (config.layers + 1) * config.dim)

    @classmethod
    def errors(cls, config: ModelConfig) -> Iterator[str]:
        if found := list(super().errors(config)):
            yield from found
            return
        lacks = {"period": "an average", "dilation": "an average of two"}
        for name, lack in lacks.items():
            if (value := getattr(cls.options_of(config), name)) > config.layers:
                yield (
                    f"model.path.{name}={value}: no block would have {lack}; "
                    f"write 1 to model.layers={config.layers}"
                )
