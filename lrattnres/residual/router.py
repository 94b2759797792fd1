"""Attention over depth: every sub-layer chooses what it reads from all that was written before it.

    α_t = softmax over sources i of q_t · RMSNorm(k_i)        h_t = Σ_i α_t,i v_i

q_t is a learned vector of site t, v_i the embedding, an output, or the sum of a block of outputs. The published
systems differ in three independent choices: how k_i is made (keys.py), which sources there are (plan.py), and
whether the mixture replaces the residual stream or is added to it. `VARIANTS` names the combinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import DepthConfig, ModelConfig, Routing, Sources
from lrattnres.kernels.backends import KERNELS, DepthKernels
from lrattnres.kernels.reference import EPSILON, depth_attention, depth_weights, rms_norm
from lrattnres.residual.ablations import Ablations, beyond_plain
from lrattnres.residual.base import Role
from lrattnres.residual.fused.executor import Depth as Depth
from lrattnres.residual.fused.executor import accumulated, columns, read_in_group
from lrattnres.residual.fused.schedule import cheapest, single, steps
from lrattnres.residual.keys import PROJECTED, SLICED, VALUE, KeyRule, Source
from lrattnres.residual.plan import DepthPlan


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


def _normal(shape: torch.Size, generator: torch.Generator, *, std: float) -> Tensor:
    return torch.empty(shape).normal_(std=std, generator=generator)


class DepthRouter(nn.Module):
    """Plan, key rule and routing of one model; owns all queries (and W_0, where keys are projected).

    queries: float32 [M, r], one for each site but the first; zero at the start, so that every read begins as the
    mean of its sources. `emit_dim`: columns that each output projection writes beyond its d: r if keys are
    projected, else 0. `kernels` say how reads are computed, and whether several sites are read together: `starts`
    (by default what moves the fewest bytes) are the first sites of the groups. `gated`: see `_used`; `eps`: of what is read.
    `options`: ablations; those that change more than a factor of the logits are read one site at a time, in plain torch
    (ValueError for other kernels).
    """

    def __init__(
        self,
        plan: DepthPlan,
        variant: Variant,
        dim: int,
        rank: int | None = None,
        kernels: DepthKernels = KERNELS["reference"],
        starts: Sequence[int] | None = None,
        options: DepthConfig | None = None,
        gated: bool = False,
        eps: float = EPSILON,
    ):
        super().__init__()
        self.plan, self.variant, self.dim, self.kernels = plan, variant, dim, kernels
        keys, options = variant.keys, options or DepthConfig()
        if keys is not None and keys.ranked and (rank is None or not 1 <= rank <= dim):
            raise ValueError(f"rank={rank}: must be between 1 and dim={dim}")
        self.rank = 0 if keys is None else rank if keys.ranked and rank else dim
        self.emit_dim = self.rank if keys and keys.emits else 0
        self.queries = nn.Parameter(torch.zeros(plan.sublayers, self.rank)) if keys else None
        keyed = self.emit_dim and (
            plan.embedding or plan.states
        )  # else nobody reads the embedding's key
        self.embedding_key = nn.Linear(dim, self.rank, bias=False) if keyed else None
        self.ablations = Ablations(options, plan, self.rank, dim) if keys else None
        beyond = beyond_plain(options) if keys else []
        if beyond and kernels.plain:
            raise ValueError(
                f"{', '.join(beyond)}: kernels={kernels.name} do not compute it; take reference or compiled"
            )
        self.alone = bool(beyond)
        self.gates, self.eps = (
            nn.Parameter(torch.zeros(plan.sublayers)) if keys and gated else None,
            eps,
        )
        self.fused = variant.routing is Routing.replace and self.gates is None and eps == EPSILON
        starts = starts or (
            cheapest(plan, self.rank / dim) if kernels.grouped and keys else single(plan)
        )
        self.steps = () if self.alone else steps(plan, tuple(starts))

    @property
    def heads(self) -> int:
        return self.ablations.scoring.heads if self.ablations else 1

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        """The role of each parameter that a router of this configuration has, by its name in here."""
        keys, depth = VARIANTS[config.residual].keys, config.depth
        if keys is None:
            return {}
        std = depth.query_std
        roles = {"queries": Role("adam", False, partial(_normal, std=std) if std else 0.0)}
        if keys.emits and (depth.embedding_source or depth.sources is Sources.states):
            start = partial(_normal, std=config.init_std)
            roles["embedding_key.weight"] = Role("muon", True, start)
        if depth.input_queries:
            roles["ablations.query_projections"] = Role("adam", False, 0.0)
        if depth.learned_scale:
            roles["ablations.source_scales"] = Role("adam", False, 1.0)
        if config.gate:
            roles["gates"] = Role("adam", False, 0.0)
        return roles

    def begin(self, embedding: Tensor) -> Depth:
        """The state before the first sub-layer; embedding: [..., d]."""
        newest = Source(embedding)
        if self.embedding_key is not None:
            key = F.linear(embedding, self.embedding_key.weight.to(embedding.dtype))
            newest = self._written(embedding, key) if self.plan.states else Source(embedding, key)
        stream = (
            embedding
            if self.variant.routing is Routing.add or self.plan.states or self.gates is not None
            else None
        )
        return self._arrive(Depth((), None, stream, embedding, ()), 0, newest)

    def read(self, depth: Depth, site: int) -> Tensor:
        """RMSNorm(h) of a site, [..., d]: the input of sub-layer `site`, or of the head at site M."""
        return depth.read

    def write(self, depth: Depth, site: int, output: Tensor) -> Depth:
        """The state after sub-layer `site` wrote `output`, [..., d + emit_dim]: the value, then the key rows."""
        value, emitted = output.split([self.dim, self.emit_dim], dim=-1)
        depth = depth if depth.stream is None else depth._replace(stream=depth.stream + value)
        return self._arrive(depth, site + 1, self._written(value, emitted))

    def _written(self, value: Tensor, emitted: Tensor) -> Source:
        if self.variant.keys is None or self.ablations is None:
            return Source(value)
        return self.variant.keys.written(value, emitted, self.ablations.scoring.normalize)

    def _arrive(self, depth: Depth, site: int, newest: Source) -> Depth:
        """The state at a site, given what was written last: the site's h is made, and normalised."""
        if self.variant.keys is None:
            assert depth.stream is not None
            return depth._replace(
                sources=depth.sources or (newest,), read=rms_norm(depth.stream, self.eps)
            )
        depth = (self._read_alone if self.alone else self._read_in_group)(
            depth, site, newest, normalize=self.fused
        )
        return (
            depth
            if self.fused
            else depth._replace(read=rms_norm(self._used(depth, site, depth.read), self.eps))
        )

    def _read_in_group(self, depth: Depth, site: int, newest: Source, *, normalize: bool) -> Depth:
        """One operator reads for this site, and for the later ones of its group."""
        assert self.queries is not None and self.ablations is not None
        step = self.steps[site]
        # Site 0 has no query, and with one source any would do.
        queries = (
            self.queries[site - 1 : site + step.later]
            if site
            else F.pad(self.queries[: step.later], (0, 0, 1, 0))
        )
        queries = self.ablations.rescaled(queries)
        return read_in_group(
            depth,
            newest,
            queries,
            step,
            self.kernels,
            complete=self._complete(site),
            normalize=normalize,
        )

    def _read_alone(self, depth: Depth, site: int, newest: Source, *, normalize: bool) -> Depth:
        """The site reads by itself, from sources that are as the ablations want them."""
        assert self.ablations is not None
        newest, complete = accumulated(depth, newest, self.plan.states), self._complete(site)
        depth = depth.receives(
            self.ablations.scaled(newest, site) if complete else newest, complete
        )
        sources = self._sources(depth, site)
        if site == 0:
            (embedding,) = sources
            return depth._replace(read=rms_norm(embedding.value) if normalize else embedding.value)
        query, (values, keys) = self._query(site, sources), columns(sources)
        scoring = self.ablations.scoring
        reading = self.kernels.read(
            query.unsqueeze(0), values, keys, normalize=normalize, passes=False, scoring=scoring
        )
        return depth._replace(read=reading.out)

    def _complete(self, site: int) -> bool:
        """Whether a site's newest source is the embedding or a whole block."""
        return site == 0 or self.plan.closes(site - 1)

    def hidden(self, depth: Depth, site: int) -> Tensor:
        """h of a site before its RMSNorm, [..., d]."""
        if self.ablations is None or site == 0:
            hidden = depth.sources[0].value if site == 0 else depth.stream
            assert hidden is not None
            return hidden
        sources = self._sources(depth, site)
        query, values = self._query(site, sources), [source.value for source in sources]
        return self._used(
            depth, site, depth_attention(query, self._keys(sources), values, self.ablations.scoring)
        )

    def _used(self, depth: Depth, site: int, mixture: Tensor) -> Tensor:
        """h of a site from its mixture m and the stream s: m, or s + m; with a gate γ, s + γ(m − s), or s + γm.

        γ = 0 is the plain stream, γ = 1 the published read. Site 0 has one source: it is what is read, and adding it to
        the stream would double it.
        """
        replaces = self.variant.routing is Routing.replace
        if site == 0 or (replaces and self.gates is None):
            return mixture
        assert depth.stream is not None
        if self.gates is None:
            return depth.stream + mixture
        return depth.stream + self.gates[site - 1].to(mixture.dtype) * (
            mixture - depth.stream if replaces else mixture
        )

    def weights(self, depth: Depth, site: int) -> Tensor | None:
        """α of a site, float32 [..., sources], in the order of `plan.sources(site)`; None where nothing routes.

        [..., heads, sources] for several heads.
        """
        if site == 0 or self.ablations is None:
            return None
        sources = self._sources(depth, site)
        return depth_weights(
            self._query(site, sources), self._keys(sources), self.ablations.scoring
        )

    def _query(self, site: int, sources: tuple[Source, ...]) -> Tensor:
        assert self.queries is not None and self.ablations is not None
        return self.ablations.query(self.queries[site - 1], site, sources[-1])

    def _sources(self, depth: Depth, site: int) -> tuple[Source, ...]:
        """What a site reads, in the order of `plan.sources(site)`."""
        assert self.ablations is not None
        written = (
            depth.sources
            if depth.partial is None
            else (*depth.sources, self.ablations.scaled(depth.partial, site))
        )
        written = written if self.plan.embedding or site == 0 else written[1:]
        return (written[-1].nothing(), *written) if self.plan.null and site else written

    def _keys(self, sources: tuple[Source, ...]) -> list[Tensor]:
        assert self.variant.keys is not None
        return [self.variant.keys.key(source, self.rank) for source in sources]
