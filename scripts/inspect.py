"""Where a text reads in depth: `python scripts/inspect.py run=runs/NAME text="…"`; see docs/generation.md.

Python looks for modules beside the script that it runs, and the standard library has an `inspect`, which torch needs. So
this folder leaves the search path while that one is imported: here, and where another script of the folder comes upon
this file in its place.
"""

import sys
from pathlib import Path

if __name__ in ("__main__", "inspect"):
    path = sys.path[:]
    sys.path[:] = [place for place in path if Path(place).resolve() != Path(__file__).resolve().parent]
    if __name__ == "inspect":
        del sys.modules["inspect"]
    import inspect  # noqa: F401

    if __name__ == "inspect":
        sys.path[:] = path


def main() -> None:
    import signal

    from lrattnres.entry import leave, manual, settings
    from lrattnres.report.inspection import inspect_run
    from lrattnres.use_config import InspectConfig

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(manual(InspectConfig, str(__doc__).splitlines()[0]))
        sys.exit()
    sys.stdin.reconfigure(encoding="utf-8", errors="strict", newline="")  # type: ignore[union-attr]
    leave(lambda: bool(inspect_run(settings(InspectConfig, sys.argv[1:]), sys.stdin)))


if __name__ == "__main__":
    main()
