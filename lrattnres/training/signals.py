"""How a signal stops a run: at a point where nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
from types import FrameType

from lrattnres.distributed.ranks import SharedError

STOPPED = 75  # EX_TEMPFAIL: the run is saved and unfinished; the same command continues it.


class Stopped(SharedError, KeyboardInterrupt):
    """A signal ended what a rank was doing outside of training; `str` is the name of the signal.

    All ranks raise it.
    """


class StopRequest:
    """A context that notes the first SIGTERM, SIGINT or SIGUSR1.

    A second SIGINT interrupts at once. Contexts may be nested: the inner one receives the signals,
    and the outer one knows of them when the inner one has ended.

    Attributes:
        received: The signal; None: none so far.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, *, at_once: bool = False) -> None:
        """Notes the settings; signals are received inside the context.

        Args:
            at_once: Whether the first signal also raises Stopped, wherever the program is.
        """
        self.received: signal.Signals | None = None
        self._at_once = at_once

    @property
    def number(self) -> int:
        """Number of the signal received; 0 for none."""
        return int(self.received or 0)

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, StopRequest):
                outer.received = outer.received or self.received

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.received = signal.Signals(number)
        if self._at_once:
            raise Stopped(self.received.name)


def requeue() -> str:
    """Puts this SLURM job back into the queue. SLURM ends it now, and starts it again later.

    Returns:
        The number of the job.

    Raises:
        RuntimeError: SLURM refuses.
    """
    job = os.environ["SLURM_JOB_ID"]  # in an array, that of the task
    try:
        subprocess.run(
            ["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise RuntimeError(f"`scontrol requeue {job}` failed: {said}") from error
    return job
