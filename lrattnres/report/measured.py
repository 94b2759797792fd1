"""Tables of what was measured beside the loss: sharpness of routing, throughput, memory."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from functools import cache
from typing import Any

from lrattnres.config import ConfigError, TrainConfig, leaf_of, parse
from lrattnres.report.compare import Entry, Group, model_of
from lrattnres.report.paper import SHARPNESS
from lrattnres.report.read import DEFAULTS, SCHEMA, Run, finite
from lrattnres.report.tables import (
    MISSING,
    Table,
    added_percent,
    differences,
    mean_and_spread,
    number,
)
from lrattnres.training.memory import GB, estimate_memory


def held_out(entry: Entry) -> list[Mapping[str, Any]]:
    """The diagnostics of all seeds that were measured on held-out tokens.

    Those made in training have no mean α.
    """
    return [
        run.diagnostics
        for run in entry.runs
        if run.diagnostics and "mean_weight" in run.diagnostics
    ]


def per_site(entry: Entry, name: str) -> list[float | None] | None:
    """A diagnostic of each read site, averaged over seeds.

    Seeds measured on held-out tokens are preferred to those that only have it from training.

    Args:
        entry: Whose runs are taken.
        name: Key of the number in the diagnostics.

    Returns:
        A number for each site, None at a site that routes nothing. None if no seed has it.
    """
    known = held_out(entry) or [run.diagnostics for run in entry.runs if run.diagnostics]
    columns = list(
        zip(
            *(diagnostics[name] for diagnostics in known if any(diagnostics.get(name) or ())),
            strict=True,
        )
    )
    return [None if None in values else statistics.fmean(values) for values in columns] or None


def sharpness(group: Group) -> Table:
    """The largest α of a token, averaged over tokens, over routing sites and over seeds.

    What the Delta paper states comes first.
    """
    rows: list[tuple[str, ...]] = [
        (
            f"{claim.method} (Delta paper)",
            f"{claim.average:.2f}",
            MISSING,
            MISSING,
            "as stated there",
        )
        for claim in SHARPNESS
    ]
    lacking = []
    for entry in group.entries:
        sites = per_site(entry, "largest_weight")
        if sites is not None:
            values = [value for value in sites if value is not None]
            deep = values[len(values) // 2 :]
            of = sorted({diagnostics["of"] for diagnostics in held_out(entry)})
            figures = (statistics.fmean(values), statistics.fmean(deep), max(values))
            rows.append((entry.label, *map(number, figures), "; ".join(of)))
        elif entry.attends:
            lacking.append(entry.label)
    notes = [
        "Few sources leave little to choose from: compare equal N. The claims are of block models "
        "at other sizes than ours."
    ]
    if lacking:
        notes.append(
            "No diagnostics of held-out tokens (eval.py run=… diagnostics=true): "
            f"{', '.join(lacking)}."
        )
    columns = ("run", "mean over sites", "mean over the deeper half", "largest site", "measured on")
    return Table(
        f"{group.name}_sharpness", "Largest α, averaged over tokens", columns, rows, tuple(notes)
    )


def ranking(group: Group) -> Table:
    """Every residual path of a group by held-out loss, with its place by compute and by time."""
    rates = {entry.label: _median(entry, "tokens_per_second") for entry in group.entries}
    base = rates[group.plain.label] if group.plain else None
    losses, percents, times = {}, {}, {}
    for entry in group.entries:
        name, rate = entry.label, rates[entry.label]
        losses[name] = statistics.fmean(entry.losses.values())
        percents[name] = added_percent(entry.runs[0])
        times[name] = base / rate if base and rate else None
    orders = [_places(figures) for figures in (losses, percents, times)]
    by_loss, by_compute, by_time = orders
    rows: list[tuple[str, ...]] = []
    for entry in sorted(group.entries, key=lambda entry: by_loss.get(entry.label, math.inf)):
        name, percent, time = entry.label, percents[entry.label], times[entry.label]
        rows.append(
            (
                name,
                number(losses[name]),
                mean_and_spread(differences(entry, group), signed=True)[0],
                MISSING if percent is None else f"{percent:.4f}",
                MISSING if time is None else f"{time:.3f}",
                *(str(places.get(name, MISSING)) for places in (by_loss, by_compute, by_time)),
                str(len(entry.runs)),
            )
        )
    columns = (
        *("run", "loss", "difference", "added FLOPs, %", "time of a token"),
        *("place by loss", "by compute", "by time", "number of seeds"),
    )
    notes = (
        "Sorted by loss. The difference is to the baseline, as a mean over the seeds that both "
        "have. The time of a token of training is that of the baseline where it says 1; see the "
        "table of throughput for the machines.",
    )
    return Table(f"{group.name}_ranking", "All runs by held-out loss", columns, rows, notes)


def _places(figures: Mapping[str, float | None]) -> dict[str, int]:
    """From 1 for the smallest number; what has none, or none that is finite, has no place."""
    known = {name: x for name, x in figures.items() if x is not None and math.isfinite(x)}
    return {name: 1 + sum(y < x for y in known.values()) for name, x in known.items()}


def speed(group: Group) -> Table:
    """Throughput and memory.

    The rate is the median over logged steps and seeds; its ratio to the baseline's stands beside
    it. Memory is what is counted before a run.
    """
    rates = {entry.label: _median(entry, "tokens_per_second") for entry in group.entries}
    base = rates[group.plain.label] if group.plain else None
    rows: list[tuple[str, ...]] = []
    for entry in group.entries:
        rate, machines = rates[entry.label], sorted({_machine(run) for run in entry.runs})
        mfu, memory = _median(entry, "mfu"), _memory(entry.runs[0])
        rows.append(
            (
                entry.label,
                MISSING if rate is None else f"{rate:,.0f}",
                MISSING if rate is None or not base else f"{rate / base:.3f}",
                MISSING if mfu is None else f"{mfu:.1%}",
                MISSING if memory is None else f"{memory / GB:.3f}",
                "; ".join(machines),
            )
        )
    notes = (
        "Rates are medians over the logged steps of all seeds. They compare only runs that had the "
        "same machine to themselves.",
        "Memory of a rank is counted from the settings (docs/scaling.md), not measured; "
        "`instruments.ranks` records peaks.",
    )
    columns = (
        "run",
        "tokens a second",
        "ratio to the baseline",
        "MFU",
        "memory a rank, GB",
        "machine",
    )
    return Table(f"{group.name}_speed", "Throughput and memory", columns, rows, notes)


def _median(entry: Entry, name: str) -> float | None:
    """Median of a number over the logged steps of all seeds; None if none has it."""
    values = [
        value for run in entry.runs for value in finite([value for _, value in run.series(name)])
    ]
    return statistics.median(values) if values else None


def _machine(run: Run) -> str:
    parts = [
        str(run.machine[key])
        for key in ("device", "depth_kernels", "compile")
        if key in run.machine
    ]
    return ", ".join(parts) or "not stated"


def _memory(run: Run) -> float | None:
    """Bytes of a rank; None if this version does not know the path or the model's settings."""
    if model_of(run) is None:
        return None
    ranks = [
        int(part) for part in str(run.machine.get("ranks", "1")).split(" x ") if part.isdigit()
    ]
    settings = {
        key: value
        for key, value in run.settings.items()
        if leaf_of(SCHEMA, key) and key not in ("name", "seed", "runs")
    }
    try:
        return _estimate(json.dumps(settings), math.prod(ranks))
    except (ConfigError, ValueError):
        return None


@cache
def _estimate(settings: str, world: int) -> float:
    tree = DEFAULTS | json.loads(settings) | {"name": "report", "seed": 0}
    return float(estimate_memory(parse(TrainConfig, tree), world).total)
