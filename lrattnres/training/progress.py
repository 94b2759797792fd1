"""What a person sees of a run while it trains."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm

# What is shown of a record, in this order; metrics.jsonl has everything.
SHOWN = {
    "loss": "loss {:.4f}",
    "val_loss": "held-out loss {:.4f}",
    "lr_muon": "muon {:.1e}",
    "lr_adam": "adam {:.1e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
}


PAUSE = 5.0  # seconds between plain lines; a held-out loss and the last step are always shown


class ProgressBar:
    """A bar on a terminal; in a file or a pipe, a line from time to time.

    Learning rates are those of Muon and Adam; MFU is the share of the machine's peak FLOP/s.
    """

    def __init__(
        self, total: int, initial: int = 0, *, unit: str = "step", stream: TextIO | None = None
    ):
        """Shows the bar, if the stream is a terminal.

        Args:
            total: Steps of the whole run.
            initial: How many of them are done already.
            unit: What one of them is called.
            stream: Where to write; None: standard output.
        """
        self._stream = sys.stdout if stream is None else stream
        self._total, self._initial, self._unit, self._begin = total, initial, unit, time.monotonic()
        self._shown = -PAUSE
        self._bar: tqdm[Any] | None = None
        if _has_width(self._stream):
            self._bar = tqdm(
                total=total, initial=initial, unit=unit, file=self._stream, dynamic_ncols=True
            )

    def update(self, step: int, record: Mapping[str, Any]) -> None:
        """Shows progress.

        Args:
            step: The number of steps done.
            record: Any record of metrics.jsonl; it may be empty.
        """
        shown = [
            form.format(record[key]) for key, form in SHOWN.items() if record.get(key) is not None
        ]
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            if shown:
                self._bar.set_postfix_str(", ".join(shown))
        elif shown and (
            "val_loss" in record or step == self._total or time.monotonic() - self._shown >= PAUSE
        ):
            self._shown = time.monotonic()
            self.note(
                f"{self._unit} {step:>{len(str(self._total))}}/{self._total}, {', '.join(shown)}, "
                f"{self._left(step)} left"
            )

    def note(self, text: str) -> None:
        """Prints a line of its own, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def _left(self, step: int) -> str:
        """Time that is left, as a text."""
        done = step - self._initial
        if done <= 0:
            return "?"
        return tqdm.format_interval((time.monotonic() - self._begin) / done * (self._total - step))


def _has_width(stream: TextIO) -> bool:
    """Whether a bar can be drawn: terminals of containers, or of `script`, may have no columns."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
