"""Attention over depth: every sub-layer chooses what it reads from all that was written before it.

    α_t = softmax over sources i of q_t · RMSNorm(k_i)        h_t = Σ_i α_t,i v_i

q_t is a learned vector of site t, v_i the embedding, an output, or the sum of a block of outputs. The published
systems differ in three independent choices: how k_i is made (keys.py), which sources there are (plan.py), and
whether the mixture replaces the residual stream or is added to it. `VARIANTS` names the combinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import Routing
from lrattnres.depth.groups import cheapest, single, steps
from lrattnres.depth.keys import PROJECTED, SLICED, VALUE, KeyRule, Source
from lrattnres.depth.plan import DepthPlan
from lrattnres.kernels.backends import KERNELS, DepthKernels, Part
from lrattnres.kernels.reference import depth_attention, depth_weights, rms_norm


class Variant(NamedTuple):
    """A row of the table: `keys=None` routes nothing, and leaves the plain residual stream."""

    keys: KeyRule | None
    routing: Routing


VARIANTS = {
    "baseline": Variant(None, Routing.add),
    "attn_res": Variant(VALUE, Routing.replace),
    "p_lr": Variant(PROJECTED, Routing.replace),
    "s_lr": Variant(SLICED, Routing.replace),
    "delta": Variant(VALUE, Routing.add),
}


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


class DepthRouter(nn.Module):
    """Plan, key rule and routing of one model; owns all queries (and W_0, where keys are projected).

    queries: float32 [M, r], one for each site but the first; zero at the start, so that every read begins as the
    mean of its sources. `emit_dim`: columns that each output projection writes beyond its d: r if keys are
    projected, else 0. `kernels` say how reads are computed, and whether several sites are read together: `starts`
    (by default what moves the fewest bytes) are the first sites of the groups.
    """

    def __init__(
        self,
        plan: DepthPlan,
        variant: Variant,
        dim: int,
        rank: int | None = None,
        kernels: DepthKernels = KERNELS["reference"],
        starts: Sequence[int] | None = None,
    ):
        super().__init__()
        self.plan, self.variant, self.dim, self.kernels = plan, variant, dim, kernels
        keys = variant.keys
        if keys is not None and keys.ranked and (rank is None or not 1 <= rank <= dim):
            raise ValueError(f"rank={rank}: must be between 1 and dim={dim}")
        self.rank = 0 if keys is None else rank if keys.ranked and rank else dim
        self.emit_dim = self.rank if keys and keys.emits else 0
        self.queries = nn.Parameter(torch.zeros(plan.sublayers, self.rank)) if keys else None
        self.embedding_key = nn.Linear(dim, self.rank, bias=False) if self.emit_dim else None
        starts = starts or (cheapest(plan, self.rank / dim) if kernels.grouped and keys else single(plan))
        self.steps = steps(plan, tuple(starts))

    def begin(self, embedding: Tensor) -> Depth:
        """The state before the first sub-layer; embedding: [..., d]."""
        emitted = F.linear(embedding, self.embedding_key.weight.to(embedding.dtype)) if self.embedding_key else None
        stream = embedding if self.variant.routing is Routing.add else None
        empty = Depth((), None, stream, embedding, ())
        return self._arrive(empty, 0, Source(embedding, emitted))

    def read(self, depth: Depth, site: int) -> Tensor:
        """RMSNorm(h) of a site, [..., d]: the input of sub-layer `site`, or of the head at site M."""
        return depth.read

    def write(self, depth: Depth, site: int, output: Tensor) -> Depth:
        """The state after sub-layer `site` wrote `output`, [..., d + emit_dim]: the value, then the key rows."""
        value, emitted = output.split([self.dim, self.emit_dim], dim=-1)
        stream = None if depth.stream is None else depth.stream + value
        written = self.variant.keys.written(value, emitted) if self.variant.keys else Source(value)
        return self._arrive(depth._replace(stream=stream), site + 1, written)

    def _arrive(self, depth: Depth, site: int, newest: Source) -> Depth:
        """The state at a site, given what was written last: the site's read is made, and others are prepared."""
        if self.variant.keys is None:
            assert depth.stream is not None
            sources = depth.sources or (newest,)
            return depth._replace(sources=sources, read=rms_norm(depth.stream))
        step, replaces = self.steps[site], self.variant.routing is Routing.replace
        if depth.partial and depth.partial.emitted is not None and newest.emitted is not None:
            newest = newest._replace(emitted=depth.partial.emitted + newest.emitted)
        owned = (*depth.sources, newest) if step.opens else (newest,)
        reading = self.kernels.read(
            self._queries(site, step.later + 1),
            [source.value for source in owned],
            [source.emitted for source in owned if source.emitted is not None],
            depth.partial.value if depth.partial else None,
            () if step.opens else depth.parts[0],
            normalize=replaces,
            passes=step.passes,
        )
        all_sources = tuple(map(Source, reading.values, reading.keys or [None] * len(reading.values)))
        all_sources = all_sources if step.opens else (*depth.sources, *all_sources)
        complete = site == 0 or self.plan.closes(site - 1)
        read = reading.out
        if not replaces:  # Site 0 has one source: it is what is read, and adding it to the stream would double it.
            assert depth.stream is not None
            read = rms_norm(read if site == 0 else depth.stream + read)
        return Depth(
            all_sources if complete else all_sources[:-1],
            None if complete else all_sources[-1],
            depth.stream,
            read,
            _prepared(reading.parts, () if step.opens else depth.parts[1:]),
        )

    def _queries(self, site: int, count: int) -> Tensor:
        """[count, r], of this site and those after it; site 0 has no query, and with one source any would do."""
        assert self.queries is not None
        if site == 0:
            return F.pad(self.queries[: count - 1], (0, 0, 1, 0))
        return self.queries[site - 1 : site - 1 + count]

    def hidden(self, depth: Depth, site: int) -> Tensor:
        """h of a site before its RMSNorm, [..., d]."""
        embedding = depth.sources[0].value
        if site == 0:  # One source: it is what is read, and adding the mixture to the stream would double it.
            return embedding
        if self.variant.keys is None:
            assert depth.stream is not None
            return depth.stream
        mixture = depth_attention(self._query(site), self._keys(depth), [s.value for s in self._sources(depth)])
        return mixture if depth.stream is None else depth.stream + mixture

    def weights(self, depth: Depth, site: int) -> Tensor | None:
        """α of a site, float32 [..., sources], in the order of `plan.sources(site)`; None where nothing routes."""
        if site == 0 or self.variant.keys is None:
            return None
        return depth_weights(self._query(site), self._keys(depth))

    def _query(self, site: int) -> Tensor:
        assert self.queries is not None
        return self.queries[site - 1]

    def _sources(self, depth: Depth) -> tuple[Source, ...]:
        return depth.sources if depth.partial is None else (*depth.sources, depth.partial)

    def _keys(self, depth: Depth) -> list[Tensor]:
        assert self.variant.keys is not None
        return [self.variant.keys.key(source, self.rank) for source in self._sources(depth)]


def _prepared(made: tuple[Part, ...], before: tuple[tuple[Part, ...], ...]) -> tuple[tuple[Part, ...], ...]:
    """What is known of each later site of the group, with the parts that the newest operator added to it."""
    if not made:
        return before
    return tuple((*parts, part) for parts, part in zip(before or [()] * len(made), made, strict=True))
