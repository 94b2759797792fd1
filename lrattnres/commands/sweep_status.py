"""Show what became of the runs of a sweep.

    lrattnres sweep_status [RUNS]

The exit code is 0 if every run is finished, else 1.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lrattnres.commands.composing import TRAIN
from lrattnres.commands.running import command
from lrattnres.config import option
from lrattnres.runs.files import write_atomic
from lrattnres.runs.folder import RunError
from lrattnres.runs.sweep import as_csv, statuses


@dataclass
class StatusConfig:
    runs: str = option("folder of the runs, RUNS; `runs=` may be left out", "runs")


def run(config: StatusConfig) -> None:
    """A line a run; sweep.csv is written anew."""
    runs = Path(config.runs)
    rows = statuses(runs) if runs.is_dir() else []
    if not rows:
        raise RunError(
            f"{runs}: no run of a sweep; write the folder that was runs=… of `{TRAIN} -m …`"
        )
    write_atomic(runs / "sweep.csv", as_csv(rows))
    for row in rows:
        loss = "" if row["val_loss"] is None else f"held-out loss {row['val_loss']:.4f}"
        print(f"{row['state']:<9} {row['name']}  {row['fault'] or loss}".rstrip())
    counts = Counter(row["state"] for row in rows)
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    sys.exit(0 if set(counts) == {"finished"} else 1)


def main() -> None:
    command(__doc__, StatusConfig, run, positional="runs")
