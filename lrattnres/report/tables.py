"""The tables of losses and gradient norms, ours beside the paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lrattnres.report.compare import Entry, Group, model_of
from lrattnres.report.paper import DIM, TABLE1, TABLE2, PaperNorm, PaperRow
from lrattnres.report.read import Run, finite
from lrattnres.residual.cost import cost

MISSING = "—"


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns.

    Attributes:
        name: Of its CSV file, without the ending.
        title: Its heading in the report.
        columns: Names of the columns.
        rows: A text for each column.
        notes: Sentences below it.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...] = ()


def table1(group: Group) -> Table | None:
    """The 20 rows of the paper's Table 1 with its figures and ours; None if no run is a row."""
    ours = {entry.row.row: entry for entry in group.entries if entry.row}
    if not ours:
        return None
    plain = TABLE1[0]
    rows = []
    for row in TABLE1:
        paper = (
            row.added_flops_percent,
            row.val_loss,
            f"{float(row.val_loss) - float(plain.val_loss):+.4f}",
        )
        entry = ours.get(row.row)
        measured = _measured(entry, group) if entry else (*[MISSING] * 6, "missing")
        rank = str(entry.choice.rank or MISSING) if entry else MISSING
        rows.append((row.row, row.method, *_sizes(row), *paper, rank, *measured))
    absent = [row.row for row in TABLE1 if row.row not in ours]
    notes = [
        *_notes(group),
        f"Rows without a finished run: {', '.join(absent) or 'none'}.",
        *_order_of(ours),
    ]
    notes.append(
        f"A run is a row by its r·{DIM}/d: N is that of the paper, and r is scaled with the width."
    )
    columns = (
        "row",
        "method",
        "N",
        "r",
        "paper: added FLOPs, %",
        "paper: loss",
        "paper: difference",
    )
    columns_of_ours = ("our r", *(f"our {name}" for name in OURS))
    title = "Table 1: held-out loss, ours beside the paper's"
    return Table(f"{group.name}_table1", title, (*columns, *columns_of_ours), rows, tuple(notes))


OURS = (
    "added FLOPs, %",
    "loss",
    "spread",
    "difference",
    "spread of the difference",
    "tokens",
    "seeds",
)


def other_runs(group: Group) -> Table | None:
    """Runs that are none of the 20 rows, with their added parameters; None if there are none."""
    entries = [entry for entry in group.entries if not entry.row]
    rows = [
        (
            entry.choice.label,
            _settings(entry.choice.matched),
            _added_parameters(entry.runs[0]),
            *_measured(entry, group),
        )
        for entry in entries
    ]
    title = "Runs outside the paper's Table 1"
    columns = ("run", "matched by", "added parameters", *OURS)
    return (
        Table(f"{group.name}_others", title, columns, rows, tuple(_notes(group))) if rows else None
    )


def table2(group: Group) -> Table:
    """Gradient norm before clipping, averaged over the steps of training, then over seeds."""
    rows: list[tuple[str, ...]] = []
    notes = [
        "The norm is that of the whole gradient before it is clipped. The average goes over all "
        "finite steps, or over those that were logged where the summary has no mean."
    ]
    taken: list[Entry] = []
    for norm in TABLE2:
        entry = next(
            (entry for entry in group.entries if entry.row and _same(norm, entry.row)), None
        )
        taken += [entry] if entry else []
        name = f"{norm.method}{f', r={norm.rank}' if norm.rank else ''}"
        rows.append(
            (
                name,
                norm.average_gradient_norm,
                *(_norms(entry, notes) if entry else (*[MISSING] * 4, "missing")),
            )
        )
    rest = [entry for entry in group.entries if entry not in taken]
    rows += [(entry.label, MISSING, *_norms(entry, notes)) for entry in rest]
    columns = ("run", "paper", "our run", "ours", "spread", "steps", "seeds")
    return Table(
        f"{group.name}_table2",
        "Table 2: average gradient norm over training",
        columns,
        rows,
        tuple(notes),
    )


def run_list(groups: list[Group], unfinished: list[Run]) -> list[Table]:
    """Which folder is which line of the tables; and the runs that are not finished."""
    listed: list[tuple[str, ...]] = [
        (run.name, group.name, entry.label, str(run.seed), number(run.val_loss), f"{run.tokens:,}")
        for group in groups
        for entry in group.entries
        for run in entry.runs
    ]
    tables = [
        Table(
            "runs",
            "Runs in this report",
            ("run", "group", "shown as", "seed", "held-out loss", "tokens"),
            listed,
        )
    ]
    open_: list[tuple[str, ...]] = [
        (
            run.name,
            str(run.seed),
            f"{run.last_step:,} of {run.settings['steps']:,}",
            number(_last(run, "loss")),
            number(_last(run, "val_loss")),
        )
        for run in unfinished
    ]
    columns = ("run", "seed", "last step known", "last training loss", "last held-out loss")
    notes = (
        "No held-out loss after the last step: these runs are in no other table and no figure.",
    )
    return (
        [*tables, Table("unfinished", "Unfinished runs", columns, open_, notes)]
        if open_
        else tables
    )


def added_percent(run: Run) -> float | None:
    """Multiply-adds that the residual path adds to the core of a run's model, in percent.

    None if this version does not know the path or its settings.
    """
    config = model_of(run)
    return None if config is None else cost(config).added_percent


def differences(entry: Entry, group: Group) -> list[float]:
    """Loss minus that of the baseline, in nats per token, for every seed that both have."""
    base = group.plain.losses if group.plain else {}
    return [loss - base[seed] for seed, loss in entry.losses.items() if seed in base]


def mean_and_spread(values: list[float], signed: bool = False) -> tuple[str, str]:
    """Mean and sample standard deviation as texts; the second needs two values.

    Args:
        values: Any number of them.
        signed: Whether the mean has a sign in front.
    """
    if not values:
        return MISSING, MISSING
    spread = (
        f"{statistics.stdev(values):.4f}"
        if len(values) > 1 and all(map(math.isfinite, values))
        else MISSING
    )
    return number(statistics.fmean(values), signed), spread


def number(value: float | None, signed: bool = False) -> str:
    """A number with four decimals; MISSING for None."""
    return MISSING if value is None else f"{value:{'+' if signed else ''}.4f}"


def _sizes(row: PaperRow) -> tuple[str, str]:
    """N and r of a row of the paper, as texts."""
    blocks = str(row.blocks) if row.blocks else MISSING if row is TABLE1[0] else "full"
    return blocks, str(row.rank or MISSING)


def _added_parameters(run: Run) -> str:
    config = model_of(run)
    return MISSING if config is None else f"{cost(config).added.parameters:,}"


def _measured(entry: Entry, group: Group) -> tuple[str, ...]:
    tokens = sorted({run.tokens for run in entry.runs})
    return (
        number(added_percent(entry.runs[0])),
        *mean_and_spread(list(entry.losses.values())),
        *mean_and_spread(differences(entry, group), signed=True),
        " / ".join(f"{count:,}" for count in tokens),
        ", ".join(str(run.seed) for run in entry.runs),
    )


def _notes(group: Group) -> list[str]:
    notes = [
        "Loss: mean over seeds, in nats a token. Spread: sample standard deviation over seeds. "
        "Difference: loss minus that of the baseline with the same seed, averaged over the seeds "
        "that both have."
    ]
    if group.plain is None:
        notes.append("No difference: there is no finished baseline to compare with.")
        return notes
    shared = {entry.label: len(differences(entry, group)) for entry in group.entries}
    partly = [
        f"{entry.label} ({shared[entry.label]} of {len(entry.runs)})"
        for entry in group.entries
        if shared[entry.label] < len(entry.runs)
    ]
    return [*notes, f"The baseline lacks seeds of: {', '.join(partly)}."] if partly else notes


def _order_of(ours: Mapping[str, Entry]) -> list[str]:
    """How far the order of our rows is that of the paper.

    It is Spearman's correlation of the losses, over the rows that both have.
    """
    pairs = [
        (float(row.val_loss), statistics.fmean(ours[row.row].losses.values()))
        for row in TABLE1
        if row.row in ours
    ]
    if len(pairs) < 3 or not all(math.isfinite(loss) for _, loss in pairs):
        return []
    paper, here = zip(*pairs, strict=True)
    if len(set(here)) < 2:
        return []
    from torchmetrics.functional import spearman_corrcoef  # takes seconds

    rho = float(
        spearman_corrcoef(
            torch.tensor(here, dtype=torch.float64), torch.tensor(paper, dtype=torch.float64)
        )
    )
    return [f"Rank correlation of our losses with the paper's, over {len(pairs)} rows: {rho:+.2f}."]


def _same(norm: PaperNorm, row: PaperRow) -> bool:
    return (row.residual, row.rank, row.blocks) == (norm.residual, norm.rank, None)


def _norms(entry: Entry, notes: list[str]) -> tuple[str, ...]:
    """The cells of an entry in Table 2.

    Args:
        entry: Whose runs are averaged.
        notes: Gets a sentence for what is left out or missing.
    """
    means, counts = [], []
    for run in entry.runs:
        exact = run.summary.get("mean_grad_norm")
        if isinstance(exact, float) and run.summary.get("step") == run.settings["steps"]:
            means.append(exact)
            counts.append(run.settings["steps"] - int(run.summary.get("bad_steps") or 0))
            continue
        values = [value for _, value in run.series("grad_norm")]
        usable = finite(values)
        if len(usable) < len(values):
            notes.append(
                f"{run.name}: {len(values) - len(usable)} steps with a norm that is not finite are "
                "left out."
            )
        if usable:
            means.append(statistics.fmean(usable))
            counts.append(len(usable))
        else:
            notes.append(f"{run.name}: no grad_norm was logged.")
    logged = " / ".join(f"{count:,}" for count in sorted(set(counts))) or MISSING
    return (
        entry.label,
        *mean_and_spread(means),
        logged,
        ", ".join(str(run.seed) for run in entry.runs),
    )


def _settings(pairs: tuple[tuple[str, Any], ...]) -> str:
    return ", ".join(f"{name}={value}" for name, value in pairs) or MISSING


def _last(run: Run, name: str) -> float | None:
    series = run.series(name)
    return series[-1][1] if series else None
