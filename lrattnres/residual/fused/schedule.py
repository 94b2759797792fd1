"""Which sites are read together: no query depends on the input, so one pass over old sources can
serve many sites.

A *group* is a run of consecutive sites. At its first site one operator reads all sources written so
far for every site
of the group: it finishes the first read and leaves an unfinished one (a Part) for each of the
others. At a later site one operator adds what was written since. In the backward pass the same
operators make the gradient of each source in one go a group. Groups may hold several blocks; a
group of one site is the plain read of all sources.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from lrattnres.kernels.launches import MOST_SOURCES
from lrattnres.residual.plan import DepthPlan


class Step(NamedTuple):
    """The operator of one site. opens: whether it starts a group, and so reads every source, or
    just the newest one.

    owned: sources it reads and whose gradients it makes; parts: unfinished reads it completes;
    later: sites it prepares;
    addend: whether its last source is the open block's sum plus the newest output; passes: whether
    its sources are read again after its group (or, in an open block, at the next site).
    """

    opens: bool
    owned: int
    parts: int
    later: int
    addend: bool
    passes: bool


class Traffic(NamedTuple):
    """What must be moved for one token, in values of the width they have: multiply by their size in
    bytes.

    values: elements of sources, reads and their gradients; scalars: float32 logits, weights,
    statistics and score gradients. Left out: queries and their gradients, which are moved once for
    128 tokens; and what a program reads a second time, which is in a cache by then.
    """

    values: int
    scalars: int

    def bytes(self, element_size: int) -> int:
        return self.values * element_size + 4 * self.scalars


def forward_traffic(step: Step, dim: int, rank: int, separate: bool) -> Traffic:
    """Reads: sources (the last in two summands), keys, parts. Writes: the read, the sum, an
    unfinished mixture a later site.
    """
    mixtures, sites = step.later if step.owned > 1 else 0, step.later + 1
    wide = step.owned + 2 * step.addend + step.parts + 1 + mixtures
    scalars = (2 * sites + 1) * step.owned + 2 * sites + step.parts
    return Traffic(wide * dim + step.owned * rank * separate, scalars)


def backward_traffic(step: Step, dim: int, rank: int, separate: bool) -> Traffic:
    """Reads: the read and its gradient, dh of later sites, sources, what is known of their
    gradients; keys once more for the queries. Writes: the gradients of the sources, and dh for the
    owners of the parts. What belongs to the sites is read once a launch.
    """
    launches, sites = launches_for(step), step.later + 1
    wide = launches * (1 + sites) + (2 + step.passes) * step.owned + (step.parts > 0)
    narrow = step.owned * (1 + (2 + step.passes) * separate)
    scalars = (3 * sites + 1) * step.owned + launches * 2 * (sites + 1)
    return Traffic(wide * dim + narrow * rank, scalars)


def launches_for(step: Step) -> int:
    """Launches of the backward kernel, by which `step` makes the gradients of its sources."""
    return -(-step.owned // MOST_SOURCES)


def steps(plan: DepthPlan, starts: tuple[int, ...]) -> tuple[Step, ...]:
    """One operator a site, for groups that start at `starts`.

    Raises ValueError for a group that starts inside a block and goes on: the sum of that block is
    still growing.
    """
    ends = (*starts[1:], len(plan.sites))
    return tuple(
        step for start, end in zip(starts, ends, strict=True) for step in _group(plan, start, end)
    )


def _group(plan: DepthPlan, start: int, end: int) -> list[Step]:
    closed = [site == 0 or site in plan.ends for site in range(start, end)]
    if not closed[0] and end > start + 1:
        raise ValueError(
            f"a group of sites {start} to {end - 1}: site {start} lies inside a block, "
            "whose sum is not complete"
        )
    found, parts = [], 1
    for site, complete in zip(range(start, end), closed, strict=True):
        opens, last = site == start, site == plan.sublayers
        owned = len(plan.sources(site)) if opens else 1
        addend = site > 0 and len(plan.sources(site)[-1]) > 1
        later = end - site - 1 if complete else 0
        passes = not last if not complete else end <= plan.sublayers
        found.append(Step(opens, owned, 0 if opens else parts, later, addend, passes))
        parts += complete and not opens
    return found


def single(plan: DepthPlan) -> tuple[int, ...]:
    """Every site a group of its own: each reads all its sources."""
    return tuple(plan.sites)


LARGEST = 17  # sites of a group: their sums must fit into the registers of a GPU thread


@cache
def cheapest(plan: DepthPlan, rank_share: float, balance: float = 400) -> tuple[int, ...]:
    """The starts of groups that take the least time, forward and backward, for keys of width
    rank_share·d.

    An operator takes as long as its memory traffic or its instructions, whichever is longer.
    balance: warp instructions that a GPU issues while it moves d values of two bytes, d = 1024
    (H200: 400; H100: 600); infinite: count traffic alone. Where a block is longer than a group may
    be, every site reads on its own.
    """
    stop = len(plan.sites)
    best: dict[int, tuple[float, tuple[int, ...]]] = {stop: (0.0, ())}
    for start in sorted({0, *plan.ends}, reverse=True):
        choices = []
        for end in range(start + 1, min(start + LARGEST, stop) + 1):
            if end in best:
                here = sum(_time(step, rank_share, balance) for step in _group(plan, start, end))
                choices.append((here + best[end][0], (start, *best[end][1])))
        if choices:
            best[start] = min(choices)
    return best[0][1] if 0 in best else single(plan)


def duration(
    plan: DepthPlan, starts: tuple[int, ...], rank_share: float, balance: float = 400
) -> float:
    """What `cheapest` makes small, for groups that start at `starts`: in units of moving d values
    of two bytes a token.
    """
    return sum(_time(step, rank_share, balance) for step in steps(plan, starts))


def _time(step: Step, rank_share: float, balance: float) -> float:
    """In units of moving d values. The instructions are a fit to the machine code for sm_90 at d =
    1024.
    """
    pairs = step.owned * (step.later + 1)
    forward, backward = (
        traffic(step, 1000, round(1000 * rank_share), False).values / 1000
        for traffic in (forward_traffic, backward_traffic)
    )
    forward_instructions = 100 * forward + 58 * pairs
    backward_instructions = 150 * backward + (90 + 5 * step.later) * pairs
    return max(forward, forward_instructions / balance) + max(
        backward, backward_instructions / balance
    )
