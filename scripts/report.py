"""A report on runs: `python scripts/report.py RUNFOLDER... [out=report]`; see docs/reproducing.md.

RUNFOLDER is a run folder, an export from Weights & Biases, or a folder with such folders in it at any depth.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lrattnres.entry import REFUSED
from lrattnres.report.build import PAGE, build_report
from lrattnres.report.read import ReportError


def main() -> None:
    outs = [word.removeprefix("out=") for word in sys.argv[1:] if word.startswith("out=")]
    folders = [Path(word) for word in sys.argv[1:] if not word.startswith("out=")]
    if not folders or len(outs) > 1 or "" in outs:
        print("usage: python scripts/report.py RUNFOLDER... [out=report]", file=sys.stderr)
        sys.exit(REFUSED)
    out = Path(*outs) if outs else Path("report")
    try:
        faults = build_report(folders, out)
    except ReportError as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        sys.exit(REFUSED)
    for fault in faults:
        print(f"note: {fault}", file=sys.stderr)
    print(f"{out / PAGE}, report.md, tables/ and figures/ beside it")


if __name__ == "__main__":
    main()
