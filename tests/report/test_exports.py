"""Exports of Weights & Biases in the forms that its API and its web page write."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from lrattnres.report.compare import compare
from lrattnres.report.history import HistoryError, read_history
from lrattnres.report.read import find_runs, read_run
from lrattnres.report.tables import table1
from tests.report.recorded import STEPS, config, records, routed, run_folder


def logged(val_loss: float) -> list[dict[str, Any]]:
    """The rows of `run.scan_history()`: every column in every row, and W&B's own beside them."""
    rows = records(val_loss)
    names = [*sorted({name for row in rows for name in row}), "block_grad_norm"]
    own = [
        {"_step": number, "_runtime": 1.5 * number, "_timestamp": 1.7e9 + number}
        for number in range(len(rows))
    ]
    return [
        {name: row.get(name) for name in names} | {"block_grad_norm": [0.5, 1.0]} | mine
        for row, mine in zip(rows, own, strict=True)
    ]


def export(
    folder: Path,
    tree: dict[str, Any],
    history: str,
    text: str,
    wrapped: bool = False,
    yaml: bool = False,
) -> Path:
    folder.mkdir(parents=True)
    own = {"_wandb": {"value": {"cli_version": "0.31.0"}, "desc": None}} if wrapped else {}
    tree = own | (
        {key: {"value": value, "desc": None} for key, value in tree.items()} if wrapped else tree
    )
    if yaml:
        (folder / "config.yaml").write_text(
            "wandb_version: 1\n\n" + "".join(f"{key}: {json.dumps(tree[key])}\n" for key in tree)
        )
    else:
        (folder / "config.json").write_text(json.dumps(tree))
    (folder / history).write_text(text)
    return folder


def as_csv(rows: list[dict[str, Any]]) -> str:
    """As pandas does: an index without a name, empty cells for gaps, whole columns as floats."""
    names = list(rows[0])
    lines = [["", *names]]
    for number, row in enumerate(rows):
        cells = [float(row[name]) if name == "step" else row[name] for name in names]
        lines.append([number, *("" if cell is None else cell for cell in cells)])
    out = io.StringIO()
    csv.writer(out).writerows(lines)
    return out.getvalue()


FORMS = {
    "history.json": (lambda rows: json.dumps(rows), {}),
    "history.jsonl": (lambda rows: "\n".join(map(json.dumps, rows)), {"wrapped": True}),
    "history.csv": (as_csv, {"wrapped": True, "yaml": True}),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_export_gives_the_same_table_as_the_run_folder(tmp_path: Path, name: str) -> None:
    write, how = FORMS[name]
    chosen = {key.replace("__", "."): value for key, value in routed("s_lr", 4).items()}
    export(tmp_path / "exports" / "sliced", config(chosen), name, write(logged(1.75)), **how)
    run_folder(tmp_path / "runs" / "plain", 2.0)
    runs, errors = find_runs([tmp_path])
    (group,), unfinished, duplicates = compare(runs)
    assert errors == unfinished == duplicates == []
    (row,) = [row for row in table1(group).rows if row[0] == "14"]
    assert row[9:12] == ("1.7500", "—", "-0.2500")
    assert group.notes == [
        "sliced has no fingerprints of corpus and tokenizer: only their names are known to agree."
    ]
    run = read_run(tmp_path / "exports" / "sliced")
    assert (
        run.series("loss") == read_run(tmp_path / "runs" / "plain").series("loss")
        and run.records[0]["step"] == 1
    )
    assert run.records[0]["block_grad_norm"] == [0.5, 1.0] and "val_loss" not in run.records[0]


def test_an_export_of_texts_elsewhere_is_not_taken_for_the_same(tmp_path: Path) -> None:
    export(
        tmp_path / "sliced",
        config({"data.root": "/other"}),
        "history.json",
        json.dumps(logged(1.75)),
    )
    run_folder(tmp_path / "plain", 2.0)
    assert len(compare(find_runs([tmp_path])[0])[0]) == 2


def test_a_chart_of_the_web_page_has_one_metric_and_the_name_of_the_run(tmp_path: Path) -> None:
    text = '"step","my - run - loss","my - run - loss__MIN","my - run - loss__MAX"\n'
    text += '"1","4.5","4.5","4.5"\n"2","NaN","3","3"\n'
    (tmp_path / "history.csv").write_text(text)
    (first, second) = read_history(tmp_path)
    assert first == {"step": 1, "loss": 4.5} and second["step"] == 2 and math.isnan(second["loss"])
    (tmp_path / "history.csv").write_text('"Step","a - loss","b - loss"\n"1","4","3"\n')
    with pytest.raises(
        HistoryError,
        match="two columns are of loss: `a - loss` and `b - loss`; export one run a file",
    ):
        read_history(tmp_path)


def test_of_a_step_that_was_repeated_the_last_values_count(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": 3.0},
        {"step": 2, "loss": 2.0, "mfu": "Infinity"},
    ]
    (tmp_path / "history.json").write_text(json.dumps(rows))
    assert read_history(tmp_path) == [
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": 2.0, "mfu": math.inf},
    ]
    (tmp_path / "history.json").write_text('[{"_step": 1, "loss": 1}]')
    with pytest.raises(HistoryError, match="record 1 has no whole number `step`"):
        read_history(tmp_path)


def test_the_folder_of_a_synced_run_has_a_summary_and_says_that_its_history_is_missing(
    tmp_path: Path,
) -> None:
    files = export(
        tmp_path / "run-20260101_000000-ab12" / "files",
        config({}),
        "wandb-summary.json",
        "",
        wrapped=True,
        yaml=True,
    )
    summary = {"_step": 3, "_wandb": {"runtime": 5}, "step": STEPS, "val_loss": 2.5, "loss": 2.0}
    (files / "wandb-summary.json").write_text(json.dumps(summary))
    (files.parent / "run-ab12.wandb").write_bytes(b"")
    (tmp_path / "offline-run-20260101_000000-cd34").mkdir()
    (tmp_path / "offline-run-20260101_000000-cd34" / "run-cd34.wandb").write_bytes(b"")
    (run,), errors = find_runs([tmp_path])
    assert run.name == "run-20260101_000000-ab12" and run.val_loss == 2.5
    assert "cd34: left out: it has no config.yaml or config.json; `wandb sync` it" in errors[0]
    assert "ab12: no metrics.jsonl, history.jsonl, history.json, history.csv; no curve" in errors[1]
