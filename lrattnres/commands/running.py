"""How a command takes `key=value` words for a schema, and how it ends."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lrattnres.commands import HELP
from lrattnres.config import fields_of
from lrattnres.entry import leave, manual, settings

INTERRUPTED = 128 + signal.SIGINT
TRAINING = "Every other word is one of `lrattnres train`, `--config-dir` too; see docs/config.md."


def command(
    doc: str | None,
    schema: type,
    run: Callable[..., object],
    *,
    words: Sequence[str] | None = None,
    positional: str | None = None,
    training: bool = False,
) -> None:
    """Parses the words, calls `run`, and exits: 2 for a refusal, 130 for Ctrl-C, 0 if it returns.

    Args:
        doc: docstring of the command, which `--help` shows in front of its settings.
        schema: dataclass of the command's own settings.
        run: takes an instance of `schema`, and with `training` the other words as a list.
        words: instead of the command line's.
        positional: key of every word that is no `key=value` of the schema.
        training: words that the schema does not know are settings of training.
    """
    # A reader that leaves, as `head` does, ends us without a word.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    words = sys.argv[1:] if words is None else words
    if HELP & set(words):
        print(manual(schema, (doc or "").strip()) + (f"\n\n{TRAINING}" if training else ""))
        return
    starts = tuple(f"{key}=" for key in fields_of(schema))
    own = [word for word in words if word.startswith(starts)]
    others = [word for word in words if not word.startswith(starts)]
    if positional:
        own, others = [*own, *(f"{positional}={word}" for word in others)], []

    def work() -> bool:
        arguments: list[Any] = [settings(schema, own if training else [*own, *others])]
        run(*arguments, *([others] if training else []))
        return True

    try:
        leave(work)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns, each aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
