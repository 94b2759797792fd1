"""Shows what became of a sweep: `python scripts/sweep_status.py [RUNS]`; exits with 1 unless every run is finished."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from lrattnres.runs.files import write_atomic
from lrattnres.runs.sweep import as_csv, statuses


def main() -> None:
    runs = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    rows = statuses(runs) if runs.is_dir() else []
    if not rows:
        sys.exit(
            f"{runs}: no run of a sweep; write the folder that was runs=… of `python train.py -m …`"
        )
    write_atomic(runs / "sweep.csv", as_csv(rows))
    for row in rows:
        what = row["fault"] or (
            "" if row["val_loss"] is None else f"held-out loss {row['val_loss']:.4f}"
        )
        print(f"{row['state']:<9} {row['name']}  {what}".rstrip())
    counts = Counter(row["state"] for row in rows)
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    sys.exit(0 if set(counts) == {"finished"} else 1)


if __name__ == "__main__":
    main()
