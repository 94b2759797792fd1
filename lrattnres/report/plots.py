"""Pictures of one run: the loss curve, and where each site reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # pictures are files; a run needs no display

import matplotlib.pyplot as plt
import numpy as np


def loss_curve(records: list[dict[str, Any]], title: str, path: Path) -> None:
    """Training loss of each logged step and held-out loss, in nats a token, from the lines of metrics.jsonl."""
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


def depth_heatmap(diagnostics: dict[str, Any], title: str, path: Path) -> None:
    """Mean α of every site over its sources, its colours cut at the 99.5th percentile as in the paper's Figure 3.

    Sources stand under the last sub-layer they sum, so that a block's partial and final sums share a column.
    """
    weights, used = weight_grid(diagnostics)
    ceiling = np.nanpercentile(weights, 99.5)
    figure, axes = plt.subplots(
        figsize=(2.2 + 0.34 * len(used), 1.8 + 0.26 * len(weights)), layout="constrained"
    )
    picture = axes.imshow(weights[1:, used], cmap="magma", vmin=0, vmax=ceiling, aspect="auto")
    for row, column in np.argwhere(~np.isnan(weights[1:, used])) if len(used) <= 16 else ():
        mean = weights[1 + row, used[column]]
        axes.text(
            column,
            row,
            f"{mean:.2f}",
            ha="center",
            va="center",
            size=7,
            color="w" if mean < 0.6 * ceiling else "k",
        )
    axes.set_xticks(range(len(used)), [source_label(column, len(weights)) for column in used])
    axes.set_yticks(
        range(len(weights) - 1),
        [site_name(site, len(weights) - 1) for site in range(1, len(weights))],
    )
    axes.tick_params(labelsize=8)
    axes.set(
        xlabel="source: embedding, or last sub-layer it sums",
        ylabel="read site: sub-layer it feeds",
        title=title,
    )
    figure.colorbar(
        picture,
        ax=axes,
        label="mean α",
        extend="max" if np.nanmax(weights) > ceiling else "neither",
    )
    save(figure, path)


def weight_grid(diagnostics: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Mean α [sites, 1 + sub-layers], NaN where a site has no such source, and the columns that any site reads.

    A source stands in the column of the last sub-layer it sums; the embedding in column 0, and the null source in the last.
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


def site_curves(diagnostics: dict[str, Any], title: str, path: Path) -> None:
    """Effective sources, the largest α and the norm of h against the read site."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    counts = [
        len(labels) if means else None
        for labels, means in zip(diagnostics["sources"], diagnostics["mean_weight"], strict=True)
    ]
    for panel, (name, label) in zip(
        axes,
        (
            ("effective_sources", "effective sources"),
            ("largest_weight", "largest α"),
            ("hidden_norm", "norm of h"),
        ),
        strict=True,
    ):
        points = [
            (site, value)
            for site, value in enumerate(diagnostics[name], start=1)
            if value is not None
        ]
        if points:
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, color="#3b6ea5")
        if name == "effective_sources" and any(counts):
            available = [
                (site, count) for site, count in enumerate(counts, start=1) if count is not None
            ]
            panel.plot(
                *zip(*available, strict=True), color="#999999", linestyle=":", label="available"
            )
            panel.legend()
        panel.set(xlabel="read site: sub-layer it feeds, the head last", ylabel=label)
        panel.grid(alpha=0.25)
    figure.suptitle(title)
    save(figure, path)


def site_name(site: int, head: int) -> str:
    """What a read site feeds, sub-layers counted from 1."""
    return "head" if site == head else f"{site + 1} {'mlp' if site % 2 else 'attn'}"


def save(figure: Any, path: Path) -> None:
    """Writes a figure, makes its folder if need be, and lets go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
