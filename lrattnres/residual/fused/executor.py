"""What has been written, and how one operator reads it: alone, or for its site and for later ones of its group."""

from __future__ import annotations

from functools import partial as bound
from typing import NamedTuple

from torch import Tensor

from lrattnres.kernels.backends import DepthKernels, Part
from lrattnres.residual.fused.schedule import Step
from lrattnres.residual.keys import Source


class Depth(NamedTuple):
    """All that has been written so far: immutable, so that nothing survives from one forward pass to the next.

    sources: the embedding and the complete blocks; partial: the open block's sum so far; stream: o_0 + Σ o_i.
    What a variant never reads is None or empty. read: RMSNorm(h) of the next site; parts: for every further site of its
    group, what has been read of the sources so far.
    """

    sources: tuple[Source, ...]
    partial: Source | None
    stream: Tensor | None
    read: Tensor
    parts: tuple[tuple[Part, ...], ...]

    def receives(self, source: Source, complete: bool) -> Depth:
        """With one source more, or with its block still open."""
        return (
            self._replace(sources=(*self.sources, source), partial=None)
            if complete
            else self._replace(partial=source)
        )


def read_in_group(
    depth: Depth,
    newest: Source,
    queries: Tensor,
    step: Step,
    kernels: DepthKernels,
    *,
    complete: bool,
    normalize: bool,
) -> Depth:
    """The state with `newest` written, and its site read: `read` is h, or RMSNorm(h) if `normalize`.

    queries: [C, r] of this site and of the later ones that are prepared. The sources of the result are those that the
    operator hands on, so that each one's gradient is made in one go. The open block's sum is left to the operator.
    """
    if depth.partial and depth.partial.emitted is not None and newest.emitted is not None:
        newest = newest._replace(emitted=depth.partial.emitted + newest.emitted)
    addend = depth.partial.value if depth.partial else None
    read = bound(kernels.read, normalize=normalize, passes=step.passes)
    waiting: tuple[tuple[Part, ...], ...]
    if step.opens:
        owned = (*depth.sources, newest)
        reading = read(queries, *columns(owned), addend)
        before, waiting = depth._replace(sources=()), ((),) * len(reading.parts)
    else:
        reading = read(queries, *columns((newest,)), addend, depth.parts[0])
        before, waiting = depth, depth.parts[1:]
    *others, last = map(Source, reading.values, reading.keys or [None] * len(reading.values))
    after = before._replace(sources=(*before.sources, *others)).receives(last, complete)
    # In an open block nothing is prepared: its sum is not what later sites will read.
    parts = (
        tuple((*one, part) for one, part in zip(waiting, reading.parts, strict=True))
        if reading.parts
        else waiting
    )
    return after._replace(read=reading.out, parts=parts)


def accumulated(depth: Depth, newest: Source, states: bool) -> Source:
    """The open block's sum with the newest output; where sources are `states`, the stream after it, with all keys so far."""
    if not states or not depth.sources:
        return newest if depth.partial is None else depth.partial.plus(newest)
    assert depth.stream is not None
    before = (depth.partial or depth.sources[-1]).emitted
    return Source(
        depth.stream, None if before is None or newest.emitted is None else before + newest.emitted
    )


def columns(sources: tuple[Source, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Values, and keys of their own where there are some."""
    return [source.value for source in sources], [
        source.emitted for source in sources if source.emitted is not None
    ]
