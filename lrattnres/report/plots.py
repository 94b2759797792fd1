"""Pictures of one run: the loss curve, where each site reads, and what it takes from
each output.
"""

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
    """Training loss of each logged step and held-out loss, in nats a token.

    Args:
        records: the lines of metrics.jsonl.
        title: stands above it.
        path: the PNG file.
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
    """A number for a read site and what it reads, to be drawn with a line for each site.

    Args:
        values: float64 [sites, columns]; NaN where a site does not read that.
        sites: names of the lines.
        columns: names of the columns.
    """

    values: np.ndarray
    sites: list[str]
    columns: list[str]


class Scale(NamedTuple):
    """What a colour means, of one map or of several."""

    measure: str
    colors: str
    low: float
    high: float
    extend: str

    def ink(self, value: float) -> str:
        """The colour of a text on the colour of a value."""
        dark = abs(value) > 0.6 * self.high if self.low < 0 else value < 0.6 * self.high
        return "w" if dark else "k"


def scale_of(values: np.ndarray, measure: str, *, signed: bool = False) -> Scale:
    """A scale that is cut at the 99.5th percentile, as in the paper's Figure 3.

    Args:
        values: everything that is drawn with it; what is not finite does not count.
        measure: what the values are.
        signed: whether the scale has two colours with zero between them, else it begins at zero.
    """
    shown = values[np.isfinite(values)]
    sizes = abs(shown) if signed else shown
    ceiling = (float(np.percentile(sizes, 99.5)) if len(sizes) else 0.0) or 1.0
    above, below = bool((shown > ceiling).any()), signed and bool((shown < -ceiling).any())
    extend = "both" if above and below else "max" if above else "min" if below else "neither"
    return Scale(measure, "RdBu_r" if signed else "magma", -ceiling * signed, ceiling, extend)


def depth_heatmap(diagnostics: Mapping[str, Any], title: str, path: Path) -> None:
    """Mean α of every site over its sources.

    Args:
        diagnostics: `sources` and `mean_weight` of a probe's results.
        title: stands above it.
        path: the PNG file.
    """
    weights = weight_map(diagnostics)
    _heatmap(weights, scale_of(weights.values, "mean α"), SOURCE, title, path)


def coefficient_heatmap(rows: Sequence[Sequence[float]], title: str, path: Path) -> None:
    """What each site takes from each output: c with h_t = Σ c_{t,i} o_i.

    Args:
        rows: of each site a number for the embedding, and one for every output before it.
        title: stands above it.
        path: the PNG file.
    """
    taken = coefficient_map(rows)
    scale = scale_of(taken.values, "mean coefficient", signed=True)
    _heatmap(taken, scale, OUTPUT, title, path)


def _heatmap(drawn: Map, scale: Scale, below: str, title: str, path: Path) -> None:
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
    """A map as an image in axes; what a site does not read is grey."""
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
    """Mean α of the sites that have a choice, so of all but the first."""
    weights, used = weight_grid(diagnostics)
    head = len(weights) - 1
    columns = [source_label(column, head + 1) for column in used]
    return Map(weights[1:, used], [site_name(site, head) for site in range(1, head + 1)], columns)


def coefficient_map(rows: Sequence[Sequence[float]]) -> Map:
    """The coefficients of every site, the first one among them."""
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
    """Mean α of every site over all that any site reads.

    A source stands in the column of the last sub-layer that it sums, so that a block's partial and
    final sums share one; the embedding in column 0, and the null source in the last.

    Returns:
        float64 [sites, 1 + sub-layers + 1], NaN where a site has no such source; and the columns
        that any site reads.
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
    """The name of a column of `weight_grid`, for an axis."""
    return {0: "emb", sites: "null"}.get(column, str(column))


def site_curves(diagnostics: Mapping[str, Any], title: str, path: Path) -> None:
    """The norm of h against the read site; if it attends, effective sources and largest α."""
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
    return [(site, value) for site, value in enumerate(values, start=1) if value is not None]


def site_name(site: int, head: int) -> str:
    """What a read site feeds, sub-layers counted from 1."""
    return "head" if site == head else f"{site + 1} {'mlp' if site % 2 else 'attn'}"


def save(figure: Any, path: Path) -> None:
    """Writes a figure, makes its folder if need be, and lets go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
