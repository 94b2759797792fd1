"""Real ranks on 127.0.0.1: processes over gloo that start fast, end within a limit and give back
what they return.

    def job(rank: int, folder: Path) -> float: ...     # at the top of a test module
    losses = launch(job, 4, tmp_path)                  # one for each rank; a failure raises here
    with Ranks(job, 4, tmp_path) as ranks:             # the same, to kill or signal some of them
        ranks.kill(2)
        endings = ranks.wait(60)

Ranks are forked from the server of tests/programs.py. The caller holds the rendezvous, as
torchrun does, so no port is guessed and rank 0 can be killed like any other.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from lrattnres.distributed import ranks
from tests import programs


@dataclass
class Ending:
    """How a rank ended: `code` as of `Popen.returncode` (None: killed at the limit), what it
    returned and printed.
    """

    code: int | None
    value: Any
    output: str


class Ranks:
    """`world` running processes of function(rank, *arguments); left over ones are killed at the end
    of the `with`.

    `group`: a gloo process group over all of them is there before the call, else only torchrun's
    variables are. `timeout`: seconds until one of its collectives gives up. `function` must be
    found by its module's name.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        world: int,
        *arguments: Any,
        group: bool = True,
        timeout: float = 30.0,
    ):
        self._store = distributed.TCPStore(
            "127.0.0.1", 0, world, is_master=True, wait_for_workers=False
        )
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._values: dict[int, Any] = {}
        self._processes, self._pipes = [], dict[Connection, int]()
        server = programs.server()
        for rank in range(world):
            receive, send = server.Pipe(duplex=False)
            environment = {
                **{
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": world,
                    "LOCAL_WORLD_SIZE": world,
                },
                **{
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": self._store.port,
                    "GLOO_SOCKET_IFNAME": "lo",
                },
                **{
                    "TORCHELASTIC_USE_AGENT_STORE": True,
                    "TORCHELASTIC_RESTART_COUNT": 0,
                    "OMP_NUM_THREADS": 1,
                },
            }
            task = (
                function,
                rank,
                arguments,
                environment,
                timeout if group else None,
                self._printed(rank),
                send,
            )
            process = server.Process(target=_rank, args=task, daemon=True)
            process.start()
            send.close()
            self._processes.append(process)
            self._pipes[receive] = rank

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a rank that still runs."""
        pid = self._processes[rank].pid
        assert pid is not None and self._processes[rank].is_alive(), (
            f"rank {rank} has ended already:\n{self.output(rank)}"
        )
        os.kill(pid, number)

    def output(self, rank: int) -> str:
        """What a rank has printed so far, errors included."""
        path = self._printed(rank)
        return path.read_text() if path.exists() else ""

    def until(self, rank: int, text: str, limit: float = 30.0) -> None:
        """Waits until a rank has printed `text`."""
        deadline = time.monotonic() + limit
        while text not in self.output(rank):
            assert time.monotonic() < deadline, (
                f"rank {rank} has not printed {text!r}:\n{self.output(rank)}"
            )
            time.sleep(0.005)

    def wait(self, limit: float) -> list[Ending]:
        """Waits until all ranks have ended, at most `limit` seconds; then the rest are killed."""
        deadline = time.monotonic() + limit
        while self._pipes and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(self._pipes), left):
                assert isinstance(ready, Connection)
                rank = self._pipes.pop(ready)
                with contextlib.suppress(EOFError):  # ended without a value
                    self._values[rank] = pickle.loads(ready.recv_bytes())
                ready.close()
        codes = []
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            codes.append(process.exitcode)
            process.kill()
            process.join()
        return [
            Ending(code, self._values.get(rank), self.output(rank))
            for rank, code in enumerate(codes)
        ]

    def _printed(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.txt"


def launch(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    limit: float = 60.0,
    group: bool = True,
    timeout: float = 30.0,
) -> list[Any]:
    """Runs function(rank, *arguments) on `world` ranks and returns what each returned.

    Raises AssertionError with the output of every rank that failed or was not through after `limit`
    seconds.
    """
    with Ranks(function, world, *arguments, group=group, timeout=timeout) as ranks:
        endings = ranks.wait(limit)
    failed = [
        f"rank {rank}: exit code {end.code}\n{end.output}"
        for rank, end in enumerate(endings)
        if end.code != 0
    ]
    assert not failed, "\n".join(failed)
    return [end.value for end in endings]


def connected() -> ranks.Ranks:
    """Inside of a rank with a process group: all of them, in another one of their own."""
    return ranks.Ranks(distributed.get_rank(), distributed.get_world_size()).apart(30.0)


def _rank(
    function: Callable[..., Any],
    rank: int,
    arguments: tuple[Any, ...],
    environment: dict[str, Any],
    timeout: float | None,
    printed: Path,
    send: Connection,
) -> None:
    """The whole life of one rank. The value is sent last, after the group has gone."""
    with printed.open("wb", buffering=0) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", 1, closefd=False),
        os.fdopen(2, "w", 1, closefd=False),
    )
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        if timeout is not None:
            distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
            distributed.barrier()  # a rank that ends at once must not leave before all are connected
        value = function(rank, *arguments)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        send.send_bytes(pickle.dumps(value))
    except BaseException as fault:
        traceback.print_exc()
        sys.stderr.flush()
        # Not through interpreter exit: a group with dead members would wait for them there.
        os._exit(fault.code if isinstance(fault, SystemExit) and isinstance(fault.code, int) else 1)
