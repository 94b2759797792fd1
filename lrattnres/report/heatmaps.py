"""Figure 3: where each site reads, and what it takes from each output, in panels side by side."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from lrattnres.report.compare import Entry, Group
from lrattnres.report.figures import LACKING, Picture, named
from lrattnres.report.measured import held_out
from lrattnres.report.plots import Map, coefficient_map, draw_map, scale_of, weight_map

WIDE = 4  # panels in a line


class Panel(NamedTuple):
    """One heat map of a picture.

    Attributes:
        title: The run.
        map: What is drawn.
        rows: Its data: (site, what it reads, number).
    """

    title: str
    map: Map
    rows: list[tuple[int, str, float]]


def heatmaps(group: Group) -> list[Picture]:
    """Mean α of every path that attends: one picture without, and one with depth blocks.

    All panels of a picture have one scale of colours, cut at the 99.5th percentile of its values,
    as in the paper. Of several seeds the first that was measured is shown. The caption names runs
    without diagnostics of held-out tokens.
    """
    shown, lacking = [], []
    for entry in group.entries:
        panel = _panel(entry, _weights)
        if panel is not None:
            shown.append((bool(entry.choice.blocks), panel))
        elif entry.attends:
            lacking.append(entry.label)
    shown.sort(key=lambda item: item[0])
    pictures = []
    for blocks, items in itertools.groupby(shown, key=lambda item: item[0]):
        kind = "blocks" if blocks else "full"
        pictures.append(
            _picture(
                f"{group.name}_figure3_{kind}",
                f"Figure 3: where each site reads, {kind}",
                [panel for _, panel in items],
                "mean α",
                ("source", "mean_weight"),
                "source: embedding, or last\nsub-layer it sums",
                "Mean α over held-out tokens; grey: no such source. ",
                named(LACKING, lacking),
            )
        )
    return pictures


def coefficient_maps(group: Group) -> Picture | str | None:
    """Mean coefficients of every path whose reads are sums of the outputs, in one picture.

    Returns:
        The picture. A sentence instead, if no run has coefficients, and None, if no run has
        diagnostics of held-out tokens either.
    """
    shown: list[Panel] = []
    never, older, lacking = list[str](), list[str](), list[str]()
    for entry in group.entries:
        panel = _panel(entry, _coefficients) if entry.linear else None
        if panel is not None:
            shown.append(panel)
        elif not entry.linear:
            never.append(entry.label)
        else:
            (older if held_out(entry) else lacking).append(entry.label)
    why = named("No such numbers, as h is no sum of the outputs with one number each", never)
    why += named("Diagnostics without coefficients, of an earlier version", older)
    if not shown:
        return f"No coefficients to show.{why}" if why else None
    return _picture(
        f"{group.name}_coefficients",
        "Beside Figure 3: what each site takes from each output",
        shown,
        "mean coefficient",
        ("output", "coefficient"),
        "output: embedding, or the\nsub-layer that wrote it",
        "Mean over held-out tokens of c, with h = Σ c·o for the h that a site reads before its "
        "norm; grey: not written yet. Red is above zero, blue below. ",
        why + named(LACKING, lacking),
        signed=True,
    )


def _panel(
    entry: Entry, found: Callable[[Mapping[str, Any]], tuple[Map, list[tuple[Any, ...]]] | None]
) -> Panel | None:
    """The panel of the first seed whose diagnostics have what is wanted; None: no seed has it.

    Args:
        entry: Whose runs are looked at.
        found: Makes a map and its data from diagnostics; None: they have it not.
    """
    for run in entry.runs:
        result = found(run.diagnostics or {})
        if result is not None:
            return Panel(f"{entry.label}, seed {run.seed}", *result)
    return None


def _weights(diagnostics: Mapping[str, Any]) -> tuple[Map, list[tuple[Any, ...]]] | None:
    if not any(diagnostics.get("mean_weight") or ()):
        return None
    drawn = weight_map(diagnostics)
    if not np.isfinite(drawn.values).any():
        return None
    sites = zip(diagnostics["sources"], diagnostics["mean_weight"], strict=True)
    rows = [
        (site, label, mean)
        for site, (labels, means) in enumerate(sites, start=1)
        for label, mean in zip(labels, means or [], strict=bool(means))
    ]
    return drawn, rows


def _coefficients(diagnostics: Mapping[str, Any]) -> tuple[Map, list[tuple[Any, ...]]] | None:
    sites = diagnostics.get("coefficients")
    if not sites or not np.isfinite((drawn := coefficient_map(sites)).values).any():
        return None
    rows = [
        (site, str(output) if output else "embedding", coefficient)
        for site, row in enumerate(sites, start=1)
        for output, coefficient in enumerate(row)
    ]
    return drawn, rows


def _picture(
    name: str,
    title: str,
    shown: list[Panel],
    measure: str,
    columns: tuple[str, str],
    below: str,
    meaning: str,
    missing: str,
    signed: bool = False,
) -> Picture:
    """Draws panels as one picture with one scale of colours.

    Args:
        name: Of its files.
        title: Heading of the picture.
        shown: The panels, at least one.
        measure: What a colour means.
        columns: Names of the last two columns of the data.
        below: Label of the horizontal axis.
        meaning: Beginning of the caption.
        missing: End of the caption.
        signed: Whether values may be below zero.
    """
    values = np.concatenate([panel.map.values[np.isfinite(panel.map.values)] for panel in shown])
    scale = scale_of(values, measure, signed=signed)
    wide = min(WIDE, len(shown))
    tall = math.ceil(len(shown) / wide)
    figure, axes = plt.subplots(
        tall, wide, figsize=(3.4 * wide + 1, 3.6 * tall), layout="constrained", squeeze=False
    )
    kept, rest = list(axes.flat[: len(shown)]), axes.flat[len(shown) :]
    for place, panel in zip(kept, shown, strict=True):
        image = draw_map(place, panel.map, scale)
        place.set_title(textwrap.fill(panel.title, 38), fontsize=9, parse_math=False)
        _ticks(place, panel.map)
    for place in rest:
        place.remove()
    for place in axes[:, 0]:
        place.set_ylabel("read site")
    for place in kept[-wide:]:
        place.set_xlabel(below)
    figure.colorbar(image, ax=kept, label=scale.measure, extend=scale.extend, aspect=30)
    caption = (
        f"{meaning}One scale of colours for all panels, cut at the 99.5th percentile"
        f"{' of their sizes' if signed else ''}, {scale.high:.3f}; the largest is "
        f"{values.max():.3f}{f', the smallest {values.min():.3f}' if signed else ''}.{missing}"
    )
    rows = [(panel.title, *row) for panel in shown for row in panel.rows]
    return Picture(name, title, caption, figure, ("run", "site", *columns), rows)


def _ticks(place: Any, drawn: Map) -> None:
    """Names every few sites and columns, so that names do not touch; the head always."""
    count, head = len(drawn.columns), len(drawn.sites) - 1
    columns = range(0, count, max(1, math.ceil(count / 9)))
    place.set_xticks(list(columns), [drawn.columns[column] for column in columns])
    sites = [*range(0, head, max(1, math.ceil(head / 12))), head]
    sites = [site for site in sites if site == head or head - site >= head / 16]
    place.set_yticks(sites, [drawn.sites[site] for site in sites])
    place.tick_params(labelsize=7)
