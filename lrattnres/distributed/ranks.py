"""The processes of one job: who they are, and how they decide together.

Counts, flags and decisions go over gloo on the host, so that none of them waits for a GPU.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")
BEAT = 0.5  # seconds between two signs of life of a rank
PATIENCE = timedelta(days=7)
SILENCE = 3.0  # seconds without one after which a rank counts as gone


class Elsewhere(Exception):
    """Another rank failed, and has said why; this one stops with it."""


@dataclass
class Ranks:
    """One process (`rank`) of `world`, number `local` on its machine. The defaults are a process alone."""

    rank: int = 0
    world: int = 1
    local: int = 0
    step: int = 0  # told to the others, so that they can say how far a lost rank had come
    store: Store | None = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone writes and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place; integers wrap around."""
        if self.world > 1:
            distributed.all_reduce(values)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """The element-wise maximum over ranks, in place."""
        if self.world > 1:
            distributed.all_reduce(values, distributed.ReduceOp.MAX)
        return values

    def gather(self, values: Tensor, group: ProcessGroup | None = None) -> Tensor:
        """[world, ...]: the equally shaped values of all ranks. group: all of them, with a timeout of its own."""
        if self.world == 1:
            return values.unsqueeze(0)
        parts = [torch.empty_like(values) for _ in range(self.world)]
        distributed.all_gather(parts, values.contiguous(), group=group)
        return torch.stack(parts)

    def together(self, action: Callable[[], T], group: ProcessGroup | None = None) -> T:
        """action() on every rank; none goes on before all are through. If it fails on any, all raise: their own exception,
        or Elsewhere. group: see `gather`.
        """
        if self.world == 1:
            return action()
        fault: Exception | None = None
        try:
            value = action()
        except Exception as own:
            fault = own
        failed = self.gather(torch.tensor(fault is not None), group).tolist()
        if fault is not None:
            raise fault
        if any(failed):
            raise Elsewhere(
                f"rank {failed.index(True)} failed, and said why; rank {self.rank} stops with it"
            )
        return value

    def of_first(self, action: Callable[[], T]) -> T:
        """action() on rank 0 alone; every rank gets what it returned, or raises as `together` does."""
        box = [self.together(lambda: action() if self.first else None)]
        if self.world > 1:
            distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]  # type: ignore[return-value]

    def patiently(self, action: Callable[[], T]) -> T:
        """`together` for work that may take hours on some ranks; a process that dies over it is noticed all the same."""
        return self.together(
            action,
            distributed.new_group(backend="gloo", timeout=PATIENCE) if self.world > 1 else None,
        )

    def differing(self, values: dict[str, Any]) -> list[str]:
        """A line "key=… on rank 0, … on rank N" for each key whose value is not the same everywhere; the same on all."""
        if self.world == 1:
            return []
        everyone: list[Any] = [None] * self.world
        distributed.all_gather_object(everyone, values)
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

    def lost(self) -> str | None:
        """After a failed collective: which ranks give no more signs of life, and the step they were in; the same
        sentence on every rank. None if all of them live: then the network, or the slowest of them, is to blame.
        """
        if self.store is None:
            return None
        try:
            before = self._beats()
            time.sleep(SILENCE)
            gone = [
                rank
                for rank, beat in self._beats().items()
                if beat == before[rank] and rank != self.rank
            ]
            if not gone:
                return None
            names = ", ".join(f"rank {rank} (in step {before[rank].split()[1]})" for rank in gone)
            # Whoever finds out first is right: those who leave because of it fall silent too.
            return self.store.compare_set("lost", "", names).decode()
        except RuntimeError:
            return "the machine of the rendezvous"

    def _beats(self) -> dict[int, str]:
        assert self.store is not None
        return {rank: self.store.get(f"beat/{rank}").decode() for rank in range(self.world)}

    def _beat(self, store: Store) -> None:
        """The life of a thread: until the process, or the store, has gone."""
        with contextlib.suppress(RuntimeError):
            for count in range(2**62):
                store.set(f"beat/{self.rank}", f"{count} {self.step}")
                time.sleep(BEAT)


def placement() -> tuple[int, int, int]:
    """(rank, world, local rank) as torchrun, or submitit inside a SLURM job, say; (0, 1, 0) for a process alone."""
    if "RANK" not in os.environ and os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
        from submitit.helpers import TorchDistributedEnvironment

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "RANK" not in os.environ:
        return 0, 1, 0
    rank, world, local = (int(os.environ[name]) for name in names)
    return rank, world, local


@cache  # runs of one sweep share the group
def start_ranks(device: str, timeout: float) -> Ranks:
    """The ranks of this job, connected: gloo on the host and NCCL between GPUs (`device` "cuda").

    A collective that takes longer than `timeout` seconds fails.
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
    ranks = Ranks(rank, world, local, store=PrefixStore("lrattnres", store.clone()))
    beats = PrefixStore(
        "lrattnres", store.clone()
    )  # a connection of its own: one waits for the other
    threading.Thread(target=ranks._beat, args=(beats,), daemon=True).start()
    distributed.barrier()
    return ranks


def causes(fault: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it came from, the nearest first."""
    while fault is not None:
        yield fault
        fault = fault.__cause__ or fault.__context__


def network_failed(fault: BaseException | None) -> bool:
    """Whether an exception comes, at whatever remove, from a collective that could not be completed."""
    return any(
        isinstance(cause, distributed.DistError)
        or (isinstance(cause, RuntimeError) and "gloo/transport" in str(cause))
        for cause in causes(fault)
    )
