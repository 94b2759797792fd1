"""Which sources each site reads: the granularity of depth routing, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from lrattnres.config import ModelConfig, Sources


@dataclass(frozen=True)
class DepthPlan:
    """M residual-writing sub-layers in N contiguous blocks; block j = 1..N ends after sub-layer
    ⌈M·j/N⌉.

    Sites are counted by what has been written when they read: site s reads after s sub-layers, so
    site s feeds sub-layer s (from 0) and site M feeds the output head. `blocks=None` makes every
    sub-layer a block of its own.
    embedding: whether sites after the first read it too. states: a source holds all outputs up to
    the end of its block.
    null: those sites may also read nothing, a source without outputs.
    """

    sublayers: int
    blocks: int | None = None
    embedding: bool = True
    states: bool = False
    null: bool = False
    ends: tuple[int, ...] = field(
        init=False
    )  # how many sub-layers have been written when each block is complete

    def __post_init__(self) -> None:
        if self.blocks is not None and not 1 <= self.blocks <= self.sublayers:
            raise ValueError(
                f"blocks={self.blocks}: must be between 1 and {self.sublayers}, the number of sub-layers"
            )
        blocks = self.blocks or self.sublayers
        ends = tuple(-(-self.sublayers * j // blocks) for j in range(1, blocks + 1))
        object.__setattr__(self, "ends", ends)

    @property
    def sites(self) -> range:
        """All read sites; site 0 has one source and routes nothing."""
        return range(self.sublayers + 1)

    def closes(self, site: int) -> bool:
        """Whether the sub-layer that site `site` feeds is the last of its block."""
        return site + 1 in self.ends

    def sources(self, site: int) -> tuple[range, ...]:
        """The outputs each source of a site sums, counted from 1; the embedding, output 0, is
        `range(0, 1)`.

        The null source, `range(0)`, comes first.
        """
        starts = (0, *(end for end in self.ends if end <= site))
        complete = tuple(range(start + 1, end + 1) for start, end in pairwise(starts))
        partial = (range(starts[-1] + 1, site + 1),) if starts[-1] < site else ()
        blocks = tuple(
            range(block.stop) if self.states else block for block in (*complete, *partial)
        )
        return (
            *[range(0)] * (self.null and site > 0),
            *[range(1)] * (self.embedding or site == 0),
            *blocks,
        )

    @property
    def reads(self) -> int:
        """S of the paper's appendix: the number of sources summed over every site that routes;
        nothing costs nothing.
        """
        return sum(sum(map(bool, self.sources(site))) for site in self.sites if site > 0)

    @property
    def retained(self) -> int:
        """K of the paper's appendix: the most sources that any site reads, and so the most that are
        kept at one time.
        """
        return max(sum(map(bool, self.sources(site))) for site in self.sites)


def plan_of(config: ModelConfig) -> DepthPlan:
    """The plan of a model: both sub-layers of each of its transformer blocks write."""
    depth = config.depth
    return DepthPlan(
        2 * config.layers,
        config.blocks,
        depth.embedding_source,
        depth.sources is Sources.states,
        depth.null_source,
    )
