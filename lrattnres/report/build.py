"""Builds a report: reads run folders, compares the runs, draws pictures and writes the pages."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from lrattnres.report.compare import Group, compare
from lrattnres.report.figures import (
    Picture,
    effective_sources,
    largest_weights,
    loss_against_cost,
    loss_curves,
    loss_differences,
)
from lrattnres.report.heatmaps import coefficient_maps, heatmaps
from lrattnres.report.measured import ranking, sharpness, speed
from lrattnres.report.page import Part, Section, html_page, markdown_page
from lrattnres.report.read import ReportError, Run, find_runs
from lrattnres.report.tables import MISSING, Table, other_runs, run_list, table1, table2

TITLE = "Attention over depth: runs compared"
PAGE = "report.html"


def build_report(folders: list[Path], out: Path) -> list[str]:
    """Writes a report on runs.

    The same runs and the same version of matplotlib give the same bytes. The order of `folders`
    does not count, and no time is written.

    Args:
        folders: Run folders, or folders with run folders below them.
        out: The folder to write: report.html, report.md, tables/NAME.csv and
            figures/NAME.{png,svg,csv}. An earlier report there is replaced.

    Returns:
        What was wrong, one sentence each, sorted.

    Raises:
        ReportError: No run can be read, or `out` holds something else than a report.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / PAGE).is_file())):
        raise ReportError(f"out={out}: is there, and is no report; write out=ANOTHER_FOLDER")
    runs, errors = find_runs(folders)
    if not runs:
        raise ReportError("\n".join(["no run that can be read", *errors]))
    groups, unfinished, duplicates = compare(runs)
    errors = sorted({*errors, *duplicates})
    sections = [_overview(groups, unfinished, errors), *(_section(group) for group in groups)]
    sections.append(Section("runs", "Runs", [*run_list(groups, unfinished)]))
    _write(sections, out)
    return errors


def _overview(groups: list[Group], unfinished: list[Run], errors: list[str]) -> Section:
    finished = sum(len(group.runs) for group in groups)
    parts: list[Part] = [
        f"Finished runs: {finished}, in groups: {len(groups)}. Unfinished: {len(unfinished)}. Runs "
        "stand in one group, and so in one table, only if they agree in every setting that results "
        "depend on but seed and residual path, and in the fingerprints of corpus and tokenizer."
    ]
    parts.append(
        [f"Group {group.name}: {_description(group)}" for group in groups]
        or ["no finished run, so no group"]
    )
    parts.append(
        "Missing, left out or not counted:"
        if errors
        else "Nothing was missing, unreadable or counted twice."
    )
    return Section("overview", "Overview", [*parts, errors] if errors else parts)


def _section(group: Group) -> Section:
    tables: Sequence[Table | None] = (ranking(group), table1(group), other_runs(group))
    pictures: Sequence[Picture | None] = (
        loss_against_cost(group),
        loss_curves(group),
        loss_differences(group),
    )
    sites: Sequence[Part | None] = (
        effective_sources(group),
        *heatmaps(group),
        coefficient_maps(group),
        largest_weights(group),
    )
    parts: list[Part] = [_description(group) + ".", *([group.notes] if group.notes else [])]
    parts += [
        part
        for part in (*tables, *pictures, table2(group), *sites, sharpness(group), speed(group))
        if part is not None
    ]
    if not any(sites):
        parts.append(
            "No run of this group has depth diagnostics, so there are no figures of read sites."
        )
    return Section(f"group-{group.name}", f"Group {group.name}", parts)


def _description(group: Group) -> str:
    """What all runs of a group have in common, in one sentence."""
    run = group.runs[0]
    value = run.settings
    return (
        f"{value['model.layers']} blocks of width {value['model.dim']}; "
        f"corpus {value['data.corpus']}, tokenizer {value['tokenizer.name']}; "
        f"{value['steps']:,} steps of {value['global_batch']} x {value['model.context']} tokens, "
        f"{run.tokens:,} in all; {value['precision']}; "
        f"{value['evaluation.tokens']:,} held-out tokens; {len(group.runs)} runs"
    )


def _write(sections: list[Section], out: Path) -> None:
    """Writes all files; the tables and figures of an earlier report are removed first."""
    for kind in ("tables", "figures"):
        (out / kind).mkdir(parents=True, exist_ok=True)
        for old in (out / kind).iterdir():
            old.unlink()
    drawings = {}
    for part in (part for section in sections for part in section.parts):
        if isinstance(part, Table):
            rows = [["" if cell == MISSING else cell for cell in row] for row in part.rows]
            (out / "tables" / f"{part.name}.csv").write_text(
                _csv(part.columns, rows), encoding="utf-8"
            )
        elif isinstance(part, Picture):
            (out / "figures" / f"{part.name}.csv").write_text(
                _csv(part.columns, part.rows), encoding="utf-8"
            )
            drawings[part.name] = _save(part, out / "figures")
    (out / "report.md").write_text(markdown_page(TITLE, sections), encoding="utf-8")
    (out / PAGE).write_text(html_page(TITLE, sections, drawings), encoding="utf-8")


def _save(picture: Picture, folder: Path) -> bytes:
    """Writes NAME.png and NAME.svg, and returns the bytes of the second.

    Without these options an SVG would have random names and a date in it.
    """
    picture.figure.savefig(folder / f"{picture.name}.png", dpi=130)
    drawing = io.BytesIO()
    with plt.rc_context({"svg.hashsalt": picture.name}):
        picture.figure.savefig(drawing, format="svg", metadata={"Date": None})
    plt.close(picture.figure)
    (folder / f"{picture.name}.svg").write_bytes(drawing.getvalue())
    return drawing.getvalue()


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
