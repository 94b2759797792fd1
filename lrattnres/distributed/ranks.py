"""The processes of one job: who they are, and how they decide together.

Counts, flags and decisions go over gloo on the host, so that none of them waits for a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.rendezvous import rendezvous

from lrattnres.distributed.liveness import Liveness

T = TypeVar("T")
CPU = torch.device("cpu")
# Seconds, for work that may take hours on some ranks; a process that dies over it is noticed.
PATIENCE = 7 * 24 * 3600.0


class RankError(Exception):
    """What went wrong on another rank, which tells it to the user; `str` has rank and reason."""


class SharedError(BaseException):
    """What all ranks raise, with the same class and the same words, if one of them does.

    A class that derives from it and from Exception, or KeyboardInterrupt, is made from its words
    alone.
    """


@dataclass(eq=False)
class Ranks:
    """All the processes of a job, as one of them sees them. The defaults are a process alone.

    Whatever is said to be collective must be called by all ranks, in the same order.

    Args:
        rank: Number of this process, from 0.
        world: How many there are.
        local: Number of this process on its machine.
        process_group: Over which they talk; None is the default one of torch.
        liveness: Their signs of life; None for a process alone.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    process_group: ProcessGroup | None = None
    liveness: Liveness | None = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone writes and speaks."""
        return self.rank == 0

    def apart(self, timeout: float) -> Ranks:
        """The same ranks, who talk over gloo in a process group of their own. Collective.

        What they say there does not mix with what goes on in the default process group, so that it
        can be said from another thread.

        Args:
            timeout: Seconds after which a rank that does not answer is given up.
        """
        return self if self.world == 1 else _apart(self, timeout)

    def sum(self, values: Tensor) -> Tensor:
        """Adds `values` of any shape over the ranks, in place; integers wrap around. Collective."""
        if self.world > 1:
            distributed.all_reduce(values, group=self.process_group)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Takes the element-wise maximum of `values` over the ranks, in place. Collective."""
        if self.world > 1:
            distributed.all_reduce(values, distributed.ReduceOp.MAX, group=self.process_group)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """[world, ...]: the values of all ranks, of one shape and dtype. Collective."""
        if self.world == 1:
            return values.unsqueeze(0)
        parts = [torch.empty_like(values) for _ in range(self.world)]
        distributed.all_gather(parts, values.contiguous(), group=self.process_group)
        return torch.stack(parts)

    def all_succeed(self, action: Callable[[], T]) -> T:
        """action() on every rank; none goes on before all are through. Collective.

        Returns:
            What it returned on this rank.

        Raises:
            RankError: It failed on another rank. If it failed on several, the first of them counts.
            SharedError: It raised one on any rank.
            Exception: Its own, on the first rank on which it failed.
        """
        if self.world == 1:
            return action()
        own: BaseException | None = None
        try:
            value = action()
        except BaseException as error:  # an interrupt is told to the others too
            own = error
        told = own
        try:
            failed = self.gather(torch.tensor(own is not None)).tolist()
            if any(failed):
                told = self._told(own, failed.index(True))
        except RuntimeError:
            if own is None:  # an error of its own counts more than that the others are gone
                raise
        if told is not None:
            raise told
        return value

    def collect(self, action: Callable[[], T]) -> list[T]:
        """As `all_succeed`, but returns what each rank returned, by pickle. Collective."""
        value = self.all_succeed(action)
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value, group=self.process_group)
        return values

    def of_first(self, action: Callable[[], T]) -> T:
        """action() on rank 0 alone; all ranks return its value, or raise as above. Collective."""
        box = [self.all_succeed(lambda: action() if self.first else None)]
        self._broadcast(box, 0)
        return box[0]  # type: ignore[return-value]

    def differing(self, values: dict[str, Any]) -> list[str]:
        """A line for each key whose value is not the same on all ranks. Collective."""
        everyone = self.collect(lambda: values)
        lines = []
        for key, expected in everyone[0].items():
            other = next(
                (rank for rank, found in enumerate(everyone) if found.get(key) != expected), None
            )
            if other is not None:
                lines.append(
                    f"{key}={expected} on rank 0, {everyone[other].get(key)} on rank {other}"
                )
        return lines

    def words(self, error: BaseException) -> str:
        """How an error of this rank is told: with the rank, if there are several."""
        if isinstance(error, RankError | SharedError) or self.world == 1:
            return str(error)
        return f"rank {self.rank}: {str(error) or type(error).__name__}"

    def _told(self, own: BaseException | None, failed: int) -> BaseException:
        """What this rank raises where rank `failed` is the first on which something went wrong."""
        box: list[Any] = [None]
        if own is not None and self.rank == failed:
            box = [(type(own) if isinstance(own, SharedError) else RankError, self.words(own))]
        self._broadcast(box, failed)
        if own is not None and (self.rank == failed or not isinstance(own, Exception)):
            return own
        kind, words = box[0]
        told: BaseException = kind(words)
        told.__cause__ = own
        return told

    def _broadcast(self, box: list[Any], source: int) -> None:
        if self.world > 1:
            distributed.broadcast_object_list(box, src=source, group=self.process_group, device=CPU)


@cache  # the runs of a sweep share it
def _apart(ranks: Ranks, timeout: float) -> Ranks:
    limit = timedelta(seconds=timeout)
    return replace(ranks, process_group=distributed.new_group(backend="gloo", timeout=limit))


def placement() -> tuple[int, int, int]:
    """(rank, world, local rank) as torchrun, or submitit in a SLURM job, says; (0, 1, 0) alone."""
    if "RANK" not in os.environ and os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
        from submitit.helpers import TorchDistributedEnvironment

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "RANK" not in os.environ:
        return 0, 1, 0
    rank, world, local = (int(os.environ[name]) for name in names)
    return rank, world, local


@cache  # the runs of a sweep share it
def start_ranks(device: str, timeout: float) -> Ranks:
    """Connects the ranks of this job, as `placement` has them. Collective.

    Args:
        device: "cpu" for gloo alone, "cuda" for gloo on the host and NCCL between GPUs.
        timeout: Seconds after which a collective fails.
    """
    rank, world, local = placement()
    if device == "cuda":
        torch.cuda.set_device(local)
    if world == 1:
        return Ranks()
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    store = next(rendezvous("env://", timeout=limit))[0]
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    ranks = Ranks(rank, world, local, liveness=Liveness(store, rank, world))
    distributed.barrier()
    return ranks


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it came from, the nearest first, each once."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def network_failed(error: BaseException | None) -> bool:
    """Whether an exception comes, in the end, from a collective that could not be completed."""
    return any(
        isinstance(cause, distributed.DistError)
        or (isinstance(cause, RuntimeError) and "gloo/transport" in str(cause))
        for cause in causes(error)
    )
