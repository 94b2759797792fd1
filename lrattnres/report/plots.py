"""Pictures of one run: loss, where each site reads, and what it takes from each output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # pictures are files; a run needs no display

import matplotlib.pyplot as plt
import numpy as np

SOURCE = "source: embedding, or last sub-layer it sums"
OUTPUT = "output: embedding, or the sub-layer that wrote it"
CURVES = {
    "effective_sources": "effective sources",
    "largest_weight": "largest α",
    "hidden_norm": "norm of h",
}
NOTHING = "#c4c4c4"  # where a site does not read that


def loss_curve(records: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draws the training loss of each logged step, and held-out losses, in nats per token.

    Args:
        records: The lines of metrics.jsonl.
        title: Stands above it.
        path: The PNG file.
    """
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, label, color, marker in (
        ("loss", "training", "#8fb3d9", ""),
        ("val_loss", "held out", "#b5402a", "o"),
    ):
        points = [
            (record["step"], record[name])
            for record in records
            if isinstance(record.get(name), float)
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                label=label,
                color=color,
                marker=marker,
                markersize=4,
                linewidth=1,
            )
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend()
    save(figure, path)


class Map(NamedTuple):
    """A number for each read site and each thing that it reads; a site is a line.

    Attributes:
        values: float64 [sites, columns]; NaN where a site does not read that.
        sites: Names of the lines.
        columns: Names of the columns.
    """

    values: np.ndarray
    sites: list[str]
    columns: list[str]


class Scale(NamedTuple):
    """What a colour means, for one map or several.

    Attributes:
        measure: What the values are.
        colors: Name of matplotlib's colour map.
        low, high: Values at its ends.
        extend: On which sides values are cut, as matplotlib takes it.
    """

    measure: str
    colors: str
    low: float
    high: float
    extend: str

    def ink(self, value: float) -> str:
        """Colour of a text on the colour of a value: white or black."""
        dark = abs(value) > 0.6 * self.high if self.low < 0 else value < 0.6 * self.high
        return "w" if dark else "k"


def scale_of(values: np.ndarray, measure: str, *, signed: bool = False) -> Scale:
    """A scale that is cut at the 99.5th percentile, as in the paper's Figure 3.

    Args:
        values: Everything that is drawn with it; what is not finite does not count.
        measure: What the values are.
        signed: Two colours with zero in the middle; else the scale begins at zero.
    """
    shown = values[np.isfinite(values)]
    sizes = abs(shown) if signed else shown
    ceiling = (float(np.percentile(sizes, 99.5)) if len(sizes) else 0.0) or 1.0
    above, below = bool((shown > ceiling).any()), signed and bool((shown < -ceiling).any())
    extend = "both" if above and below else "max" if above else "min" if below else "neither"
    return Scale(measure, "RdBu_r" if signed else "magma", -ceiling * signed, ceiling, extend)


def depth_heatmap(diagnostics: Mapping[str, Any], title: str, path: Path) -> None:
    """Draws mean α of every site over its sources.

    Args:
        diagnostics: `sources` and `mean_weight` of a probe's results.
        title: Stands above it.
        path: The PNG file.
    """
    weights = weight_map(diagnostics)
    _heatmap(weights, scale_of(weights.values, "mean α"), SOURCE, title, path)


def coefficient_heatmap(rows: Sequence[Sequence[float]], title: str, path: Path) -> None:
    """Draws what each site takes from each output: c with h_t = Σ c_{t,i} o_i.

    Args:
        rows: For each site, a number for the embedding and for every output before it.
        title: Stands above it.
        path: The PNG file.
    """
    taken = coefficient_map(rows)
    scale = scale_of(taken.values, "mean coefficient", signed=True)
    _heatmap(taken, scale, OUTPUT, title, path)


def _heatmap(drawn: Map, scale: Scale, below: str, title: str, path: Path) -> None:
    """Draws one map; with at most 16 columns each number is written on its colour."""
    lines, columns = drawn.values.shape
    figure, axes = plt.subplots(
        figsize=(2.2 + 0.34 * columns, 2.06 + 0.26 * lines), layout="constrained"
    )
    picture = draw_map(axes, drawn, scale)
    for line, column in np.argwhere(~np.isnan(drawn.values)) if columns <= 16 else ():
        value = drawn.values[line, column]
        style: dict[str, Any] = {"ha": "center", "va": "center", "size": 7}
        axes.text(column, line, f"{value:.2f}", color=scale.ink(value), **style)
    axes.set_xticks(range(columns), drawn.columns)
    axes.set_yticks(range(lines), drawn.sites)
    axes.tick_params(labelsize=8)
    axes.set(xlabel=below, ylabel="read site: sub-layer it feeds")
    axes.set_title(title, parse_math=False, wrap=True)
    figure.colorbar(picture, ax=axes, label=scale.measure, extend=scale.extend)
    save(figure, path)


def draw_map(axes: Any, drawn: Map, scale: Scale) -> Any:
    """Draws a map as an image in axes; what a site does not read is grey."""
    axes.set_facecolor(NOTHING)
    return axes.imshow(
        drawn.values,
        cmap=scale.colors,
        vmin=scale.low,
        vmax=scale.high,
        aspect="auto",
        interpolation="nearest",
    )


def weight_map(diagnostics: Mapping[str, Any]) -> Map:
    """Mean α of all sites but the first, which has one source."""
    weights, used = weight_grid(diagnostics)
    head = len(weights) - 1
    columns = [source_label(column, head + 1) for column in used]
    return Map(weights[1:, used], [site_name(site, head) for site in range(1, head + 1)], columns)


def coefficient_map(rows: Sequence[Sequence[float]]) -> Map:
    """The coefficients of all sites, the first included."""
    values = np.full((len(rows), len(rows)), np.nan)
    for site, row in enumerate(rows):
        values[site, : len(row)] = row
    sites = range(len(rows))
    return Map(
        values,
        [site_name(site, len(rows) - 1) for site in sites],
        [source_label(output, len(rows)) for output in sites],
    )


def weight_grid(diagnostics: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Mean α of every site, with one column for each thing that any site reads.

    A source stands in the column of the last sub-layer that it sums, so the partial and the final
    sum of a depth block share a column. The embedding has column 0, and the null source the last.

    Args:
        diagnostics: `sources` and `mean_weight` of a probe's results.

    Returns:
        float64 [sites, 1 + sub-layers + 1], NaN where a site has no such source; and the numbers of
        the columns that any site reads.
    """
    sites = len(diagnostics["sources"])
    columns = {"embedding": 0} | {str(end): end for end in range(1, sites)} | {"null": sites}
    weights = np.full((sites, len(columns)), np.nan)
    for site, (labels, means) in enumerate(
        zip(diagnostics["sources"], diagnostics["mean_weight"], strict=True)
    ):
        for label, mean in zip(labels, means or [], strict=bool(means)):
            weights[site, columns[label.rsplit("-", 1)[-1]]] = mean
    return weights, np.flatnonzero(~np.isnan(weights).all(axis=0))


def source_label(column: int, sites: int) -> str:
    """Name of a column of `weight_grid`, for an axis."""
    return {0: "emb", sites: "null"}.get(column, str(column))


def site_curves(diagnostics: Mapping[str, Any], title: str, path: Path) -> None:
    """Draws the norm of h over the read site.

    For a path that attends, also effective sources and largest α.

    Args:
        diagnostics: Results of a probe.
        title: Stands above it.
        path: The PNG file.
    """
    known = {name: label for name, label in CURVES.items() if _points(diagnostics[name])}
    figure, axes = plt.subplots(
        1, len(known), figsize=(1.5 + 3.5 * len(known), 3.6), layout="constrained", squeeze=False
    )
    pairs = zip(diagnostics["sources"], diagnostics["mean_weight"], strict=True)
    available = _points([len(labels) if means else None for labels, means in pairs])
    for panel, (name, label) in zip(axes[0], known.items(), strict=True):
        points = zip(*_points(diagnostics[name]), strict=True)
        panel.plot(*points, marker="o", markersize=3, color="#3b6ea5")
        if name == "effective_sources" and available:
            style = {"color": "#999999", "linestyle": ":", "label": "available"}
            panel.plot(*zip(*available, strict=True), **style)
            panel.legend()
        panel.set(xlabel="read site: sub-layer it feeds, the head last", ylabel=label)
        panel.grid(alpha=0.25)
    figure.suptitle(title, parse_math=False)
    save(figure, path)


def _points(values: Sequence[float | None]) -> list[tuple[int, float]]:
    """(site, value) from 1, without the sites that have no value."""
    return [(site, value) for site, value in enumerate(values, start=1) if value is not None]


def site_name(site: int, head: int) -> str:
    """What a read site feeds, sub-layers counted from 1, such as `3 attn`.

    Args:
        site: From 0.
        head: Number of the head's site, from 0.
    """
    return "head" if site == head else f"{site + 1} {'mlp' if site % 2 else 'attn'}"


def save(figure: Any, path: Path) -> None:
    """Writes a figure, makes its folder if there is none, and closes the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
