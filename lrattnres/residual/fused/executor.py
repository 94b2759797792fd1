"""Attention residuals with several sites read at once: the same reads as in attention.py, in fewer
passes over memory.

No query depends on the input, so one operator can read the sources written so far for every site of
a ReadGroup (schedule.py): it finishes the first site's read, and leaves a Part, an unfinished read,
for each of the others. At a later site one operator adds what was written since. In the backward
pass the same operators make the gradient of each source in one go. This is the only user of Parts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from lrattnres.config import ModelConfig
from lrattnres.kernels.backends import DepthKernels, Part
from lrattnres.kernels.reference import EPSILON, rms_norm
from lrattnres.residual.attention import AttentionResiduals
from lrattnres.residual.base import Read, ResidualPath, path_of
from lrattnres.residual.fused.schedule import cheapest, single, steps
from lrattnres.residual.keys import Source
from lrattnres.residual.plan import DepthPlan


class State(NamedTuple):
    """`attention.State`, with what has been read ahead.

    Args:
        sources, partial, stream: as there. The tensors are those that the newest operator handed
            on, so that each
            one's gradient is made in one go.
        read: RMSNorm(h) of the next site.
        parts: for every further site of its ReadGroup, what has been read of the sources so far.
    """

    sources: tuple[Source, ...]
    partial: Source | None
    stream: Tensor | None
    read: Tensor | None
    parts: tuple[tuple[Part, ...], ...]


class ReadTogether(AttentionResiduals):
    """An attention-residual path whose reads are computed by `kernels`.

    Args:
        config: the model's.
        kernels: see `kernels.backends.DepthKernels`.
        starts: the first sites, from 0, of the ReadGroups. None: what takes the least time, if the
            kernels gain by
            reading sites together; else each site is a group.
    """

    logit_scale: float = (
        1.0  # of an ablation: a factor of the query is within reach of every kernel
    )

    def __init__(
        self, config: ModelConfig, kernels: DepthKernels, starts: Sequence[int] | None = None
    ):
        super().__init__(config)
        if beyond := type(self).beyond_kernels(config):
            raise ValueError(
                f"{', '.join(beyond)}: kernels={kernels.name} do not compute it; "
                "write kernels=reference"
            )
        self.kernels = kernels
        # A kernel can return RMSNorm(h) where h is the mixture; its epsilon is that of the keys.
        self.normalizes = not self.keeps_stream and self.eps == EPSILON
        if starts is None:
            best = kernels.grouped
            starts = cheapest(self.plan, self.rank / self.dim) if best else single(self.plan)
        self.steps = steps(self.plan, tuple(starts))

    def begin(self, embedding: Tensor) -> State:  # type: ignore[override]
        state = State((), None, embedding if self.keeps_stream else None, None, ())
        return self.received(state, 0, self.first(embedding))

    def received(self, state: State, site: int, newest: Source) -> State:  # type: ignore[override]
        """The state with the newest source written, and the site that follows it read."""
        step, partial = self.steps[site], state.partial
        if partial and partial.emitted is not None and newest.emitted is not None:
            newest = newest._replace(emitted=partial.emitted + newest.emitted)
        own = (*state.sources, newest) if step.opens else (newest,)
        reading = self.kernels.read(
            self.queries_from(site, step.later, newest),
            [source.value for source in own],
            [source.emitted for source in own if source.emitted is not None],
            partial.value if partial else None,  # the open block's sum is left to the operator
            () if step.opens else state.parts[0],
            normalize=self.normalizes,
            passes=step.passes,
        )
        kept = () if step.opens else state.sources
        handed_on = map(Source, reading.values, reading.keys or [None] * len(reading.values))
        *others, last = handed_on
        if self.completes(site):
            state = state._replace(sources=(*kept, *others, last), partial=None)
        else:
            state = state._replace(sources=(*kept, *others), partial=last)
        waiting = ((),) * len(reading.parts) if step.opens else state.parts[1:]
        if (
            reading.parts
        ):  # in an open block nothing is prepared: its sum is not what later sites will read
            pairs = zip(waiting, reading.parts, strict=True)
            waiting = tuple((*parts, part) for parts, part in pairs)
        read = reading.out
        if not self.normalizes:
            read = rms_norm(self.used(state, site, read), self.eps)  # type: ignore[arg-type]
        return state._replace(read=read, parts=waiting)

    def queries_from(self, site: int, later: int, newest: Source) -> Tensor:
        """The queries [1 + later, r] of a site and of those that are prepared."""
        if site == 0:  # the first site has no query, and with one source any would do
            first = F.pad(self.queries[:later], (0, 0, 1, 0))
        else:
            first = self.queries[site - 1 : site + later]
        return first if self.logit_scale == 1 else self.logit_scale * first

    def read(self, state: State, site: int) -> Read:
        assert state.read is not None
        return Read(state.read)

    def definition(self) -> ResidualPath:
        definition = copy.copy(self)  # a module's copy has the same parameters
        definition.__class__ = path_of(self.config)  # type: ignore[assignment]
        return definition

    def decodes(self, *, together: bool) -> None:
        """`together`: the sites of a depth block read the closed sources in one pass, and merge the
        rest.
        """
        self.steps = steps(self.plan, blockwise(self.plan) if together else single(self.plan))


def blockwise(plan: DepthPlan) -> tuple[int, ...]:
    """A ReadGroup a depth block; where every sub-layer is a block, a group a site."""
    return (0, *plan.ends[:-1]) if len(plan.ends) < plan.sublayers else single(plan)


@cache
def together(path: type[AttentionResiduals]) -> type[ReadTogether]:
    """An attention-residual path, with ablations or without, that reads sites together."""
    return type(f"{path.__name__}Together", (ReadTogether, path), {"__module__": __name__})
