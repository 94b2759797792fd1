"""The ranks that write and read checkpoints together: what fails on one of them fails on all, with the same words."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

from torch import distributed
from torch.distributed import ProcessGroup

from lrattnres.distributed.ranks import causes

T = TypeVar("T")


class CheckpointError(Exception):
    """A checkpoint that cannot be written, is damaged, or does not fit; `str` names the path and every fault."""


class RankError(Exception):
    """What went wrong, and on which rank if there are several."""


class Crew:
    """One process alone, or the ranks of a group.

    They talk over gloo, in a group of their own: a save in the background must not mix with what the training sends.
    Making a crew of a group is collective over the whole job; `timeout` is in seconds.
    """

    def __init__(self, group: ProcessGroup | None = None, timeout: float = 1800.0):
        self.group = None if group is None else _own_group(group, timeout)
        self.rank = distributed.get_rank(self.group) if self.group is not None else 0
        self.world = distributed.get_world_size(self.group) if self.group is not None else 1

    def share(self, action: Callable[[], T]) -> list[T]:
        """action() on every rank; returns what each of them returned, when all are through.

        Collective. Failures are raised on all ranks: a CheckpointError as it is, anything else as a RankError with the
        rank and the reason. A process alone raises what the action raised.
        """
        if self.world == 1:
            return [action()]
        interrupt: BaseException | None = None
        outcome: tuple[T | None, type[Exception] | None, str]
        try:
            outcome = action(), None, ""
        except CheckpointError as fault:
            outcome = None, CheckpointError, str(fault)
        except Exception as fault:
            outcome = None, RankError, str(self.named(fault))
        except BaseException as fault:
            interrupt, outcome = fault, (None, RankError, str(self.named(fault)))
        outcomes: list[Any] = [None] * self.world
        distributed.all_gather_object(outcomes, outcome, group=self.group)
        if interrupt is not None:
            raise interrupt
        for _, kind, text in outcomes:
            if kind is not None:
                raise kind(text)
        return [value for value, _, _ in outcomes]

    def first(self, action: Callable[[], T]) -> T:
        """action() on rank 0 alone; every rank returns, or raises, what came of it. Collective."""
        return self.share(lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def named(self, fault: BaseException) -> RankError:
        """A fault as this rank tells the others about it."""
        return RankError(
            f"rank {self.rank}: {reason(fault)}" if self.world > 1 else f"{reason(fault)}"
        )


def reason(fault: BaseException) -> BaseException:
    """What the system said, where it is behind a fault: the serializer answers a full disk with an error about itself."""
    return next((error for error in causes(fault) if isinstance(error, OSError)), fault)


@cache  # the runs of a sweep share it
def _own_group(group: ProcessGroup, timeout: float) -> ProcessGroup:
    ranks = distributed.get_process_group_ranks(group)
    return distributed.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout))
