"""The figures that the papers print, and which run is which row of them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

DIM = 1024  # width of the paper's model; its ranks are scaled with the width
HERE = Path(__file__).parent


@dataclass(frozen=True)
class PaperRow:
    """A row of Table 1 of the low-rank paper.

    Attributes:
        row: Its number, as a text.
        method: Its name in the paper.
        residual: The residual path here.
        blocks: Number of depth blocks; None: full, or no routing.
        rank: Width of a key at the paper's width; None: not used.
        added_flops_percent: As it is printed.
        val_loss: Held-out loss in nats per token, as it is printed.
    """

    row: str
    method: str
    residual: str
    blocks: int | None
    rank: int | None
    added_flops_percent: str
    val_loss: str


@dataclass(frozen=True)
class PaperNorm:
    """A row of Table 2 of the low-rank paper; each is of full routing, or of none.

    Attributes:
        method, residual, rank: As in `PaperRow`.
        average_gradient_norm: As it is printed.
    """

    method: str
    residual: str
    rank: int | None
    average_gradient_norm: str


@dataclass(frozen=True)
class Sharpness:
    """What the Delta paper states for a model with depth blocks.

    Attributes:
        method: Its name in the paper.
        average: The largest α of a site, averaged over tokens and sites.
    """

    method: str
    average: float


def _read(name: str) -> list[dict[str, Any]]:
    whole = ("blocks", "rank")
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return [
            {
                key: (int(value) if value else None) if key in whole else value
                for key, value in row.items()
            }
            for row in csv.DictReader(file)
        ]


TABLE1 = [PaperRow(**row) for row in _read("paper_table1.csv")]
TABLE2 = [PaperNorm(**row) for row in _read("paper_table2.csv")]
SHARPNESS = [Sharpness("Delta Block", 0.62), Sharpness("AttnRes", 0.35)]


def paper_rank(rank: int | None, dim: int) -> Fraction | None:
    """A rank at width `dim` as a rank at the paper's width: r·1024/d, exactly."""
    return None if rank is None else Fraction(rank * DIM, dim)


def row_of(choice: Mapping[str, Any], dim: int) -> PaperRow | None:
    """The row of Table 1 that a residual path is; None if there is no such row.

    Args:
        choice: `residual`, `blocks` (None: full) and `rank`.
        dim: Width of the model.
    """
    key = (choice["residual"], choice["blocks"], paper_rank(choice["rank"], dim))
    return next((row for row in TABLE1 if (row.residual, row.blocks, row.rank) == key), None)
