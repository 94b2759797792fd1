"""Count what a residual path costs, before anything is trained.

    lrattnres cost [grid=table1 | paths=all] [settings of training]

Counted by the path itself (lrattnres/residual/cost.py): multiply-adds, carried values a token and
parameters of the model. Percentages are of the plain transformer without embedding and head,
as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lrattnres.commands.composing import TABLE1, composed
from lrattnres.commands.running import command, table
from lrattnres.config import ConfigError, TrainConfig, option
from lrattnres.config.checks import DTYPES
from lrattnres.residual.base import path_of, paths
from lrattnres.residual.cost import Cost, cost
from lrattnres.residual.plan import named

HEADS = (
    *("row", "residual", "N", "r", "added FLOPs", "reads", "projections"),
    *("parameters", "added", "carried"),
)
DECIDED = ("model.residual=", "model.rank=", "model.blocks=")


class Grid(Enum):
    table1 = "table1"


class Paths(Enum):
    all = "all"


@dataclass
class CostConfig:
    grid: Grid | None = option(
        "table1: every row of the paper's Table 1, at the size of the settings; null: one model",
        None,
    )
    paths: Paths | None = option(
        "all: every residual path with its own defaults, at the size, rank and blocks of the "
        "settings; null: one",
        None,
    )


def priced(config: TrainConfig) -> tuple[Cost, int]:
    """The cost, and bytes a token that the residual path carries."""
    price = cost(config.model)
    return price, price.added.carried * DTYPES[config.precision].itemsize


def description(config: TrainConfig) -> str:
    """One configuration, a line a figure."""
    model, (price, cached) = config.model, priced(config)
    facts = {
        "model": f"{model.layers} blocks of width {model.dim}, {path_of(model).description(model)}",
        "core": f"{price.core:,} multiply-adds a token",
        "besides": f"head {price.head:,}, attention {price.attention:,}",
        "mixing": f"{price.added.mixing:,}",
        "projections": f"{price.added.projections:,}",
        "added": f"{price.added_percent:.4f}% of the core",
        "training": f"{price.training_flops:,} FLOPs a token, all of it",
        "parameters": (
            f"{price.model_parameters:,}, of them {price.added.parameters:,} of the residual path"
        ),
        "carried": f"{cached:,} bytes a token at most ({config.precision.name})",
    }
    return "\n".join(f"{name:<13}{value}" for name, value in facts.items())


def row(name: str, config: TrainConfig) -> tuple[str, ...]:
    """One line of a table, under HEADS."""
    model, (price, cached) = config.model, priced(config)
    return (
        name,
        model.residual,
        named(model.blocks) if path_of(model).attends else "",
        str(model.rank or ""),
        f"{price.added_percent:.4f}%",
        *(f"{100 * part / price.core:.4f}%" for part in price.added[1:3]),
        f"{price.model_parameters:,}",
        f"{price.added.parameters:,}",
        f"{cached:,} B",
    )


def run(config: CostConfig, words: list[str]) -> None:
    """The grid, every path, or one configuration."""
    if config.grid is not None and config.paths is not None:
        raise ConfigError(["grid=table1 paths=all: they are two tables; write one of them"])
    heads = HEADS
    if config.paths is not None:
        heads = ("start", *HEADS[1:])
        rows = [path_row(name, words) for name in paths()]
    elif config.grid is not None:
        refuse(words, DECIDED, "the rows of the grid decide that")
        rows = [
            row(name[:2], composed([*words, f"+table1={name}"], name="cost", device="cpu"))
            for name in TABLE1
        ]
    else:
        print(description(composed(words, name="cost", device="cpu")))
        return
    print(table([heads, *rows]))


def path_row(name: str, words: list[str]) -> tuple[str, ...]:
    """The line of a residual path; the first column says how its start is to the baseline's."""
    refuse(words, ("model.residual=", "path=", "model.path."), "every path has a row of its own")
    config = composed([*words, f"model.residual={name}"], name="cost", device="cpu")
    return row(paths()[name].start, config)


def refuse(words: list[str], decided: tuple[str, ...], why: str) -> None:
    """Raises ConfigError if one of the settings is among those that a table decides."""
    if fixed := [word for word in words if word.lstrip("+").startswith(decided)]:
        raise ConfigError([f"{', '.join(fixed)}: {why}; leave it out"])


def main() -> None:
    command(__doc__, CostConfig, run, training=True)
