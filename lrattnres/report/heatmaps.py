"""Figure 3: where each site reads, side by side."""

from __future__ import annotations

import itertools
import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from lrattnres.report.compare import Group
from lrattnres.report.figures import Picture
from lrattnres.report.plots import site_name, source_label, weight_grid

WIDE = 4  # panels in a line


def heatmaps(group: Group) -> list[Picture]:
    """Mean α of every routed run, full ones and block ones in a picture each, which shares one scale of colours.

    Colours are cut at the 99.5th percentile of the picture's values, as in the paper. Of several seeds the first that was
    measured is shown. Runs without diagnostics of held-out tokens are named in the caption.
    """
    shown, lacking = [], []
    for entry in group.entries:
        run = next(
            (
                run
                for run in entry.runs
                if run.diagnostics and any(run.diagnostics.get("mean_weight") or ())
            ),
            None,
        )
        if run is not None and run.diagnostics is not None:
            shown.append(
                (bool(entry.choice.blocks), f"{entry.label}, seed {run.seed}", run.diagnostics)
            )
        elif entry.choice.routed:
            lacking.append(entry.label)
    shown.sort(key=lambda item: item[0])
    missing = f" Nothing to show for: {', '.join(lacking)}." if lacking else ""
    return [
        _picture(group, "blocks" if blocks else "full", [item[1:] for item in items], missing)
        for blocks, items in itertools.groupby(shown, key=lambda item: item[0])
    ]


def _picture(group: Group, kind: str, shown: list[tuple[Any, ...]], missing: str) -> Picture:
    grids = [weight_grid(diagnostics) for _, diagnostics in shown]
    values = np.concatenate([weights[~np.isnan(weights)] for weights, _ in grids])
    ceiling = float(np.percentile(values, 99.5))
    wide = min(WIDE, len(shown))
    tall = math.ceil(len(shown) / wide)
    figure, axes = plt.subplots(
        tall, wide, figsize=(3.4 * wide + 1, 3.6 * tall), layout="constrained", squeeze=False
    )
    rows: list[tuple[Any, ...]] = []
    for panel, (title, diagnostics), (weights, used) in zip(axes.flat, shown, grids, strict=False):
        picture: Any = panel.imshow(
            weights[1:, used],
            cmap="magma",
            vmin=0,
            vmax=ceiling,
            aspect="auto",
            interpolation="nearest",
        )
        panel.set_facecolor("#dddddd")
        panel.set_title(title, fontsize=9)
        _ticks(panel, used, len(weights) - 1)
        for site, (labels, means) in enumerate(
            zip(diagnostics["sources"], diagnostics["mean_weight"], strict=True), start=1
        ):
            rows += [
                (title, site, label, mean)
                for label, mean in zip(labels, means or [], strict=bool(means))
            ]
    kept, rest = axes.flat[: len(shown)], axes.flat[len(shown) :]
    for panel in rest:
        panel.remove()
    for panel in axes[:, 0]:
        panel.set_ylabel("read site")
    for panel in kept[-wide:]:
        panel.set_xlabel("source: embedding, or last\nsub-layer it sums")
    figure.colorbar(
        picture,
        ax=list(kept),
        label="mean α",
        extend="max" if values.max() > ceiling else "neither",
        aspect=30,
    )
    caption = "Mean α over held-out tokens; grey: no such source. One scale of colours for all panels, cut at the 99.5th percentile, "
    caption += f"{ceiling:.3f}; the largest is {values.max():.3f}.{missing}"
    title = f"Figure 3: where each site reads, {kind}"
    return Picture(
        f"{group.name}_figure3_{kind}",
        title,
        caption,
        figure,
        ("run", "site", "source", "mean_weight"),
        rows,
    )


def _ticks(panel: Any, used: np.ndarray, head: int) -> None:
    """A name for every few sites and sources, so that names do not touch."""
    columns = range(0, len(used), max(1, math.ceil(len(used) / 9)))
    panel.set_xticks(list(columns), [source_label(used[column], head + 1) for column in columns])
    sites = [*range(1, head, max(1, math.ceil(head / 12))), head]
    sites = [site for site in sites if site == head or head - site >= head / 16]
    panel.set_yticks([site - 1 for site in sites], [site_name(site, head) for site in sites])
    panel.tick_params(labelsize=7)
