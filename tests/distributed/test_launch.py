"""The launcher itself: ranks talk to each other, and failures, kills and hangs come back within the
limit.
"""

import time

import pytest
import torch
from torch import distributed

from tests.distributed.launch import Ranks, launch


def total(rank: int, start: int) -> tuple[int, float]:
    value = torch.tensor(float(start + rank))
    distributed.all_reduce(value)
    return rank, value.item()


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("this one")


def hang(rank: int) -> None:
    print("started")
    if rank == 0:
        time.sleep(600)


def test_values_come_back_by_rank() -> None:
    assert launch(total, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_a_failure_is_shown() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1: exit code 1.*ValueError: this one"):
        launch(fail_on_one, 2)


def test_a_hang_ends_at_the_limit_and_a_kill_at_once() -> None:
    begin = time.monotonic()
    with Ranks(hang, 2) as ranks:
        ranks.until(0, "started")
        endings = ranks.wait(2)
    assert [end.code for end in endings] == [None, 0] and "started" in endings[0].output
    with Ranks(hang, 2) as ranks:
        ranks.until(0, "started")
        ranks.kill(0)
        assert next(end.code for end in ranks.wait(10)) == -9
    assert time.monotonic() - begin < 30
