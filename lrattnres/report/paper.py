"""The figures that the papers print, and which run is which row of them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

DIM = 1024  # of the paper's model: its ranks are scaled with the width
HERE = Path(__file__).parent


@dataclass(frozen=True)
class PaperRow:
    """A row of Table 1 of the low-rank paper. `added_flops_percent` and `val_loss` are texts, as
    they are printed.
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
    """A row of its Table 2; every one is of full routing, or of none."""

    method: str
    residual: str
    rank: int | None
    average_gradient_norm: str


@dataclass(frozen=True)
class Sharpness:
    """The largest α of a site, averaged over tokens and sites, that the Delta paper states for two
    block models.
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
    """A rank at width `dim` as a rank at the paper's width: r·1024/d, exact."""
    return None if rank is None else Fraction(rank * DIM, dim)


def row_of(choice: Mapping[str, Any], dim: int) -> PaperRow | None:
    """The row that a residual path is, by `residual`, `blocks` (None: full) and `rank`; None if the
    paper has no such row.
    """
    key = (choice["residual"], choice["blocks"], paper_rank(choice["rank"], dim))
    return next((row for row in TABLE1 if (row.residual, row.blocks, row.rank) == key), None)
