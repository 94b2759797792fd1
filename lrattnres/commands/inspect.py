"""Show where a text reads in depth.

    lrattnres inspect run=runs/NAME text="…"

docs/generation.md tells more.
"""

from __future__ import annotations

import sys

from lrattnres.commands.generate import utf8
from lrattnres.commands.running import command
from lrattnres.config.commands import InspectConfig
from lrattnres.report.inspection import inspect_run


def run(config: InspectConfig) -> None:
    """One text, drawn and written."""
    inspect_run(config, utf8(sys.stdin))


def main() -> None:
    command(__doc__, InspectConfig, run)
