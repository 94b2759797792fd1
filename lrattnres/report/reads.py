"""Where the tokens of one text read, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.font_manager import findfont, get_font

from lrattnres.report.plots import (
    OUTPUT,
    Map,
    coefficient_heatmap,
    depth_heatmap,
    draw_map,
    save,
    scale_of,
)

MARKS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})
SHORT = {"embedding": "emb"}
LONGEST = 18  # characters of a token that are shown at most


def token_heatmap(
    record: dict[str, Any], sites: Sequence[int], shown: range, title: str, path: Path
) -> None:
    """Draws a panel for each site: tokens by what they take. All panels have one scale.

    Args:
        record: From `reads_record`, with `weights` or `coefficients`.
        sites: Which sites, from 1.
        shown: Which tokens, from 0, a line each.
        title: Stands above it.
        path: The PNG file.
    """
    panels = [site for site in record["sites"] if site["site"] in sites]
    name = _measure(record)
    arrays = [np.array(panel[name])[shown.start : shown.stop] for panel in panels]
    widths = [1.2 + array.shape[1] for array in arrays]
    size = (2.4 + 0.24 * sum(widths), 1.9 + 0.17 * len(shown))
    figure, row = plt.subplots(
        1, len(panels), figsize=size, width_ratios=widths, layout="constrained", squeeze=False
    )
    signed = name == "coefficients"
    values = np.concatenate([array.ravel() for array in arrays])
    scale = scale_of(values, "coefficient" if signed else "α", signed=signed)
    names = [visible(record["tokens"][place]["text"]) for place in shown]
    for axes, panel, array in zip(row[0], panels, arrays, strict=True):
        sources = [SHORT.get(source, source) for source in panel["sources"]]
        picture = draw_map(axes, Map(array, names, sources), scale)
        axes.set_title(f"site {panel['site']}: {panel['feeds']}", size=8)
        axes.set_xticks(range(len(sources)), sources, rotation=90, size=7)
        axes.set_yticks([])
    row[0][0].set_yticks(range(len(shown)), names, size=7, family="monospace", parse_math=False)
    figure.supxlabel(
        OUTPUT if signed else "source: embedding, or the sub-layers that it sums", size=9
    )
    figure.suptitle(title, size=10, parse_math=False)
    figure.colorbar(picture, ax=row[0][-1], label=scale.measure, extend=scale.extend, aspect=40)
    save(figure, path)


def mean_heatmap(record: dict[str, Any], title: str, path: Path) -> None:
    """Draws sites by what they read, averaged over the tokens of the text, in the form of Figure 3.

    Args:
        record: From `reads_record`, with `weights` or `coefficients`.
        title: Stands above it.
        path: The PNG file.
    """
    name = _measure(record)
    means = [np.array(site[name]).mean(axis=0).tolist() for site in record["sites"]]
    if name == "coefficients":
        coefficient_heatmap(means, title, path)
        return
    diagnostics = {
        "sources": [["embedding"], *(site["sources"] for site in record["sites"])],
        "mean_weight": [None, *means],
    }
    depth_heatmap(diagnostics, title, path)


def _measure(record: dict[str, Any]) -> str:
    """Which of the two a record has."""
    return "coefficients" if "coefficients" in record["sites"][0] else "weights"


def visible(text: str) -> str:
    """A token as a label of an axis.

    White space is shown by signs, what the font does not have by its number, and a long token is
    cut.
    """
    has = get_font(findfont("monospace")).get_char_index
    marked = "".join(
        sign if has(ord(sign)) and sign.isprintable() else f"\\u{ord(sign):04x}"
        for sign in text.translate(MARKS)
    )
    return marked if len(marked) <= LONGEST else marked[: LONGEST - 1] + "…"
