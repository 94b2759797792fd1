"""What an ablation changes beside the score: the value of a source, and the query. docs/ablations.md lists all of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrattnres.config import BlockScale, DepthConfig, LogitScale, Sources
from lrattnres.kernels.reference import Scoring, rms_norm
from lrattnres.residual.keys import Source
from lrattnres.residual.plan import DepthPlan

# The value of a block of n outputs, as a share of their sum.
BLOCK_SCALES = {
    BlockScale.sum: lambda n: 1.0,
    BlockScale.mean: lambda n: 1 / n,
    BlockScale.sqrt: lambda n: n**-0.5,
}
LOGIT_SCALES = {LogitScale.none: lambda width: 1.0, LogitScale.rsqrt: lambda width: width**-0.5}
# A factor of the query, and its start: a kernel need not know of them.
WITH_ANY_KERNEL = ("logit_scale", "query_std")


def changed(options: DepthConfig) -> dict[str, str]:
    """The settings that differ from the published method: name -> `model.depth.name=value`."""
    published = vars(DepthConfig())
    return {
        name: f"model.depth.{name}={_written(value)}"
        for name, value in vars(options).items()
        if value != published[name]
    }


def beyond_plain(options: DepthConfig) -> list[str]:
    """Those that need more than the plain operator on unchanged sources: plain torch, one read a site."""
    return [setting for name, setting in changed(options).items() if name not in WITH_ANY_KERNEL]


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else getattr(value, "name", str(value))


class Ablations(nn.Module):
    """Their parameters, for a router of M sites that route, keys of width r and values of width d.

    query_projections: float32 [M, r, d], zero at the start; source_scales: float32, one for each source that the head may read,
    one at the start. Both are there only if asked for. Raises ValueError for options that cannot be, or are not the plan's.
    """

    def __init__(self, options: DepthConfig, plan: DepthPlan, rank: int, dim: int):
        super().__init__()
        given = (options.embedding_source, options.sources is Sources.states, options.null_source)
        if (plan.embedding, plan.states, plan.null) != given:
            raise ValueError(
                f"{plan}: not the sources of {', '.join(changed(options).values()) or 'the default'}; use plan_of(config)"
            )
        if options.heads < 1 or rank % options.heads or dim % options.heads:
            raise ValueError(
                f"heads={options.heads}: must be at least 1 and divide rank={rank} and dim={dim}"
            )
        if options.sources is Sources.states and options.block_scale is not BlockScale.sum:
            raise ValueError(
                f"block_scale={options.block_scale.name}: states are no sums of blocks; write sum"
            )
        self.plan, self.block_scale = plan, BLOCK_SCALES[options.block_scale]
        self.scoring = Scoring(options.key_norm, options.heads)
        self.logit_scale = LOGIT_SCALES[options.logit_scale](rank // options.heads)
        projections, scales = (
            torch.zeros(plan.sublayers, rank, dim),
            torch.ones(sum(map(bool, plan.sources(plan.sublayers)))),
        )
        self.query_projections = nn.Parameter(projections) if options.input_queries else None
        self.source_scales = nn.Parameter(scales) if options.learned_scale else None

    def query(self, learned: Tensor, site: int, newest: Source) -> Tensor:
        """q_t, or q_t + W_t·RMSNorm(v) of the newest source v: [r] or [..., r], with the factor of the logits."""
        if self.query_projections is not None:
            weight = self.query_projections[site - 1].to(newest.value.dtype)
            learned = learned + F.linear(rms_norm(newest.value), weight).to(learned.dtype)
        return self.rescaled(learned)

    def rescaled(self, query: Tensor) -> Tensor:
        """A factor of the logits is one of the query, and so within reach of every kernel."""
        return query if self.logit_scale == 1 else self.logit_scale * query

    def scaled(self, source: Source, site: int) -> Source:
        """The newest source of a site as it is read. Keys of its own are not scaled with it."""
        sources = self.plan.sources(site)
        factor, value = self.block_scale(len(sources[-1])), source.value
        if self.source_scales is not None and (site > 0 or self.plan.embedding):
            wide = value if value.dtype == torch.float64 else value.float()
            return source._replace(
                value=(wide * (factor * self.source_scales[sum(map(bool, sources)) - 1])).to(
                    value.dtype
                )
            )
        return source if factor == 1 else source._replace(value=factor * value)
