"""Count what depth routing costs, before anything is trained.

    lrattnres cost [grid=table1] [settings of training]

Counted from the plan (lrattnres/residual/cost.py): multiply-adds and the source cache a token,
parameters of the whole model. Percentages are of the plain transformer without embedding and head,
as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lrattnres.commands.composing import TABLE1, composed
from lrattnres.commands.running import command, table
from lrattnres.config import ConfigError, TrainConfig, option
from lrattnres.config.checks import DTYPES
from lrattnres.residual.cost import Cost, cost
from lrattnres.residual.router import VARIANTS

HEADS = (
    *("row", "residual", "N", "r", "added FLOPs", "reads", "projections"),
    *("parameters", "added", "source cache"),
)
DECIDED = ("model.residual=", "model.rank=", "model.blocks=")


class Grid(Enum):
    table1 = "table1"


@dataclass
class CostConfig:
    grid: Grid | None = option(
        "table1: every row of the paper's Table 1, at the size of the settings; null: one model",
        None,
    )


def priced(config: TrainConfig) -> tuple[Cost, int]:
    """The cost, and bytes of source cache a token."""
    price = cost(config.model, VARIANTS[config.model.residual].keys)
    return price, price.cache * DTYPES[config.precision].itemsize


def description(config: TrainConfig) -> str:
    """One configuration, a line a figure."""
    model, (price, cached) = config.model, priced(config)
    blocks = f", {model.blocks} blocks" if model.blocks else ", every sub-layer a source"
    blocks = blocks if price.cache else ""
    rank = f", rank {model.rank}" if model.rank else ""
    facts = {
        "model": f"{model.layers} blocks of width {model.dim}, {model.residual}{blocks}{rank}",
        "core": f"{price.core:,} multiply-adds a token",
        "besides": f"head {price.head:,}, attention {price.attention:,}",
        "reads": f"{price.routing:,}: scores {price.scores:,}, mixtures {price.mixtures:,}",
        "projections": f"{price.projection:,}",
        "added": f"{price.added_percent:.4f}% of the core",
        "training": f"{price.training_flops:,} FLOPs a token, all of it",
        "parameters": f"{price.model_parameters:,}, of them {price.parameters:,} of the routing",
        "cache": f"{cached:,} bytes of sources a token ({config.precision.name})",
    }
    return "\n".join(f"{name:<13}{value}" for name, value in facts.items())


def row(name: str, config: TrainConfig) -> tuple[str, ...]:
    """One line of the grid's table, under HEADS."""
    model, (price, cached) = config.model, priced(config)
    return (
        name[:2],
        model.residual,
        str(model.blocks or "full") if price.cache else "",
        str(model.rank or ""),
        f"{price.added_percent:.4f}%",
        *(f"{100 * part / price.core:.4f}%" for part in (price.routing, price.projection)),
        f"{price.model_parameters:,}",
        f"{price.parameters:,}",
        f"{cached:,} B",
    )


def run(config: CostConfig, words: list[str]) -> None:
    """The grid, or one configuration."""
    if config.grid is None:
        print(description(composed(words, name="cost", device="cpu")))
        return
    fixed = [word for word in words if word.lstrip("+").startswith(DECIDED)]
    if fixed:
        raise ConfigError([f"{', '.join(fixed)}: the rows of the grid decide that; leave it out"])
    rows = (
        row(name, composed([*words, f"+table1={name}"], name="cost", device="cpu"))
        for name in TABLE1
    )
    print(table([HEADS, *rows]))


def main() -> None:
    command(__doc__, CostConfig, run, training=True)
