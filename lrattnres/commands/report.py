"""Write a report on runs.

    lrattnres report RUNFOLDER... [out=report]

RUNFOLDER is a run folder, an export from Weights & Biases, or a folder with such folders in it at
any depth. docs/reproducing.md tells more.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lrattnres.commands.running import command
from lrattnres.config import ConfigError, option
from lrattnres.report.read import ReportError
from lrattnres.runs.folder import RunError


@dataclass
class ReportConfig:
    runs: list[str] = option("RUNFOLDER; `runs=` may be left out", list)
    out: str = option("folder that is made, or a report that is replaced", "report")


def run(config: ReportConfig) -> None:
    """One report, and where it is."""
    if not config.runs or not config.out:
        empty = "runs" if not config.runs else "out"
        raise ConfigError([f"{empty}: not set; usage: lrattnres report RUNFOLDER... [out=report]"])
    from lrattnres.report.build import PAGE, build_report  # it draws: not for --help

    out = Path(config.out)
    try:
        notes = build_report([Path(folder) for folder in config.runs], out)
    except ReportError as refusal:
        raise RunError(str(refusal)) from None
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{out / PAGE}, report.md, tables/ and figures/ beside it")


def main() -> None:
    command(__doc__, ReportConfig, run, positional="runs")
