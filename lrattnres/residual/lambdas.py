"""Scalars on the residual stream: what the training records of small GPTs converged on.

nanochat (karpathy/nanochat, nanochat/gpt.py) and the 2024-12-31 record of modded-nanogpt
(KellerJordan/modded-nanogpt); no paper. Before block b, counted from i = b − 1 = 0, with E = ⌊L/2⌋:

    unet, i ≥ L − E:   x ← x + s_{i−(L−E)} · (the stream after the latest block not taken yet)
    resid, first:      x ← λ_i x + μ_i o_0

The block adds both of its outputs to x. The streams after blocks i < E are those that `unet` takes,
last in, first out; with an odd L the middle block neither gives nor takes one. With `backout` the
head reads x − ω y, y the stream after block i = E; else it reads x.

`start=neutral`: λ = 1 and μ = s = ω = 0, so a model begins as its baseline, to the last bit.
`start=nanochat`: λ from 1.15 to 1.05 and μ from 0.20 to 0.05 along the blocks, ω = 0.2, s = 1 as in
all records of modded-nanogpt. nanochat also normalises the embedding, which is
`norm_embedding=true`: its μ is meant for a first stream of unit variance.

nanochat decays λ and trains it with a hundredth of μ's rate; here all are Adam's, without decay,
at the rate of the other routing parameters.

Costs L (λ) + L (μ) + E (s) + 1 (ω) parameters, and d multiply-adds a token for each. A state holds
the stream, o_0 for μ, the streams that are still to be taken, and y.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lrattnres.config import ModelConfig
from lrattnres.config.schema import option
from lrattnres.kernels.reference import weighted_sum, wide
from lrattnres.residual.base import Added, ResidualPath, Role, Start


class Begin(Enum):
    neutral = "neutral"
    nanochat = "nanochat"


class State(NamedTuple):
    stream: Tensor  # what the next site reads
    embedding: Tensor | None  # o_0, if there is a μ
    pushed: tuple[Tensor, ...]  # streams that later blocks take, the last one first
    middle: Tensor | None  # y, once it is there


class Lambdas(ResidualPath):
    residual, start = "lambdas", "bits"

    @dataclass(frozen=True)
    class Options:
        resid: bool = option("λ: the stream is scaled before every block", True)
        first: bool = option("μ: the embedding is added before every block", True)
        unet: bool = option("s: streams of the first half are added in the second", False)
        backout: bool = option("ω: the middle stream is taken away before the head", False)
        start: Begin = option(
            "initial values: neutral (those of the baseline) or nanochat", Begin.neutral
        )
        norm_embedding: bool = option("the embedding is normalised first", False)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        options, layers = self.options, config.layers
        self.first_half = layers // 2
        self.stream = nn.Parameter(torch.zeros(layers)) if options.resid else None
        self.embedding = nn.Parameter(torch.zeros(layers)) if options.first else None
        self.skip = nn.Parameter(torch.zeros(self.first_half)) if options.unet else None
        self.backout = nn.Parameter(torch.zeros(1)) if options.backout else None

    def begin(self, embedding: Tensor) -> State:
        if self.options.norm_embedding:
            own = wide(embedding[..., : self.dim])
            scale = torch.rsqrt(own.square().mean(-1, keepdim=True) + self.eps)
            embedding = (wide(embedding) * scale).to(embedding.dtype)
        kept = embedding if self.embedding is not None else None
        return self.enter(State(embedding, kept, (), None), 0)

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        state = state._replace(stream=state.stream + output)
        return self.enter(state, site // 2 + 1) if site % 2 else state

    def enter(self, state: State, block: int) -> State:
        """The state before a block, counted from 0, or before the head, block L."""
        x, embedding, pushed, middle = state
        if self.skip is not None and 0 < block <= self.first_half:
            pushed = (x, *pushed)
        if self.backout is not None and block == self.first_half + 1:
            middle = x
        if block == self.config.layers:
            if self.backout is not None:
                x = mixed(x, None, middle, -self.backout[0])
            return State(x, None, (), None)
        if self.skip is not None and block >= (first := self.config.layers - self.first_half):
            x, pushed = mixed(x, None, pushed[0], self.skip[block - first]), pushed[1:]
        own = self.stream[block] if self.stream is not None else None
        added = self.embedding[block] if self.embedding is not None else None
        if own is not None or added is not None:
            x = mixed(x, own, embedding, added)
        return State(x, embedding, pushed, middle)

    def hidden(self, state: State, site: int) -> Tensor:
        return state.stream

    @classmethod
    def begins(cls, config: ModelConfig) -> str:
        options = cls.options_of(config)
        neutral = options.start is Begin.neutral and not options.norm_embedding
        return "bits" if neutral else "other"

    @classmethod
    def weights_of(cls, config: ModelConfig) -> dict[str, int]:
        """Its parameters and how many numbers each has."""
        options, layers = cls.options_of(config), config.layers
        sizes = {"stream": layers, "embedding": layers, "skip": layers // 2, "backout": 1}
        there = (options.resid, options.first, options.unet, options.backout)
        return {name: n for (name, n), here in zip(sizes.items(), there, strict=True) if here}

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        starts: dict[str, float | Start] = {
            "stream": 1.0,
            "embedding": 0.0,
            "skip": 0.0,
            "backout": 0.0,
        }
        if cls.options_of(config).start is Begin.nanochat:
            starts = {
                "stream": along(1.15, 1.05),
                "embedding": along(0.20, 0.05),
                "skip": 1.0,
                "backout": 0.2,
            }
        decayed = {"stream"}
        return {n: Role("adam", n in decayed, starts[n]) for n in cls.weights_of(config)}

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        options, layers = cls.options_of(config), config.layers
        weights, half = sum(cls.weights_of(config).values()), layers // 2

        def held(block: int) -> int:
            """Vectors in the state while a block runs."""
            taken = max(0, block - (layers - half) + 1)
            pushed = (min(block, half) - taken) * options.unet
            return 1 + options.first + pushed + (options.backout and block > half)

        carried = max(map(held, range(layers)))
        return Added(weights, weights * config.dim, 0, carried * config.dim)

    @classmethod
    def errors(cls, config: ModelConfig) -> Iterator[str]:
        yield from (found := list(super().errors(config)))
        if found:
            return
        options = cls.options_of(config)
        if not cls.weights_of(config):
            yield (
                "model.path.resid=false, first=false, unet=false, backout=false: nothing is left "
                "that is learned; write one of them as true, or model.residual=baseline"
            )
        if options.unet and config.layers < 2:
            yield (
                "model.path.unet=true: model.layers=1 has no second half; "
                "write model.path.unet=false"
            )


def mixed(x: Tensor, own: Tensor | None, other: Tensor | None, weight: Tensor | None) -> Tensor:
    """own·x + weight·other, summed in float32; no factor: one; no weight: no other."""
    one = x.new_ones((), dtype=torch.float32)
    first = one if own is None else own
    if weight is None or other is None:
        return weighted_sum(first[None], [x]).to(x.dtype)
    return weighted_sum(torch.stack([first.to(weight.dtype), weight]), [x, other]).to(x.dtype)


def along(first: float, last: float) -> Start:
    """A start: from `first` to `last` in equal steps."""
    return lambda shape, generator: torch.linspace(first, last, shape[0])
