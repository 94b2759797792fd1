"""Stopping politely: a signal asks, and the trainer leaves at the end of its step."""

from __future__ import annotations

import os
import signal
import subprocess
from types import FrameType

STOPPED = 75  # EX_TEMPFAIL: the run is saved and unfinished; the same command continues it.


class StopRequest:
    """While open, SIGTERM, SIGINT and SIGUSR1 set `received`; a second SIGINT interrupts at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    @property
    def number(self) -> int:
        """Of the signal received; 0 for none."""
        return int(self.received or 0)

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)


def requeue() -> str:
    """Puts this SLURM job back into the queue and returns its number; SLURM ends it, and starts it again later.

    Raises RuntimeError where SLURM refuses.
    """
    job = os.environ["SLURM_JOB_ID"]  # that of the task, for an array
    try:
        subprocess.run(
            ["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as fault:
        said = getattr(fault, "stderr", None) or fault
        raise RuntimeError(f"`scontrol requeue {job}` failed: {said}") from fault
    return job
