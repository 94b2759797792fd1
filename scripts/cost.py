"""What depth routing costs, before anything is trained: `python scripts/cost.py [settings of train.py]`, one configuration;
with `grid=table1` every row of the paper's Table 1, at the size of those settings.

Counted from the plan (lrattnres/residual/cost.py): multiply-adds and the source cache a token, parameters of the whole model.
Percentages are of the plain transformer without embedding and head, as in the paper.
"""

from __future__ import annotations

import sys

from composing import TABLE1, composed

from lrattnres.config import TrainConfig
from lrattnres.config.checks import DTYPES
from lrattnres.entry import REFUSED
from lrattnres.residual.base import path_of
from lrattnres.residual.cost import Cost, cost

HEADS = (
    "row",
    "residual",
    "N",
    "r",
    "added FLOPs",
    "reads",
    "projections",
    "parameters",
    "added",
    "carried",
)


def priced(config: TrainConfig) -> tuple[Cost, int]:
    """The cost, and bytes a token that the residual path carries."""
    price = cost(config.model)
    return price, price.added.carried * DTYPES[config.precision].itemsize


def description(config: TrainConfig) -> str:
    """One configuration, a line a figure."""
    model, (price, cached) = config.model, priced(config)
    path = path_of(model).description(model)
    facts = {
        "model": f"{model.layers} blocks of width {model.dim}, {path}",
        "core": f"{price.core:,} multiply-adds a token",
        "besides": f"head {price.head:,}, attention {price.attention:,}",
        "mixing": f"{price.added.mixing:,}",
        "projections": f"{price.added.projections:,}",
        "added": f"{price.added_percent:.4f}% of the core",
        "training": f"{price.training_flops:,} FLOPs a token, all of it",
        "parameters": f"{price.model_parameters:,}, of them {price.added.parameters:,} of the residual path",
        "carried": f"{cached:,} bytes a token at most ({config.precision.name})",
    }
    return "\n".join(f"{name:<13}{value}" for name, value in facts.items())


def row(name: str, config: TrainConfig) -> tuple[str, ...]:
    """One line of the grid's table, under HEADS."""
    model, (price, cached) = config.model, priced(config)
    blocks = str(model.blocks or "full") if path_of(model).attends else ""
    parts = (price.added.mixing, price.added.projections)
    share = [f"{100 * part / price.core:.4f}%" for part in parts]
    counts = (f"{price.model_parameters:,}", f"{price.added.parameters:,}", f"{cached:,} B")
    return (
        name[:2],
        model.residual,
        blocks,
        str(model.rank or ""),
        f"{price.added_percent:.4f}%",
        *share,
        *counts,
    )


def main() -> None:
    grid = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith("grid=")]
    settings = [word for word in sys.argv[1:] if not word.startswith("grid=")]
    if grid not in ([], ["table1"]):
        print(f"grid={','.join(grid)}: write grid=table1, or leave it out", file=sys.stderr)
        sys.exit(REFUSED)
    fixed = [
        word
        for word in settings
        if grid and word.lstrip("+").startswith(("model.residual=", "model.rank=", "model.blocks="))
    ]
    if fixed:
        print(
            f"{', '.join(fixed)}: the rows of the grid decide that; leave it out", file=sys.stderr
        )
        sys.exit(REFUSED)
    if not grid:
        print(description(composed(settings, name="cost", device="cpu")))
        return
    rows = [
        HEADS,
        *(
            row(name, composed([*settings, f"+table1={name}"], name="cost", device="cpu"))
            for name in TABLE1
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))


if __name__ == "__main__":
    main()
