"""How the key of a source is made: from the value, from a slice of it, or by rows of its own in the projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lrattnres.kernels.reference import rms_norm


class Source(NamedTuple):
    """What one site may read: the embedding, one sub-layer's output, or the sum of a block's outputs.

    value: [..., d]; emitted: [..., r], the key rows that came with the value, or None where none are emitted.
    """

    value: Tensor
    emitted: Tensor | None = None

    def nothing(self) -> Source:
        """A source of this one's shape whose value is zero, and with it any key and any logit."""
        nothing = self.value.new_zeros(()).expand_as(self.value)
        return Source(
            nothing,
            None if self.emitted is None else self.emitted.new_zeros(()).expand_as(self.emitted),
        )

    def plus(self, output: Source) -> Source:
        if self.emitted is None or output.emitted is None:
            return Source(self.value + output.value)
        return Source(self.value + output.value, self.emitted + output.emitted)


@dataclass(frozen=True)
class KeyRule:
    """One way to make keys. `ranked`: r is free (else r = d); `emits`: each projection writes r columns more."""

    ranked: bool
    emits: bool
    key: Callable[[Source, int], Tensor]

    def written(self, value: Tensor, emitted: Tensor, normalize: bool = True) -> Source:
        """An output as a source. Emitted keys are normalised before they are summed, if keys are normalised at all."""
        if not self.emits:
            return Source(value)
        return Source(value, rms_norm(emitted) if normalize else emitted)


def _emitted(source: Source, rank: int) -> Tensor:
    assert source.emitted is not None
    return source.emitted


VALUE = KeyRule(ranked=False, emits=False, key=lambda source, rank: source.value)
SLICED = KeyRule(ranked=True, emits=False, key=lambda source, rank: source.value[..., -rank:])
PROJECTED = KeyRule(ranked=True, emits=True, key=_emitted)
