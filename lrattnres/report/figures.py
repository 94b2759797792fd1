"""The pictures of a report, each with its data: losses, effective sources, largest weights.

Runs are split into panels by residual path and granularity, so that a legend has few names. The
baseline is in every panel. The colours are those of Okabe and Ito, which colour-blind readers can
tell apart. Lines differ in dashes too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")  # pictures are files; a report needs no display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from lrattnres.report.compare import Entry, Group, blocks_of, granularity, is_plain
from lrattnres.report.measured import held_out, per_site
from lrattnres.report.paper import SHARPNESS, TABLE1
from lrattnres.report.read import finite
from lrattnres.report.tables import added_percent

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", "--", ":", "-.")
GREY = "#555555"
FILLS = ("full", "none", "left")  # of points, when all colours are used
MARKERS = {None: "o", 4: "^", 8: "s", 16: "D"}
EARLY = 0.05  # share of training that the axis leaves out: its losses would flatten the rest
BINS = 120  # points of a curve: more than a panel can show
LACKING = "Nothing to show for"
Line = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Picture:
    """A figure and its data.

    Attributes:
        name: Of its files.
        title: Its heading in the report.
        caption: What it shows.
        figure: The drawing.
        columns: Names of the columns of `rows`.
        rows: The data.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def loss_against_cost(group: Group) -> Picture:
    """Figure 1: held-out loss over added compute, the paper's results and ours in two panels."""
    rows: list[tuple[Any, ...]] = [
        (
            "paper",
            row.row,
            row.residual,
            row.blocks,
            row.rank,
            float(row.added_flops_percent),
            float(row.val_loss),
            None,
        )
        for row in TABLE1
    ]
    lacking = []
    for entry in group.entries:
        percent, losses = added_percent(entry.runs[0]), finite(list(entry.losses.values()))
        if percent is None or not losses:
            lacking.append(entry.label)
            continue
        choice, name = entry.choice, entry.row.row if entry.row else entry.label
        spread = float(np.std(losses, ddof=1)) if len(losses) > 1 else None
        rows.append(
            (
                "ours",
                name,
                choice.residual,
                choice.blocks,
                choice.rank,
                percent,
                float(np.mean(losses)),
                spread,
            )
        )
    colors = _colors(row[2] for row in rows)
    figure, axes = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    for panel, whose in zip(axes, ("paper", "ours"), strict=True):
        _scatter(panel, [row[1:] for row in rows if row[0] == whose], colors)
        panel.set(
            xlabel="added FLOPs, % of the plain core",
            ylabel="held-out loss (nats per token)",
            title=whose,
        )
        panel.grid(alpha=0.25)
    handles = {
        label: handle
        for panel in axes
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=7, fontsize=8)
    caption = "Numbers are rows of Table 1; bars are the spread over seeds. "
    caption += "The two panels have axes of their own."
    caption += named("Without a cost or a finite loss", lacking)
    columns = (
        "whose",
        "row",
        "residual",
        "blocks",
        "rank",
        "added_flops_percent",
        "val_loss",
        "spread",
    )
    return Picture(
        f"{group.name}_figure1",
        "Figure 1: held-out loss against added compute",
        caption,
        figure,
        columns,
        rows,
    )


def loss_curves(group: Group) -> Picture:
    """Training loss over tokens, with held-out losses as dots."""
    tokens = group.runs[0].tokens / group.runs[0].settings["steps"]

    def draw(panel: Any, entry: Entry, style: dict[str, Any], rows: list[tuple[Any, ...]]) -> bool:
        points = [point for run in entry.runs for point in run.series("loss")]
        steps, losses = _binned(points, int(entry.runs[0].settings["steps"]))
        panel.plot([step * tokens for step in steps], losses, **style)
        rows += [
            (entry.label, "training", step * tokens, loss)
            for step, loss in zip(steps, losses, strict=True)
        ]
        for step, loss in _by_step(point for run in entry.runs for point in run.series("val_loss")):
            panel.plot(step * tokens, loss, "o", markersize=3, color=style["color"])
            rows.append((entry.label, "held out", step * tokens, loss))
        return bool(points)

    figure, rows, lacking = _panels(group, draw, "tokens", "loss (nats per token)")
    later = finite([row[3] for row in rows if row[2] > EARLY * group.runs[0].tokens])
    if later:
        margin = 0.05 * (max(later) - min(later)) or 0.1
        figure.axes[0].set_ylim(min(later) - margin, max(later) + margin)
    for panel in figure.axes:
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    caption = "Lines: training loss, averaged over the seeds that a run has and short stretches of "
    caption += "steps. Dots: held-out loss. "
    caption += (
        f"The axis is cut to what comes after the first {EARLY:.0%} of training."
        f"{named(LACKING, lacking)}"
    )
    columns = ("run", "loss_of", "tokens", "loss")
    return Picture(f"{group.name}_loss", "Loss curves", caption, figure, columns, rows)


def loss_differences(group: Group) -> Picture | None:
    """Training loss minus the baseline's on the same batch: same step and same seed.

    None if the group has no baseline.
    """
    plain = group.plain
    if plain is None:
        return None
    base = {run.seed: dict(run.series("loss")) for run in plain.runs}
    tokens = group.runs[0].tokens / group.runs[0].settings["steps"]

    def draw(panel: Any, entry: Entry, style: dict[str, Any], rows: list[tuple[Any, ...]]) -> bool:
        points = [
            (step, loss - base[run.seed][step])
            for run in entry.runs
            for step, loss in run.series("loss")
            if step in base.get(run.seed, {})
        ]
        steps, gaps = _binned(points, int(entry.runs[0].settings["steps"]))
        panel.plot([step * tokens for step in steps], gaps, **style)
        rows += [(entry.label, step * tokens, gap) for step, gap in zip(steps, gaps, strict=True)]
        return bool(points)

    figure, rows, lacking = _panels(group, draw, "tokens", "loss - baseline (nats per token)")
    for panel in figure.axes:
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    late = finite(
        [row[2] for row in rows if row[1] > 0.3 * group.runs[0].tokens and row[0] != plain.label]
    )
    if late:  # the first steps differ by far more, and would flatten the rest
        low, high = min(0.0, *np.percentile(late, [1, 99])), max(0.0, *np.percentile(late, [1, 99]))
        margin = 0.15 * (high - low) or 0.01
        figure.axes[0].set_ylim(low - margin, high + margin)
    caption = "Training loss minus the baseline's on the same batch, averaged over seeds and short "
    caption += "stretches of steps; below zero is better. The axis is cut to what comes after the "
    caption += f"first 30% of training.{named(LACKING, lacking)}"
    return Picture(
        f"{group.name}_difference",
        "Loss against the baseline",
        caption,
        figure,
        ("run", "tokens", "difference"),
        rows,
    )


def effective_sources(group: Group) -> Picture | None:
    """Figure 2: exp(entropy of α), averaged over tokens, at every read site.

    None without diagnostics.
    """
    caption = "Effective number of sources, exp(entropy of α), averaged over tokens and seeds."
    return _sites(
        group,
        "effective_sources",
        "Figure 2: effective sources per site",
        "effective sources",
        caption,
        "figure2",
    )


def largest_weights(group: Group) -> Picture | None:
    """The largest α of a token, averaged over tokens, at every read site.

    Dotted lines are the averages that the Delta paper states. None without diagnostics.
    """
    stated = " and ".join(f"{claim.average} ({claim.method})" for claim in SHARPNESS)
    caption = (
        "Largest α of a token, averaged over tokens and seeds. Dotted: averages over sites that "
    )
    caption += f"the Delta paper states, {stated}."
    picture = _sites(group, "largest_weight", "Largest α per site", "largest α", caption, "largest")
    for panel in picture.figure.axes if picture else ():
        panel.set_ylim(0, 1.02)
        for claim in SHARPNESS:
            panel.axhline(claim.average, color=GREY, linestyle=":", linewidth=0.9)
    return picture


def _sites(
    group: Group, name: str, title: str, axis: str, caption: str, file: str
) -> Picture | None:
    """A picture of one number for every read site; None if no run has it.

    Args:
        group: Whose runs are shown.
        name: Key of the number in the diagnostics.
        title: Heading of the picture.
        axis: Label of the vertical axis.
        caption: What is said below it.
        file: End of the name of its files.
    """

    def draw(panel: Any, entry: Entry, style: dict[str, Any], rows: list[tuple[Any, ...]]) -> bool:
        values = per_site(entry, name) or []
        points = [(site, value) for site, value in enumerate(values, start=1) if value is not None]
        if points:
            panel.plot(*zip(*points, strict=True), marker=".", markersize=3, **style)
            rows += [(entry.label, site, value) for site, value in points]
        return bool(points)

    figure, rows, lacking = _panels(
        group, draw, "read site: sub-layer it feeds, the head last", axis, attending=True
    )
    if not rows:
        plt.close(figure)
        return None
    shown = [entry for entry in group.entries if entry.attends and entry.label not in lacking]
    training = [entry.label for entry in shown if not held_out(entry)]
    caption += named("On training tokens, as there are no held-out ones", training)
    return Picture(
        f"{group.name}_{file}",
        title,
        caption + named(LACKING, lacking),
        figure,
        ("run", "site", name),
        rows,
    )


Draw = Callable[[Any, Entry, dict[str, Any], list[tuple[Any, ...]]], bool]


def _panels(
    group: Group, draw: Draw, across: str, up: str, attending: bool = False
) -> tuple[Figure, list[tuple[Any, ...]], list[str]]:
    """Draws a panel for each family of residual paths.

    Args:
        group: Whose entries are drawn.
        draw: (panel, entry, style, rows) -> whether there was something to draw; it appends its
            data to `rows`.
        across: Label of the horizontal axis.
        up: Label of the vertical axis.
        attending: Show only paths that attend, and no baseline.

    Returns:
        The figure, its data, and the labels of entries without any.
    """
    plain = None if attending else group.plain
    entries = [
        entry for entry in group.entries if entry is not plain and (entry.attends or not attending)
    ]
    families = {
        name: list(members)
        for name, members in itertools.groupby(sorted(entries, key=_family), key=_family)
    }
    names = sorted(families, key=lambda name: group.entries.index(families[name][0])) or [
        "baseline only"
    ]
    wide = min(3, len(names))
    tall = math.ceil(len(names) / wide)
    figure, axes = plt.subplots(
        tall,
        wide,
        figsize=(4.3 * wide + 0.6, 3.9 * tall),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    first: dict[str, Any] = {}
    rows: list[tuple[Any, ...]] = []
    lacking: list[str] = []
    for panel, name in zip(axes.flat, names, strict=False):
        members = families.get(name, [])
        # Without depth blocks there are many more sources.
        kind = name.rpartition(", ")[2] if attending else ""
        if first.setdefault(kind, panel) is not panel:
            panel.sharey(first[kind])
        for number, entry in enumerate([*([plain] if plain else []), *members]):
            again = entry is plain and name != names[0]
            style = _style(number - bool(plain)) | {"label": entry.label}
            drawn = draw(panel, entry, style, [] if again else rows)
            lacking += [] if drawn or again else [entry.label]
        panel.set(title=name, xlabel=across)
        panel.tick_params(labelbottom=True)
        panel.autoscale_view()
        panel.grid(alpha=0.25)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(
                loc="upper center",
                bbox_to_anchor=(0.5, -0.17),
                ncols=2,
                fontsize=7.5,
                frameon=False,
            )
    for panel in axes[:, 0]:
        panel.set_ylabel(up)
    for panel in list(axes.flat)[len(names) :]:
        panel.remove()
    return figure, rows, lacking


def _scatter(panel: Any, rows: Sequence[tuple[Any, ...]], colors: Mapping[str, Any]) -> None:
    """Draws points with the names of their rows.

    Args:
        panel: Axes to draw on.
        rows: (row, residual, blocks, rank, percent, loss, spread) of each point.
        colors: Style of each residual path, from `_colors`.
    """
    order = list(colors)
    for _, residual, blocks, _, percent, loss, spread in sorted(
        rows, key=lambda row: (order.index(row[1]), blocks_of(row[2]) or 99)
    ):
        style = colors[residual]
        marker = "*" if is_plain(residual) else MARKERS.get(blocks, "P")
        label = " ".join([residual, *granularity(residual, blocks)])
        panel.errorbar(
            percent, loss, spread, fmt="none", ecolor=style["color"], capsize=3, zorder=1
        )
        panel.plot(percent, loss, marker, markersize=6, label=label, linestyle="", **style)
    panel.margins(0.14)
    _name_points(panel, [(row[0], row[4], row[5]) for row in rows])


def _colors(residuals: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The style of a point by residual path, in order of first mention; the baseline is grey."""
    names = list(dict.fromkeys(residuals))
    others = [name for name in names if not is_plain(name)]
    looks = {
        name: {
            "color": PALETTE[number % len(PALETTE)],
            "fillstyle": FILLS[number // len(PALETTE) % len(FILLS)],
        }
        for number, name in enumerate(others)
    }
    return {name: looks.get(name, {"color": GREY}) for name in names}


def _name_points(panel: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Writes names beside points, where each is farthest from other points and names.

    Args:
        panel: Axes, with the points drawn.
        points: (name, x, y) of each point.
    """
    low, high = panel.get_xlim(), panel.get_ylim()
    panel.set(xlim=low, ylim=high)
    # Of a panel, in points, approximately.
    size = (0.5 * panel.figure.get_figwidth() * 65, panel.figure.get_figheight() * 60)
    spots = [
        ((x - low[0]) / (low[1] - low[0]) * size[0], (y - high[0]) / (high[1] - high[0]) * size[1])
        for _, x, y in points
    ]
    taken = list(spots)
    for (name, x, y), (across, up) in sorted(zip(points, spots, strict=True)):
        half = 2.6 * len(name)

        def room(
            side: tuple[float, float], across: float = across, up: float = up, half: float = half
        ) -> float:
            centre = (across + side[0] * (half + 6), up + side[1] * 9)
            inside = half < centre[0] < size[0] - half
            others = [spot for spot in taken if spot != (across, up)]
            return (
                min(
                    [
                        math.hypot((centre[0] - a) / max(half, 6), (centre[1] - b) / 6)
                        for a, b in others
                    ]
                    or [9]
                )
                + 9 * inside
            )

        side = max(((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)), key=room)
        offset = (side[0] * (half + 6), side[1] * 9)
        panel.annotate(
            name, (x, y), offset, textcoords="offset points", ha="center", va="center", fontsize=8
        )
        taken.append((across + offset[0], up + offset[1]))


def _style(number: int) -> dict[str, Any]:
    """Style of the line with this number in a panel; -1 is the baseline."""
    if number < 0:
        return {"color": GREY, "linestyle": "--", "linewidth": 0.9, "zorder": 3}
    return {
        "color": PALETTE[number % len(PALETTE)],
        "linestyle": DASHES[number // len(PALETTE) % 4],
        "linewidth": 1.3,
    }


def _family(entry: Entry) -> str:
    choice = entry.choice
    kind = "blocks" if choice.blocks else "full"
    return f"{choice.residual}, {kind}" if choice.family != choice.residual else choice.residual


def _binned(points: Iterable[tuple[int, float]], steps: int) -> Line:
    """Means of steps and values over equal stretches of training.

    Args:
        points: (step, value); values that are not finite are left out.
        steps: Of the whole run.
    """
    bins: dict[int, list[tuple[int, float]]] = {}
    for step, value in points:
        if math.isfinite(value):
            bins.setdefault(max(0, step - 1) * BINS // steps, []).append((step, value))
    means = [tuple(map(float, np.mean(bins[number], axis=0))) for number in sorted(bins)]
    return [step for step, _ in means], [value for _, value in means]


def _by_step(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """(step, mean of the values at this step), by step."""
    values: dict[int, list[float]] = {}
    for step, value in points:
        values.setdefault(step, []).append(value)
    return [(step, float(np.mean(values[step]))) for step in sorted(values)]


def named(what: str, labels: list[str]) -> str:
    """A sentence that lists labels, with a space before it; empty without labels."""
    return f" {what}: {', '.join(labels)}." if labels else ""
