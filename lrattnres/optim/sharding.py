"""Where the rows of a matrix lie, which rank makes it orthogonal, and how its rows travel.

The orthogonal factor needs a whole matrix, and a sharded one is whole nowhere. So each matrix has
one owner: the ranks that hold its shards send them there, and the owner sends every rank its rows
of the result. The matrices of one shape travel together, in one all-to-all each way. A rank then
receives and computes its share of the matrices. An all-gather would bring all of them to every
rank, to be computed as often as there are ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

Pending = Callable[[], Tensor]
"""Rows on their way: the call waits for them and returns them."""


@dataclass(frozen=True)
class Layout:
    """What each rank holds of a matrix.

    Args:
        rows: for each rank, its rows as a range [start, stop).
        replica: for each rank, which copy of the matrix its rows belong to. The ranks of one copy
            hold the whole matrix between them.
    """

    rows: tuple[tuple[int, int], ...]
    replica: tuple[tuple[int, ...], ...]

    @property
    def world(self) -> int:
        """Ranks of the job; 1 for a process alone."""
        return len(self.rows)


def layout(parameter: Tensor, mesh: DeviceMesh | None = None) -> Layout:
    """The layout of a parameter.

    Args:
        parameter: [rows, ...]. A DTensor lies as it says; anything else is whole on each rank.
        mesh: the ranks of a job, for a parameter that is no DTensor; None for a single process.

    Raises:
        ValueError: a DTensor is divided otherwise than `fully_shard` divides it, by rows along one
            dimension of its mesh, or the mesh is not the whole job.
    """
    sharded: int | None = None
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        split = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
        if len(split) > 1 or any(
            type(placements[axis]) is not Shard or placements[axis] != Shard(0) for axis in split
        ):
            raise ValueError(
                f"placements {placements}: Muon updates rows that are divided once; "
                "use Shard(0) and Replicate()"
            )
        sharded = split[0] if split else None
    rows = parameter.shape[0]
    if mesh is None:
        return Layout(((0, rows),), ((),))
    world = distributed.get_world_size()
    if sorted(mesh.mesh.flatten().tolist()) != list(range(world)):
        raise ValueError(
            f"{mesh}: must hold each of the job's {world} ranks once; all of them own matrices"
        )
    most = -(
        -rows // (1 if sharded is None else mesh.size(sharded))
    )  # `torch.chunk`: the last shards are short, or empty
    ranges, replica = [], []
    for rank in range(world):
        place = (mesh.mesh == rank).nonzero()[0].tolist()
        shard = 0 if sharded is None else place.pop(sharded)
        ranges.append((min(rows, most * shard), min(rows, most * (shard + 1))))
        replica.append(tuple(place))
    return Layout(tuple(ranges), tuple(replica))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, as a view; to be called where no gradients are recorded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def owners(costs: Sequence[int], world: int) -> list[int]:
    """A rank for each matrix, so that all ranks have about as much to do.

    The most costly matrix first, each goes to the rank with the least to do so far (the first of
    equals). The result is the same on every rank, since it depends on nothing else. No rank gets
    more than 4/3 of the best possible (Graham, 1969).

    Args:
        costs: of each matrix, in any unit.
        world: the number of ranks.
    """
    load, chosen = [0] * world, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        chosen[index] = min(range(world), key=load.__getitem__)
        load[chosen[index]] += costs[index]
    return chosen


class Exchange:
    """How n equal matrices [rows, cols] of one layout get to their owners and back.

    Both ways are collective: every rank of the job takes them, all in the same order. A single
    process has all rows, and nothing is copied.

    Args:
        layout: that of each matrix.
        owned: how many matrices each rank owns: the first `owned[0]` are those of rank 0, the next
            `owned[1]` those of rank 1, and so on. The attribute `mine` is this rank's number.
    """

    def __init__(self, layout: Layout, owned: Sequence[int]):
        self._world, self._owned = layout.world, list(owned)
        self._rank = distributed.get_rank() if layout.world > 1 else 0
        self.mine = owned[self._rank]
        self._rows = [stop - start for start, stop in layout.rows]
        self._ranges, self._here = layout.rows, self._rows[self._rank]
        self._near = [replica == layout.replica[self._rank] for replica in layout.replica]

    def gather(self, shards: Tensor) -> Pending:
        """Brings every matrix to its owner, who takes rows from the ranks of its own replica only.

        Args:
            shards: this rank's rows of all matrices, [n, local rows, cols].

        Returns:
            The matrices that this rank owns, [mine, rows, cols], once they are waited for.
        """
        if self._world == 1:
            return lambda: shards
        parts = [
            part.flatten(0, 1)
            for part, near in zip(shards.split(self._owned), self._near, strict=True)
            if near
        ]
        came = [rows * near for rows, near in zip(self._rows, self._near, strict=True)]
        received, cols = [self.mine * rows for rows in came], shards.shape[-1]
        wait = _all_to_all(torch.cat(parts), self._gathered(), received)

        def whole() -> Tensor:
            blocks = zip(wait().split(received), came, strict=True)
            return torch.cat([block.view(self.mine, rows, cols) for block, rows in blocks], dim=1)

        return whole

    def scatter(self, matrices: Tensor) -> Pending:
        """Brings every rank, of every replica, its rows of the results.

        Args:
            matrices: those that this rank owns, [mine, rows, cols].

        Returns:
            This rank's rows of all matrices, [n, local rows, cols], once they are waited for.
        """
        if self._world == 1:
            return lambda: matrices
        parts = [matrices[:, start:stop].flatten(0, 1) for start, stop in self._ranges]
        wait = _all_to_all(
            torch.cat(parts), self._scattered(), [owned * self._here for owned in self._owned]
        )
        shape = sum(self._owned), self._here, matrices.shape[-1]
        return lambda: wait().view(shape)

    def rows_sent(self) -> tuple[int, int]:
        """How many rows this rank sends to others: on the way to the owners, and back."""
        gathered, scattered = self._gathered(), self._scattered()
        return sum(gathered) - gathered[self._rank], sum(scattered) - scattered[self._rank]

    def _gathered(self) -> list[int]:
        return [
            owned * self._here * near for owned, near in zip(self._owned, self._near, strict=True)
        ]

    def _scattered(self) -> list[int]:
        return [self.mine * rows for rows in self._rows]


def _all_to_all(rows: Tensor, sent: list[int], received: list[int]) -> Pending:
    """Sends `sent[rank]` rows of [sum, cols] to each rank; what comes is in the order of ranks."""
    came = rows.new_empty(sum(received), rows.shape[1])
    work = distributed.all_to_all_single(came, rows, received, sent, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return came

    return wait


def staggered(tasks: Iterable[Iterator[None]], alive: int) -> None:
    """Runs tasks that yield between their stages, each one stage behind the one before.

    With three alive, the next task computes while the bytes of one travel.

    Args:
        tasks: iterators; what they yield is ignored.
        alive: the most tasks that have begun and not ended; with 1, they run one after the other.
    """
    running: deque[Iterator[None]] = deque()
    waiting = iter(tasks)
    while True:
        if len(running) < alive and (task := next(waiting, None)) is not None:
            running.appendleft(task)
        if not running:
            return
        # The newest first: its first transfer is on its way before an older one computes.
        for task in list(running):
            if next(task, _DONE) is _DONE:
                running.remove(task)


_DONE = object()
