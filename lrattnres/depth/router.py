"""Attention over depth: every sub-layer chooses what it reads from all that was written before it.

    α_t = softmax over sources i of q_t · RMSNorm(k_i)        h_t = Σ_i α_t,i v_i

q_t is a learned vector of site t, v_i the embedding, an output, or the sum of a block of outputs. The published
systems differ in three independent choices: how k_i is made (keys.py), which sources there are (plan.py), and
whether the mixture replaces the residual stream or is added to it. `VARIANTS` names the combinations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import Routing
from lrattnres.depth.keys import PROJECTED, SLICED, VALUE, KeyRule, Source
from lrattnres.depth.plan import DepthPlan
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
    What a variant never reads is None or empty.
    """

    sources: tuple[Source, ...]
    partial: Source | None
    stream: Tensor | None


class DepthRouter(nn.Module):
    """Plan, key rule and routing of one model; owns all queries (and W_0, where keys are projected).

    queries: float32 [M, r], one for each site but the first; zero at the start, so that every read begins as the
    mean of its sources. `emit_dim`: columns that each output projection writes beyond its d: r if keys are
    projected, else 0.
    """

    def __init__(self, plan: DepthPlan, variant: Variant, dim: int, rank: int | None = None):
        super().__init__()
        self.plan, self.variant, self.dim = plan, variant, dim
        keys = variant.keys
        if keys is not None and keys.ranked and (rank is None or not 1 <= rank <= dim):
            raise ValueError(f"rank={rank}: must be between 1 and dim={dim}")
        self.rank = 0 if keys is None else rank if keys.ranked and rank else dim
        self.emit_dim = self.rank if keys and keys.emits else 0
        self.queries = nn.Parameter(torch.zeros(plan.sublayers, self.rank)) if keys else None
        self.embedding_key = nn.Linear(dim, self.rank, bias=False) if self.emit_dim else None

    def begin(self, embedding: Tensor) -> Depth:
        """The state before the first sub-layer; embedding: [..., d]."""
        emitted = F.linear(embedding, self.embedding_key.weight.to(embedding.dtype)) if self.embedding_key else None
        stream = embedding if self.variant.routing is Routing.add else None
        return Depth((Source(embedding, emitted),), None, stream)

    def read(self, depth: Depth, site: int) -> Tensor:
        """RMSNorm(h) of a site, [..., d]: the input of sub-layer `site`, or of the head at site M."""
        return rms_norm(self.hidden(depth, site)).to(depth.sources[0].value.dtype)

    def write(self, depth: Depth, site: int, output: Tensor) -> Depth:
        """The state after sub-layer `site` wrote `output`, [..., d + emit_dim]: the value, then the key rows."""
        value, emitted = output.split([self.dim, self.emit_dim], dim=-1)
        stream = None if depth.stream is None else depth.stream + value
        if self.variant.keys is None:
            return depth._replace(stream=stream)
        source = self.variant.keys.written(value, emitted)
        block = source if depth.partial is None else depth.partial.plus(source)
        if self.plan.closes(site):
            return Depth((*depth.sources, block), None, stream)
        return Depth(depth.sources, block, stream)

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
