"""What was measured step by step, as records.

Read from metrics.jsonl of a run folder, or from the history of a W&B run as JSON or CSV.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lrattnres.runs.files import FOREIGN, NOT_FINITE, from_json
from lrattnres.runs.metrics import MetricsError, MetricsFile


class HistoryError(Exception):
    """Measurements that cannot be read; `str` names the file, and the line if there is one."""


def read_history(path: Path) -> list[dict[str, Any]]:
    """The records of a run, by step. Where a step was repeated, its last values count.

    Args:
        path: Folder of the run.

    Raises:
        HistoryError: There is no such file, or it cannot be read.
    """
    file = next((path / name for name in HISTORIES if (path / name).is_file()), None)
    if file is None:
        raise HistoryError(f"no {', '.join(HISTORIES)}")
    try:
        records = HISTORIES[file.name](file)
    except (MetricsError, OSError, ValueError, csv.Error) as error:
        raise HistoryError(
            f"{file.name} cannot be read: {str(error).replace(str(file), file.name)}"
        ) from error
    by_step: dict[int, dict[str, Any]] = {}
    for number, record in enumerate(records, start=1):
        step = record.get("step")
        if isinstance(step, bool) or not isinstance(step, int | float) or step != step // 1:
            raise HistoryError(
                f"{file.name} cannot be read: record {number} has no whole number `step`, "
                f"but {step!r}"
            )
        by_step[int(step)] = by_step.get(int(step), {}) | record | {"step": int(step)}
    return [by_step[step] for step in sorted(by_step)]


def read_gaps(path: Path, last: int) -> list[str]:
    """A sentence for each place in metrics.jsonl where lines are missing or changed.

    Nothing for a file that cannot be read.

    Args:
        path: Folder of the run.
        last: The step up to which there must be records.
    """
    file = path / "metrics.jsonl"
    if not file.is_file():
        return []
    try:
        gaps = MetricsFile.gaps(file, last)
    except (MetricsError, OSError):
        return []
    return [gap.replace(str(file), file.name) for gap in gaps]


def read_json(text: str) -> Any:
    """Parses JSON.

    Numbers that are not finite may be spelled as by Python, by W&B and by this package.

    Raises:
        ValueError: The text is not JSON.
    """
    return from_json(text, foreign=True)


def _json_lines(file: Path) -> list[dict[str, Any]]:
    """From `json.dumps(record)` for every record of `run.scan_history()`, a line each."""
    return [
        _record(read_json(line))
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]


def _json(file: Path) -> list[dict[str, Any]]:
    """From `json.dumps(list(run.scan_history()))` or `DataFrame.to_json(orient="records")`."""
    value = read_json(file.read_text(encoding="utf-8"))
    if not isinstance(value, list):
        raise ValueError('not a list of records; with pandas, write to_json(orient="records")')
    return [_record(record) for record in value]


def _record(value: Any) -> dict[str, Any]:
    """A record without its nulls, with which W&B fills the gaps of its columns."""
    if not isinstance(value, dict):
        raise ValueError(f"not an object: {str(value)[:80]}")
    return {key: item for key, item in value.items() if item is not None}


def _csv(file: Path) -> list[dict[str, Any]]:
    """From `run.history().to_csv()`, or from the CSV export of a chart.

    The columns of a chart are called `NAME - loss`, `…__MIN` and `…__MAX`.
    """
    with file.open(encoding="utf-8", newline="") as lines:
        head, *rows = list(csv.reader(lines)) or [[]]
    columns: dict[str, int] = {}
    for number, title in enumerate(head):
        name = "step" if title in ("Step", "step") else title.rpartition(" - ")[2]
        if not name or name.endswith(("__MIN", "__MAX")):
            continue
        if name in columns and not (name == "step" and "step" in head):
            raise ValueError(
                f"two columns are of {name}: `{head[columns[name]]}` and `{title}`; "
                "export one run a file"
            )
        columns[name] = head.index("step") if name == "step" and "step" in head else number
    return [
        {name: _cell(row[number]) for name, number in columns.items() if row[number] != ""}
        for row in rows
        if row
    ]


def _cell(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return (NOT_FINITE | FOREIGN).get(text, text)


HISTORIES: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "metrics.jsonl": MetricsFile.read,
    "history.jsonl": _json_lines,
    "history.json": _json,
    "history.csv": _csv,
}
