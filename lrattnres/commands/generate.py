"""Continue a text.

    lrattnres generate run=runs/NAME prompt="…"

docs/generation.md tells more.
"""

from __future__ import annotations

import sys
from typing import TextIO

from lrattnres.commands.running import command
from lrattnres.config.commands import GenerateConfig
from lrattnres.generation.run import generate_run


def run(config: GenerateConfig) -> None:
    """All continuations that are asked for."""
    generate_run(config, utf8(sys.stdin), utf8(sys.stdout))


def utf8(stream: TextIO) -> TextIO:
    """The stream in UTF-8 with line ends kept, whatever the environment says."""
    stream.reconfigure(encoding="utf-8", errors="strict", newline="")  # type: ignore[attr-defined]
    return stream


def main() -> None:
    command(__doc__, GenerateConfig, run)
