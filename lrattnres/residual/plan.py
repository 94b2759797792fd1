"""Which sources each site reads: the granularity of depth routing, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from lrattnres.config import ModelConfig, Sources


@dataclass(frozen=True)
class DepthPlan:
    """The M sub-layers of a model in contiguous depth blocks, and what each site reads of them.

    Sites are counted by what has been written when they read: site s reads after s sub-layers, so
    site s feeds sub-layer s (from 0) and site M feeds the output head.

    Args:
        sublayers: M.
        blocks: N blocks of even size, of which block j = 1 … N ends after sub-layer ⌈M·j/N⌉; or how
            many sub-layers each block has; None: every sub-layer is a block of its own.
        embedding: whether sites after the first read the embedding too.
        states: a source holds all outputs up to the end of its block.
        null: those sites may also read nothing, a source without outputs.
        window: they read so many of the newest blocks; None: all.

    Attributes:
        ends: how many sub-layers have been written when each block is complete.
    """

    sublayers: int
    blocks: int | tuple[int, ...] | None = None
    embedding: bool = True
    states: bool = False
    null: bool = False
    window: int | None = None
    ends: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if error := error_of(self.blocks, self.sublayers):
            raise ValueError(error)
        object.__setattr__(self, "ends", ends_of(self.blocks, self.sublayers))

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
        blocks = self.written(site)
        if self.window is not None:
            blocks = blocks[-self.window :]
        return (
            *[range(0)] * (self.null and site > 0),
            *[range(1)] * (self.embedding or site == 0),
            *blocks,
        )

    def written(self, site: int) -> tuple[range, ...]:
        """The blocks before a site, in or out of its window; the open one comes last."""
        starts = (0, *(end for end in self.ends if end <= site))
        complete = tuple(range(start + 1, end + 1) for start, end in pairwise(starts))
        partial = (range(starts[-1] + 1, site + 1),) if starts[-1] < site else ()
        return tuple(range(block.stop) if self.states else block for block in (*complete, *partial))

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


Blocks = int | Sequence[int] | None  # model.blocks


def error_of(blocks: Blocks, sublayers: int) -> str | None:
    """What is wrong with `model.blocks` for M sub-layers, and what to write."""
    if blocks is None:
        return None
    if isinstance(blocks, int):
        if 1 <= blocks <= sublayers:
            return None
        return (
            f"model.blocks={blocks}: must be between 1 and 2*model.layers={sublayers}, the number "
            "of sub-layers; null makes every sub-layer a source"
        )
    written = f"model.blocks=[{','.join(map(str, blocks))}]"
    if not blocks or min(blocks) < 1:
        return f"{written}: every depth block has at least one sub-layer; write sizes from 1 on"
    if sum(blocks) != sublayers:
        return (
            f"{written}: the sizes of the depth blocks add up to {sum(blocks)}; they must add up "
            f"to 2*model.layers={sublayers}, the number of sub-layers"
        )
    return None


def ends_of(blocks: Blocks, sublayers: int) -> tuple[int, ...]:
    """How many sub-layers have been written when each depth block is complete."""
    if blocks is None or isinstance(blocks, int):
        count = blocks or sublayers
        return tuple(-(-sublayers * j // count) for j in range(1, count + 1))
    return tuple(accumulate(blocks))


def named(blocks: Blocks) -> str:
    """Depth blocks in short: their number, or their sizes, such as 1-1-2-4; "full" for None."""
    if blocks is None or isinstance(blocks, int):
        return str(blocks or "full")
    return "-".join(map(str, blocks))


def plan_of(config: ModelConfig) -> DepthPlan:
    """The plan of a model: both sub-layers of each of its transformer blocks write."""
    depth, blocks = config.depth, config.blocks
    return DepthPlan(
        2 * config.layers,
        tuple(blocks) if isinstance(blocks, Sequence) else blocks,
        depth.embedding_source,
        depth.sources is Sources.states,
        depth.null_source,
        depth.window,
    )
