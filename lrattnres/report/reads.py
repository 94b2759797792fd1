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
LONGEST = 18  # characters of a token that are shown


def token_heatmap(
    record: dict[str, Any], sites: Sequence[int], shown: range, title: str, path: Path
) -> None:
    """A panel for each site, tokens by what they take; one scale for all.

    Args:
        record: of `reads_record`, with `weights` or `coefficients`.
        sites: which of its sites.
        shown: which of its tokens, a line each.
        title: stands above it.
        path: the PNG file.
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
    """Sites by what they read, averaged over the tokens of the text, in the form of Figure 3."""
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
    return "coefficients" if "coefficients" in record["sites"][0] else "weights"


def visible(text: str) -> str:
    """A token for an axis: white space by signs, what the font lacks by its number, and not too long."""
    has = get_font(findfont("monospace")).get_char_index
    marked = "".join(
        sign if has(ord(sign)) and sign.isprintable() else f"\\u{ord(sign):04x}"
        for sign in text.translate(MARKS)
    )
    return marked if len(marked) <= LONGEST else marked[: LONGEST - 1] + "…"
