"""Where a text reads in depth: `python scripts/inspect_text.py run=runs/NAME text="…"`; see docs/generation.md."""

from __future__ import annotations

import signal
import sys

from lrattnres.config.commands import InspectConfig
from lrattnres.entry import leave, manual, settings
from lrattnres.report.inspection import inspect_run


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(manual(InspectConfig, str(__doc__).splitlines()[0]))
        sys.exit()
    sys.stdin.reconfigure(encoding="utf-8", errors="strict", newline="")  # type: ignore[union-attr]
    leave(lambda: bool(inspect_run(settings(InspectConfig, sys.argv[1:]), sys.stdin)))


if __name__ == "__main__":
    main()
