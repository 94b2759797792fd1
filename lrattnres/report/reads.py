"""Where the tokens of one text read, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.font_manager import findfont, get_font

from lrattnres.report.plots import depth_heatmap, save

MARKS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})
SHORT = {"embedding": "emb"}
LONGEST = 18  # characters of a token that are shown


def token_heatmap(
    record: dict[str, Any], sites: Sequence[int], shown: range, title: str, path: Path
) -> None:
    """A panel for each of `sites`: α of the tokens `shown`, one a row, over the sources of that site; one scale for all."""
    panels = [site for site in record["sites"] if site["site"] in sites]
    weights = [np.array(panel["weights"])[shown.start : shown.stop] for panel in panels]
    widths = [1.2 + array.shape[1] for array in weights]
    size = (2.4 + 0.24 * sum(widths), 1.9 + 0.17 * len(shown))
    figure, row = plt.subplots(
        1, len(panels), figsize=size, width_ratios=widths, layout="constrained", squeeze=False
    )
    highest = max(array.max() for array in weights)
    for axes, panel, array in zip(row[0], panels, weights, strict=True):
        picture = axes.imshow(
            array, cmap="magma", vmin=0, vmax=highest, aspect="auto", interpolation="nearest"
        )
        axes.set_title(f"site {panel['site']}: {panel['feeds']}", size=8)
        axes.set_xticks(
            range(array.shape[1]),
            [SHORT.get(name, name) for name in panel["sources"]],
            rotation=90,
            size=7,
        )
        axes.set_yticks([])
    names = [visible(record["tokens"][place]["text"]) for place in shown]
    row[0][0].set_yticks(range(len(shown)), names, size=7, family="monospace", parse_math=False)
    figure.supxlabel("source: embedding, or the sub-layers that it sums", size=9)
    figure.suptitle(title, size=10, parse_math=False)
    figure.colorbar(picture, ax=row[0][-1], label="α", aspect=40)
    save(figure, path)


def mean_heatmap(record: dict[str, Any], title: str, path: Path) -> None:
    """Sites by sources: α averaged over the tokens of the text, in the form of the papers' heat map."""
    means = [np.array(site["weights"]).mean(axis=0).tolist() for site in record["sites"]]
    diagnostics = {
        "sources": [["embedding"], *(site["sources"] for site in record["sites"])],
        "mean_weight": [None, *means],
    }
    depth_heatmap(diagnostics, title, path)


def visible(text: str) -> str:
    """A token for an axis: white space by signs, what the font lacks by its number, and not too long."""
    has = get_font(findfont("monospace")).get_char_index
    marked = "".join(
        sign if has(ord(sign)) and sign.isprintable() else f"\\u{ord(sign):04x}"
        for sign in text.translate(MARKS)
    )
    return marked if len(marked) <= LONGEST else marked[: LONGEST - 1] + "…"
