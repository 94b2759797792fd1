"""Train one run, or a sweep of them.

    lrattnres train [-m] [group=choice] [key=value] …

README.md tells more, docs/config.md lists the settings.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lrattnres.commands.composing import one_member, start
from lrattnres.config import ConfigError, TrainConfig, parse
from lrattnres.config.checks import resolve
from lrattnres.distributed.ranks import placement
from lrattnres.entry import (
    folder_name,
    leave,
    of_paper,
    plain_settings,
    refuse_early,
    run_name,
    started_from,
    take_part,
)
from lrattnres.exchange.folder import FolderError
from lrattnres.report.run import draw_training
from lrattnres.training.run import train


def configured(tree: DictConfig) -> tuple[TrainConfig, list[str]]:
    """What the settings mean, with a name for the run. Raises ConfigError with every error."""
    values = started_from(plain_settings(tree), HydraConfig.get().overrides.task)
    named = values["name"] != "???"
    config, notes = resolve(parse(TrainConfig, values if named else values | {"name": "unnamed"}))
    choices = HydraConfig.get()
    if not named:
        experiment = str(choices.runtime.choices.get("experiment") or "run")
        config.name = run_name(experiment, config, choices.overrides.task)
    row = choices.runtime.choices.get("table1")
    return config, [*([of_paper(str(row), config)] if row else []), *notes]


def run(tree: DictConfig) -> bool:
    """One run; False if a signal stopped it."""
    folder, finished = train(*configured(tree))
    if finished and placement()[0] == 0:
        draw_training(folder)
    return finished


def folder_of(tree: DictConfig) -> Path:
    """Where a run of a sweep keeps its state; a refused one has no name but its settings."""
    try:
        name = configured(tree)[0].name
    except (ConfigError, FolderError):
        words = (word.lstrip("+") for word in HydraConfig.get().overrides.task)
        name = folder_name("refused-" + "-".join(words))
    return Path(tree.runs) / name


def task(tree: DictConfig) -> None:
    """What Hydra calls, once for a run and once for each run of a sweep."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        with one_member():
            take_part(folder_of(tree), lambda: run(tree))
    else:
        leave(lambda: run(tree))


def main() -> None:
    refuse_early(sys.argv[1:])
    start("train", TrainConfig, task)
