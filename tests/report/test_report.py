"""The report: its figures against hand calculation, what may stand in one table, and what it says of the rest."""

import csv
import json
import shutil
import statistics
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from lrattnres.commands import main
from lrattnres.config import TrainConfig, parse, plain
from lrattnres.evaluation.diagnostics import diagnose
from lrattnres.evaluation.run import Evaluation
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import build_model
from lrattnres.report.build import build_report
from lrattnres.report.compare import compare
from lrattnres.report.figures import loss_against_cost, loss_differences
from lrattnres.report.heatmaps import coefficient_maps, heatmaps
from lrattnres.report.measured import ranking, sharpness, speed
from lrattnres.report.page import Section, markdown_page
from lrattnres.report.paper import TABLE1, row_of
from lrattnres.report.read import DEFAULTS, ReportError, Run, find_runs
from lrattnres.report.run import draw_diagnostics
from lrattnres.report.tables import Table, added_percent, other_runs, run_list, table1, table2
from lrattnres.residual.base import FOLDERS, paths
from lrattnres.runs.folder import RunFolder
from lrattnres.runs.metrics import MetricsFile
from tests.paths import ROOT
from tests.report.recorded import (
    DIM,
    LAYERS,
    STEPS,
    WIDTH,
    coefficients,
    config,
    diagnostics,
    measured,
    records,
    routed,
    run_folder,
)


@pytest.fixture(autouse=True)
def _no_figures_left():
    yield
    plt.close("all")


def groups_of(*folders: Path):
    runs, errors = find_runs(list(folders))
    groups, unfinished, duplicates = compare(runs)
    return groups, unfinished, errors + duplicates


def cells(table, row: str) -> dict[str, str]:
    """The row whose first cell is `row`, by column."""
    (found,) = [line for line in table.rows if line[0] == row]
    return dict(zip(table.columns, found, strict=True))


def test_table_1_is_what_a_pocket_calculator_says(tmp_path: Path) -> None:
    for seed, loss in enumerate((2.0, 2.1, 2.2)):
        run_folder(tmp_path / f"plain{seed}", loss, seed=seed)
    for seed, loss in enumerate((1.9, 2.06)):
        run_folder(tmp_path / f"sliced{seed}", loss, seed=seed, **routed("s_lr", 4))
    run_folder(tmp_path / "projected0", 1.8, seed=0, **routed("p_lr", 1))
    run_folder(tmp_path / "projected7", 9.0, seed=7, **routed("p_lr", 1))
    (group,), unfinished, errors = groups_of(tmp_path)
    table = table1(group)
    assert table is not None and unfinished == errors == []
    base, sliced, projected, lacking = (cells(table, row) for row in ("01", "14", "06", "08"))
    assert (base["our loss"], base["our spread"], base["our seeds"]) == (
        "2.1000",
        "0.1000",
        "0, 1, 2",
    )
    assert (base["our difference"], base["our tokens"]) == ("+0.0000", "128")
    assert (sliced["our loss"], sliced["our spread"]) == ("1.9800", "0.1131")
    assert (sliced["our difference"], sliced["our spread of the difference"]) == (
        "-0.0700",
        "0.0424",
    )  # -0.10 and -0.04
    assert (sliced["r"], sliced["our r"], sliced["paper: difference"]) == ("64", "4", "-0.0371")
    assert (projected["our loss"], projected["our difference"]) == (
        "5.4000",
        "-0.2000",
    )  # seed 7 has no baseline
    assert (
        lacking["our seeds"] == "missing"
        and lacking["paper: loss"] == "2.9501"
        and lacking["our loss"] == "—"
    )
    assert any("06 p_lr full r=1 (1 of 2)" in note for note in table.notes)
    assert any("02, 03, 04, 05, 07, 08, 09" in note for note in table.notes)
    # Losses 2.1, 5.4, 1.98 where the paper has 3.0009, 2.9606, 2.9638: ranks 2 3 1 against 3 1 2
    assert any("over 3 rows: -0.50" in note for note in table.notes)


def test_the_papers_added_flops_are_its_own_and_ours_follow_from_the_size() -> None:
    printed = [
        row["added_flops_percent"]
        for row in csv.DictReader((ROOT / "tests/residual/table1.csv").open())
    ]
    assert [row.added_flops_percent for row in TABLE1] == printed
    shape = {"layers": 24, "dim": 1024, "heads": 16, "mlp_width": 2816, "context": 2048}
    for row in TABLE1:
        model = shape | {"residual": row.residual, "blocks": row.blocks, "rank": row.rank}
        run = Run("x", DEFAULTS | {f"model.{key}": value for key, value in model.items()})
        assert f"{added_percent(run):.4f}" == row.added_flops_percent
        scaled = {
            "residual": row.residual,
            "blocks": row.blocks,
            "rank": row.rank and row.rank // 8,
        }
        assert row_of(scaled, 128) is row
    core = LAYERS * (4 * DIM**2 + 3 * DIM * WIDTH)
    tiny = config({"model.residual": "s_lr", "model.rank": 4})["model"]
    run = Run("x", DEFAULTS | {f"model.{key}": value for key, value in tiny.items()})
    assert added_percent(run) == pytest.approx(100 * (DIM + 4) * (2 + 3 + 4 + 5) / core)
    assert (
        row_of({"residual": "s_lr", "blocks": None, "rank": 3}, 128) is None
    )  # 24 of 1024: no row


def test_runs_outside_the_20_rows_have_a_table_of_their_own(tmp_path: Path) -> None:
    run_folder(tmp_path / "a", 2.0)
    run_folder(tmp_path / "b", 1.5, **routed("delta"))
    run_folder(tmp_path / "c", 1.6, **routed("s_lr", 4), model__routing="add")
    run_folder(
        tmp_path / "d", 1.7, **routed("s_lr", 4), model__new_idea=[1, 2]
    )  # of a later version
    run_folder(
        tmp_path / "e", 1.8, **routed("s_lr", 4), model__routing="replace"
    )  # as published: row 14
    run_folder(
        tmp_path / "f", 1.9, **routed("s_lr", 4, 2 * LAYERS), seed=1
    )  # N = 2L is full: row 14 again
    (group,), _, errors = groups_of(tmp_path)
    table = other_runs(group)
    assert [row[0] for row in table.rows] == [
        "delta full",
        "s_lr full r=4 add",
        "s_lr full r=4 new_idea=(1, 2)",
    ]
    assert cells(table, "delta full")["difference"] == "-0.5000" and errors == []
    assert cells(table1(group), "14")["our loss"] == "1.8500"


def test_table_2_averages_what_was_logged(tmp_path: Path) -> None:
    run_folder(tmp_path / "a", 2.0, lines=records(2.0, norms=[3.0, 2.0, "nan", 1.0]))
    run_folder(tmp_path / "b", 2.0, **routed("attn_res"))
    run_folder(tmp_path / "c", 2.0, **routed("s_lr", 4, 4 - 1))
    (group,), _, _ = groups_of(tmp_path)
    table = table2(group)
    assert cells(table, "Baseline") | {"paper": "0.9775", "ours": "2.0000", "steps": "3"} == cells(
        table, "Baseline"
    )
    assert cells(table, "Full AttnRes")["ours"] == "1.0000"
    assert cells(table, "Full P-LR-AttnRes, r=16")["seeds"] == "missing"
    assert cells(table, "s_lr N=3 r=4")["paper"] == "—"
    assert any("a: 1 steps with a norm that is not finite" in note for note in table.notes)


def test_runs_that_cannot_be_compared_are_in_groups_that_say_why(tmp_path: Path) -> None:
    for name, changes in {
        "same": {},
        "sliced": routed("s_lr", 4),
        "longer": {"steps": 8},
        "wider": {"model__dim": 32},
        "shared": {"model__kv_heads": 1},
        "words": {"tokenizer__name": "gpt2"},
        "held": {"evaluation__tokens": 128},
    }.items():
        lines = [
            *records(2.0),
            *([{"step": 8, "loss": 1.0, "val_loss": 2.0}] if name == "longer" else []),
        ]
        run_folder(tmp_path / name, 2.0, lines=lines, **changes)
    run_folder(tmp_path / "texts", 2.0, corpus="other")
    run_folder(
        tmp_path / "moved", 2.0, seed=1, data__root="/mnt/copy", micro_batch=1, device="cuda"
    )  # none of these counts
    evaluated = [
        *records(None)[:1],
        records(None)[1] | {"val_loss": 1.0},
    ]  # after step 2 of 4, which is no result
    run_folder(tmp_path / "stopped", None, lines=evaluated)
    groups, unfinished, errors = groups_of(tmp_path)
    names = {frozenset(run.name for run in group.runs): " ".join(group.notes) for group in groups}
    assert names.pop(frozenset({"same", "sliced", "moved"})) == "" and errors == []
    reasons = {
        "longer": "steps is 8 here and 4 there",
        "wider": "model.dim is 32 here and 64 there",
    }
    reasons |= {"shared": "model.kv_heads is 1 here"}
    reasons |= {
        "words": "tokenizer.name is gpt2 here",
        "held": "evaluation.tokens is 128 here and 64 there",
    }
    reasons |= {"texts": "fingerprint of the corpus is other here and abc there"}
    assert len(names) == len(reasons) and all(
        reason in names[frozenset({name})] for name, reason in reasons.items()
    )
    assert [run.name for run in unfinished] == ["stopped"]
    (runs, left) = run_list(groups, unfinished)
    assert (
        cells(left, "stopped")["last step known"] == "2 of 4"
        and cells(left, "stopped")["last held-out loss"] == "1.0000"
    )
    assert len(runs.rows) == 9


def test_a_matched_run_says_by_what_and_is_compared(tmp_path: Path) -> None:
    run_folder(tmp_path / "a", 2.0)
    run_folder(
        tmp_path / "b",
        1.9,
        steps=3,
        model__mlp_width=160,
        match__by="compute",
        match__run="a",
        **routed("s_lr", 4),
    )
    (group,), _, _ = groups_of(tmp_path)
    (row,) = other_runs(group).rows
    by = dict(zip(other_runs(group).columns, row, strict=True))
    assert (
        by["matched by"] == "match.by=compute, match.run=a"
        and by["difference"] == "-0.1000"
        and by["tokens"] == "96"
    )
    assert cells(table1(group), "14")["our seeds"] == "missing"


def test_a_second_run_of_the_same_settings_and_seed_is_named_and_not_counted(
    tmp_path: Path,
) -> None:
    run_folder(tmp_path / "a", 2.0)
    run_folder(tmp_path / "b", 2.0)
    run_folder(tmp_path / "c", 3.0, device="cuda")
    (group,), _, errors = groups_of(tmp_path, tmp_path / "a")  # given twice, read once
    assert cells(table1(group), "01")["our loss"] == "2.0000"
    assert errors == [
        "b: not counted: same settings and seed as a (the same loss)",
        "c: not counted: same settings and seed as a (loss 3.0 against 2.0)",
    ]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    run_folder(tmp_path / "good", 2.0, **routed("s_lr", 4))
    torn = run_folder(tmp_path / "torn") / "config.yaml"
    torn.write_text("seed: 0\nmodel:\n  residual: s_lr\n")
    (run_folder(tmp_path / "wild") / "config.yaml").write_text("a: [")
    (run_folder(tmp_path / "gone") / "config.yaml").unlink()
    (run_folder(tmp_path / "line", 1.5, seed=1) / "metrics.jsonl").write_text(
        '{"step": 1}\n{"step"\n{"step": 2}\n'
    )
    (run_folder(tmp_path / "bare", 1.5, seed=2) / "metrics.jsonl").unlink()
    depth = run_folder(tmp_path / "depth", 1.5, seed=3)
    measured(depth, diagnostics(0.5) | {"largest_weight": [1.0]})
    square = run_folder(tmp_path / "square", 1.5, seed=4)
    measured(square, coefficients(1.0) | {"coefficients": [[1.0] * 5] * 5})
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "status.json").write_text(
        json.dumps({"state": "refused", "fault": "model.rank=9: too large"})
    )
    (tmp_path / "empty").mkdir()
    (group,), _, errors = groups_of(tmp_path, tmp_path / "nowhere", tmp_path / "empty")
    text = "\n".join(errors)
    for part in (
        "torn: left out: config.yaml lacks steps, global_batch",
        "wild: left out: config.yaml cannot be read",
        "gone: left out: it has no config.yaml",
        "refused: left out: it has no config.yaml or config.json; it was refused: model.rank=9: too large",
        "line: metrics.jsonl cannot be read: metrics.jsonl, line 2: not JSON",
        "bare: no metrics.jsonl",
        "depth: its diagnostics (held-out tokens at step 4) are not those of 5 read sites",
        "square: its diagnostics (held-out tokens at step 4) are not those of 5 read sites",
        f"{tmp_path / 'nowhere'}: no such folder",
        f"{tmp_path / 'empty'}: no run in it",
    ):
        assert part in text, text
    assert cells(table1(group), "01")["our seeds"] == "1, 2, 3, 4"  # their summaries are whole


def test_figure_1_and_differences_show_the_figures_of_the_tables(tmp_path: Path) -> None:
    run_folder(tmp_path / "a", 2.0)
    run_folder(
        tmp_path / "b", 1.9, lines=records(1.9, losses=[4.5, 3.0, 2.25, 2.0]), **routed("s_lr", 4)
    )
    (group,), _, _ = groups_of(tmp_path)
    picture = loss_against_cost(group)
    assert [row[:2] for row in picture.rows[-2:]] == [("ours", "01"), ("ours", "14")] and len(
        picture.rows
    ) == 22
    assert (
        picture.rows[-1][5] == added_percent(group.entries[1].runs[0])
        and picture.rows[-1][6] == 1.9
    )
    gaps = [row[1:] for row in loss_differences(group).rows if row[0] == "14 s_lr full r=4"]
    assert gaps == [(32.0, 0.5), (64.0, 0.0), (96.0, -0.25), (128.0, -0.25)]


def test_heat_maps_share_one_scale_cut_at_the_99_5th_percentile(tmp_path: Path) -> None:
    peaks = {"a": 0.9, "b": 0.6}
    for name, peak in peaks.items():
        folder = run_folder(tmp_path / name, 2.0, **routed("s_lr", 1 if name == "a" else 4))
        measured(folder, diagnostics(peak))
    run_folder(tmp_path / "c", 2.0, **routed("attn_res"))
    (group,), _, _ = groups_of(tmp_path)
    (picture,) = heatmaps(group)
    images = [image for panel in picture.figure.axes for image in panel.get_images()]
    values = [
        value
        for peak in peaks.values()
        for means in diagnostics(peak)["mean_weight"][1:]
        for value in means
    ]
    assert (
        len(values) == 28
        and [image.get_clim() for image in images] == [(0.0, np.percentile(values, 99.5))] * 2
    )
    assert [row[-1] for row in picture.rows] == values and "02 attn_res full" in picture.caption
    table = sharpness(group)
    assert [row[:2] for row in table.rows[:2]] == [
        ("Delta Block (Delta paper)", "0.62"),
        ("AttnRes (Delta paper)", "0.35"),
    ]
    assert cells(table, "12 s_lr full r=1")["mean over sites"] == "0.8650"  # 0.9 - 0.035


def test_coefficients_have_a_scale_around_zero_and_runs_without_them_are_named(
    tmp_path: Path,
) -> None:
    measured(run_folder(tmp_path / "plain", 2.0), coefficients(1.0))
    dense = run_folder(tmp_path / "dense", 1.9, **routed("denseformer"))
    measured(dense, coefficients(-2.0))
    measured(run_folder(tmp_path / "old", 1.9, **routed("s_lr", 4)), diagnostics(0.9))
    run_folder(tmp_path / "unmeasured", 1.9, **routed("attn_res"))
    (group,), _, _ = groups_of(tmp_path)
    picture = coefficient_maps(group)
    images = [image for panel in picture.figure.axes for image in panel.get_images()]
    sizes = [abs(value) for end in (1.0, -2.0) for row in coefficients(end)["coefficients"]
             for value in row]  # fmt: skip
    ceiling = np.percentile(sizes, 99.5)
    assert [image.get_clim() for image in images] == [(-ceiling, ceiling)] * 2
    assert picture.rows[:2] == [("01 baseline, seed 0", 1, "embedding", 1.0),
                                ("01 baseline, seed 0", 2, "embedding", 1.0)]  # fmt: skip
    assert picture.rows[-1] == ("denseformer, seed 0", 5, "4", -2.0)
    assert "the largest is 1.000, the smallest -2.000" in picture.caption
    assert "of an earlier version: 14 s_lr full r=4." in picture.caption
    assert "Nothing to show for: 02 attn_res full." in picture.caption
    (alpha,) = heatmaps(group)
    assert {row[0] for row in alpha.rows} == {"14 s_lr full r=4, seed 0"}
    assert "Nothing to show for: 02 attn_res full." in alpha.caption
    assert {row[0] for row in sharpness(group).rows[2:]} == {"14 s_lr full r=4"}


NO_SUM = """
from lrattnres.residual.stream import Baseline

class Twisted(Baseline):
    residual, plain, linear = "twisted", False, False
"""


def test_any_path_has_its_rows_and_its_own_settings_tell_rows_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "twisted.py").write_text(NO_SUM)
    monkeypatch.setenv(FOLDERS, str(tmp_path / "own"))
    paths.cache_clear()
    try:
        runs, usual = tmp_path / "runs", {"model__path": {"dilation": 1, "period": 1}}
        run_folder(runs / "a", 2.0)
        run_folder(runs / "b", 1.5, **routed("denseformer"), **usual)
        run_folder(runs / "c", 1.7, seed=1, **routed("denseformer"))  # what it leaves out is usual
        run_folder(runs / "d", 1.6, **routed("denseformer"), model__path={"dilation": 2})
        later = {"model__path": {"streams": 4}, "model__gate": True}
        measured(run_folder(runs / "e", 1.8, **routed("hydra"), **later), coefficients(0.5))
        measured(run_folder(runs / "f", 1.9, **routed("twisted")), coefficients(0.5))
        (group,), unfinished, errors = groups_of(runs)
        assert unfinished == errors == []
        table = other_runs(group)
        of = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
        assert list(of) == ["denseformer", "denseformer path.dilation=2", "twisted",
                            "hydra gate=True path.streams=4"]  # fmt: skip
        core = LAYERS * (4 * DIM**2 + 3 * DIM * WIDTH)
        for label, weights in (("denseformer", 2 + 3), ("denseformer path.dilation=2", 1 + 2)):
            assert of[label]["added parameters"] == str(weights)
            assert of[label]["added FLOPs, %"] == f"{100 * weights * DIM / core:.4f}"
        assert of["denseformer"]["loss"] == "1.6000" and of["denseformer"]["seeds"] == "0, 1"
        assert of["hydra gate=True path.streams=4"]["added parameters"] == "—"
        sorted_runs = [
            dict(zip(ranking(group).columns, row, strict=True)) for row in ranking(group).rows
        ]
        losses = ["1.6000", "1.6000", "1.8000", "1.9000", "2.0000"]
        assert [row["loss"] for row in sorted_runs] == losses
        assert [row["place by loss"] for row in sorted_runs] == ["1", "1", "3", "4", "5"]
        places = {row["run"]: row["by compute"] for row in sorted_runs}
        assert places["01 baseline"] == "1" and places["denseformer path.dilation=2"] == "3"
        assert places["denseformer"] == "4" and places["hydra gate=True path.streams=4"] == "—"
        picture = coefficient_maps(group)
        assert {row[0] for row in picture.rows} == {"hydra gate=True path.streams=4, seed 0"}
        assert "no sum of the outputs with one number each: twisted." in picture.caption
        build_report([runs], tmp_path / "out")
        page = (tmp_path / "out" / "report.md").read_text()
        assert page.count("hydra gate=True path.streams=4") >= 4
        listed = list(csv.DictReader((tmp_path / "out" / "tables" / "A_speed.csv").open()))
        known = {row["run"]: row["memory a rank, GB"] != "" for row in listed}
        assert known.pop("hydra gate=True path.streams=4") is False and all(known.values())
        assert (tmp_path / "out" / "figures" / "A_coefficients.csv").exists()
    finally:
        paths.cache_clear()


class Counted(NamedTuple):
    total: float


def test_the_grid_that_docs_results_shows_has_the_same_tables(tmp_path: Path, monkeypatch) -> None:
    """Its 20 rows at the size of the proxy, beside what is committed: all but what was measured."""
    # The memory of a run is not compared, and takes seconds to count.
    monkeypatch.setattr("lrattnres.report.measured.estimate_memory", lambda *_: Counted(2.0**30))
    folder = ROOT / "docs" / "results" / "tables"
    size = {"layers": 12, "dim": 128, "heads": 4, "mlp_width": 352, "context": 256}
    shape = {f"model__{name}": value for name, value in size.items()}
    for number, row in enumerate(TABLE1):
        rank = row.rank and row.rank * 128 // 1024
        run_folder(
            tmp_path / row.row, 2 - number / 100, **routed(row.residual, rank, row.blocks), **shape
        )
    (group,), _, errors = groups_of(tmp_path)
    assert errors == []
    paper_and_cost = table1(group)
    committed = list(csv.reader((folder / "A_table1.csv").open()))
    assert list(paper_and_cost.columns) == committed[0]
    ours = [["" if cell == "—" else cell for cell in row[:9]] for row in paper_and_cost.rows]
    assert ours == [row[:9] for row in committed[1:]]
    for name, table in (("speed", speed(group)), ("table2", table2(group))):
        rows = list(csv.reader((folder / f"A_{name}.csv").open()))
        assert list(table.columns) == rows[0]
        assert [row[0] for row in table.rows] == [row[0] for row in rows[1:]]
    shown = {row[2] for row in list(csv.reader((folder / "runs.csv").open()))[1:]}
    assert shown == {entry.label for entry in group.entries}
    # The page is made of these files: a table's lines are its cells, a gap is a dash.
    page = (folder.parent / "report.md").read_text().splitlines()
    for file in sorted(folder.glob("*.csv")):
        columns, *cells = list(csv.reader(file.open()))
        table = Table(
            file.stem, "", tuple(columns), [tuple(c or "—" for c in row) for row in cells]
        )
        lines = markdown_page("", [Section("", "", [table])]).splitlines()
        for line in (line for line in lines if line.startswith("| ")):
            assert line in page, line


class Links(HTMLParser):
    """Every tag, and every address that a browser would follow or load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]


def test_the_page_stands_alone_and_is_the_same_wherever_the_runs_lie(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "far" / "away"
    run_folder(here / "a<b>", 2.0)
    run_folder(here / "c|d", 1.9, **routed("s_lr", 4))
    run_folder(here / "torn").joinpath("config.yaml").write_text("")
    shutil.copytree(here, there)
    errors = build_report([here], tmp_path / "one")
    assert (
        build_report([there / "torn", there / "c|d", there / "a<b>"], tmp_path / "two")
        == errors
        != []
    )
    files = sorted(
        path.relative_to(tmp_path / "one")
        for path in (tmp_path / "one").rglob("*")
        if path.is_file()
    )
    assert {
        "report.html",
        "report.md",
        "tables/A_table1.csv",
        "figures/A_loss.png",
        "figures/A_loss.csv",
    } <= set(map(str, files))
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), (
            file
        )
    html = (tmp_path / "one" / "report.html").read_text()
    page = Links()
    page.feed(html)
    assert "script" not in page.tags and "link" not in page.tags and page.tags.count("img") == 3
    assert all(
        address.startswith(("#", "data:image/svg+xml;base64,")) for address in page.addresses
    )
    assert (
        "a&lt;b&gt;" in html
        and str(tmp_path) not in html
        and all(error in html for error in errors)
    )
    markdown = (tmp_path / "one" / "report.md").read_text()
    assert all(row.added_flops_percent in markdown for row in TABLE1) and "c\\|d" in markdown
    rows = list(csv.DictReader((tmp_path / "one" / "tables" / "A_table1.csv").open()))
    assert [row["paper: added FLOPs, %"] for row in rows] == [
        row.added_flops_percent for row in TABLE1
    ]


def test_a_folder_with_other_things_is_left_alone_and_an_old_report_replaced(
    tmp_path: Path,
) -> None:
    run_folder(tmp_path / "runs" / "a", None)
    with pytest.raises(ReportError, match="is no report"):
        build_report([tmp_path / "runs"], tmp_path / "runs")
    build_report([tmp_path / "runs"], tmp_path / "out")
    (tmp_path / "out" / "figures" / "Z_old.png").write_bytes(b"")
    build_report([tmp_path / "runs"], tmp_path / "out")
    assert not (tmp_path / "out" / "figures" / "Z_old.png").exists()


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["report.py", *words])
        try:
            main("report")
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    assert command() == 2 and "usage" in capsys.readouterr().err
    assert command(str(tmp_path / "seed=1")) == 2 and "no such folder" in capsys.readouterr().err
    run_folder(tmp_path / "runs" / "seed=1", None)
    (run_folder(tmp_path / "runs" / "bad") / "config.yaml").write_text("")
    assert command(str(tmp_path / "runs"), f"out={tmp_path / 'out'}") == 0
    assert "note: bad: left out" in capsys.readouterr().err
    assert "Unfinished runs" in (tmp_path / "out" / "report.md").read_text()


def test_what_training_writes_is_read_as_it_is(tmp_path: Path) -> None:
    tree = config({"runs": str(tmp_path), "name": "own", "model.residual": "p_lr", "model.rank": 1})
    settings = parse(TrainConfig, tree)
    folder = RunFolder.open(settings, extra_identity={"corpus": "abc"})
    metrics = MetricsFile(folder.metrics_path)
    for record in records(2.5, norms=[float("inf"), 1.0, 1.0, 1.0]):
        metrics.write(record)
    folder.finish({"step": STEPS, "val_loss": 2.5})
    folder.close()
    ((run,), errors) = find_runs([tmp_path])
    assert (
        errors == []
        and run.val_loss == 2.5
        and run.tokens == 128
        and run.identity == {"corpus": "abc"}
    )
    assert dict(run.settings) == {
        **run.settings,
        "model.residual": "p_lr",
        "z_loss": plain(settings)["z_loss"],
    }
    assert statistics.fmean(value for _, value in run.series("grad_norm")) == float("inf")


@pytest.mark.parametrize("residual", ["p_lr", "baseline", "denseformer", "frac"])
def test_what_evaluation_writes_is_read_and_drawn_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_model_config, residual: str
) -> None:
    model = build_model(
        tiny_model_config(residual=residual, blocks=2, layers=LAYERS),
        seed=0,
        device=torch.device("cpu"),
        attention=BACKENDS["sdpa"],
        dtype=torch.float32,
    )
    found = diagnose(model, [torch.randint(1, 31, (2, 13))], 0, documents=False)
    folder = RunFolder(run_folder(tmp_path / "a", 2.0, **routed(residual, 1, 2)))
    evaluation = Evaluation(folder, STEPS, True, {}, found)
    evaluation.write()
    ((run,), errors) = find_runs([tmp_path])
    assert errors == [] and run.diagnostics == found | {"of": "held-out tokens at step 4"}
    (group,) = compare([run])[0]
    # Zero queries: a read is the mean of its sources, of which site 5 has three: embedding and
    # two blocks. So it takes a third of every output.
    attends, third = residual == "p_lr", pytest.approx(1 / 3)
    assert {row[1:3]: row[3] for picture in heatmaps(group) for row in picture.rows}.get(
        (5, "3-4")
    ) == (third if attends else None)
    drawn, linear = coefficient_maps(group), residual != "frac"
    if linear:
        taken = {row[1:3]: row[3] for row in drawn.rows}
        assert taken[5, "embedding"] == taken[5, "4"] == (third if attends else 1)
    else:
        assert drawn.endswith("no sum of the outputs with one number each: frac.")
    draw_diagnostics(evaluation)
    assert ("no coefficients: what a site reads" in capsys.readouterr().out) != linear
    pictures = {file.name for file in folder.plots_path.iterdir()}
    expected = {"coefficients.png": linear, "depth.png": attends, "sites.png": True}
    assert pictures == {name for name, there in expected.items() if there}
