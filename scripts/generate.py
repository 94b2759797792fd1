"""Continue a text: `python scripts/generate.py run=runs/NAME prompt="…"`; see docs/generation.md."""

from __future__ import annotations

import signal
import sys
from typing import TextIO

from lrattnres.config.commands import GenerateConfig
from lrattnres.entry import leave, manual, settings
from lrattnres.generation.run import generate_run

INTERRUPTED = 128 + signal.SIGINT


def run(arguments: list[str]) -> bool:
    """All continuations that are asked for."""
    generate_run(settings(GenerateConfig, arguments), _utf8(sys.stdin), _utf8(sys.stdout))
    return True


def _utf8(stream: TextIO) -> TextIO:
    """Text is UTF-8 and line ends are kept, whatever the environment says: what goes through a pipe stays what it is."""
    stream.reconfigure(encoding="utf-8", errors="strict", newline="")  # type: ignore[attr-defined]
    return stream


if __name__ == "__main__":
    signal.signal(
        signal.SIGPIPE, signal.SIG_DFL
    )  # a reader that leaves ends us, as it ends any filter, without a word
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(manual(GenerateConfig, __doc__))
        sys.exit()
    try:
        leave(lambda: run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
