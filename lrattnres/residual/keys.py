"""How the key of a source is made: from the value, from a slice of it, or by rows of its own in the projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Source(NamedTuple):
    """What one site may read: the embedding, one sub-layer's output, or the sum of some of them.

    Args:
        value: [..., d].
        emitted: [..., r], the key rows that came with the value; None where none are emitted.
    """

    value: Tensor
    emitted: Tensor | None = None

    def nothing(self) -> Source:
        """A source of this one's shape whose value is zero, and with it any key and any logit."""
        nothing = self.value.new_zeros(()).expand_as(self.value)
        if self.emitted is None:
            return Source(nothing)
        return Source(nothing, self.emitted.new_zeros(()).expand_as(self.emitted))

    def plus(self, output: Source) -> Source:
        """The sum of the two."""
        if self.emitted is None or output.emitted is None:
            return Source(self.value + output.value)
        return Source(self.value + output.value, self.emitted + output.emitted)


@dataclass(frozen=True)
class KeyRule:
    """One way to make keys: the only place that knows it, for training, kernels, decoding and every look inside.

    Args:
        ranked: whether the width r is free; else r = d.
        emits: whether each output projection writes r columns more, which are the key.
        key: (source, r, d) -> [..., r]. A value may have more than d columns; those are never part of a key.
    """

    ranked: bool
    emits: bool
    key: Callable[[Source, int, int], Tensor]

    def rank(self, rank: int | None, dim: int) -> int:
        """The width r for `model.rank` and `model.dim`."""
        return rank if self.ranked and rank else dim

    def is_tail(self, rank: int, dim: int) -> bool:
        """Whether the key is the last r columns of the value, where kernels can read it: asked of the rule itself."""
        columns = torch.arange(float(dim), device="cpu")
        return not self.emits and self.key(Source(columns), rank, dim).tolist() == list(
            range(dim - rank, dim)
        )


def _emitted(source: Source, rank: int, dim: int) -> Tensor:
    assert source.emitted is not None
    return source.emitted


VALUE = KeyRule(ranked=False, emits=False, key=lambda source, r, d: source.value[..., :d])
SLICED = KeyRule(ranked=True, emits=False, key=lambda source, r, d: source.value[..., d - r : d])
PROJECTED = KeyRule(ranked=True, emits=True, key=_emitted)
