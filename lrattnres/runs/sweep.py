"""The state of the runs of a sweep: a status and a traceback in each folder, and a table of all.

runs/NAME/status.json      state, step, held-out loss, and first line of the error (`fault`)
runs/NAME/failure.txt      the whole traceback, while the state is `failed` or `refused`
runs/sweep.csv             a line for each run that has a status; it can be made again from them
"""

from __future__ import annotations

import csv
import io
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lrattnres.runs.files import from_json, to_json, write_atomic
from lrattnres.runs.folder import RunFolder

COLUMNS = ("name", "state", "step", "val_loss", "time", "fault")
STATES = ("running", "finished", "stopped", "failed", "refused")


def write_status(folder: Path, state: str, error: BaseException | None = None) -> None:
    """Writes the state of a run to its folder, and the table beside the folder.

    It is called when a run of a sweep starts, and again when it ends, however it ends.

    Args:
        folder: Of the run; it is made if it is not there.
        state: One of STATES.
        error: Why it is `failed` or `refused`; else None.

    Raises:
        RunError: A file cannot be written.
    """
    assert state in STATES, state
    with RunFolder(folder).usable():
        folder.mkdir(parents=True, exist_ok=True)
        summary = folder / "summary.json"
        done = from_json(summary.read_bytes()) if state == "finished" and summary.exists() else {}
        status = {
            "name": folder.name,
            "state": state,
            "step": done.get("step"),
            "val_loss": done.get("val_loss"),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "fault": None if error is None else str(error).strip().partition("\n")[0],
        }
        if error is None:
            (folder / "failure.txt").unlink(missing_ok=True)
        else:
            write_atomic(folder / "failure.txt", "".join(traceback.format_exception(error)))
        write_atomic(folder / "status.json", to_json(status, indent=2) + "\n")
        write_atomic(folder.parent / "sweep.csv", as_csv(statuses(folder.parent)))


def statuses(runs: Path) -> list[dict[str, Any]]:
    """The status of every run in a folder that a sweep has started.

    `name` is the name that the run's folder has now.

    Args:
        runs: The folder that holds the run folders.
    """
    return [
        from_json(path.read_bytes()) | {"name": path.parent.name}
        for path in sorted(runs.glob("*/status.json"))
    ]


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Statuses as CSV with the columns of COLUMNS; what is not known is empty."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()
