"""The commands: `lrattnres NAME words`, and in a clone the file that is named after it.

Each command is one module here, whose docstring begins with what it does.
"""

from __future__ import annotations

import ast
import importlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType

COMMANDS = (
    *("train", "eval", "generate", "inspect"),  # train, and use what was trained
    *("export", "convert", "tokenize"),  # make folders that others read
    *("cost", "estimate"),  # before anything is trained
    *("table1", "report", "submission", "sweep_status"),  # many runs
    "config_reference",
)
HELP = {"-h", "--help"}


def main(name: str | None = None) -> None:
    """Runs one command with the words of the command line, and exits as the command does.

    Args:
        name: the command, and all words are its own; None: the first word is its name.
    """
    words = sys.argv[1:]
    if not words or HELP & set(words):
        # A reader that leaves, as `head` does, ends us without a word.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if name is None:
        if not words or words[0] in HELP:
            print(listing())
            return
        if words[0] not in COMMANDS:
            print(
                f"refused: {words[0]}: no such command; write one of {', '.join(COMMANDS)}",
                file=sys.stderr,
            )
            sys.exit(2)
        name = words[0]
        sys.argv = [f"lrattnres {name}", *words[1:]]
    if name == "train":  # before its imports, which take seconds
        for early in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(early, stop_early)
    importlib.import_module(f"{__name__}.{name}").main()


def stop_early(number: int, frame: FrameType | None) -> None:
    """What a signal does where nothing has begun yet: a stop like any other.

    It leaves with STOPPED of training/signals.py, which cannot be imported so early.
    """
    name = signal.Signals(number).name
    os.write(2, f"{name}: stopped before anything was done; the same command starts it\n".encode())
    os._exit(75)  # an exception might get lost inside an import


def listing() -> str:
    """What `lrattnres --help` shows: every command with the first line of its docstring."""
    lines = []
    for name in COMMANDS:
        # Read, not imported: torch alone takes seconds.
        source = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        lines.append(f"  {name:<17} {first.removesuffix('.')}")
    return "\n".join(
        [
            "usage: lrattnres COMMAND [key=value] …",
            "",
            *lines,
            "",
            "lrattnres COMMAND --help tells the settings of each.",
        ]
    )
