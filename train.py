"""Train one run, or a sweep: `python train.py [group=choice] [key=value] …`; see README.md."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType


def stop_early(number: int, frame: FrameType | None) -> None:
    """A signal while torch is imported, and before a run has begun: a stop like any other."""
    name = signal.Signals(number).name
    os.write(2, f"{name}: stopped before anything was done; the same command starts it\n".encode())
    # STOPPED of lrattnres.training.signals. An exception might get lost inside an import.
    os._exit(75)


if __name__ == "__main__":  # before the imports below, which take seconds
    for early in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(early, stop_early)

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lrattnres.config import ConfigError, TrainConfig, defaults, parse
from lrattnres.config.checks import resolve
from lrattnres.distributed.ranks import placement
from lrattnres.entry import (
    folder_name,
    leave,
    loosened,
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

CONFIGS = Path(__file__).parent / "configs"
ConfigStore.instance().store(name="train_schema", node=defaults(TrainConfig))


def configured(tree: DictConfig) -> tuple[TrainConfig, list[str]]:
    """What the settings mean, with a name for the run. Raises ConfigError with every fault."""
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
    """Where a run of a sweep keeps its state; one that is refused has no name but its settings."""
    try:
        name = configured(tree)[0].name
    except (ConfigError, FolderError):
        name = folder_name(
            "refused-" + "-".join(word.lstrip("+") for word in HydraConfig.get().overrides.task)
        )
    return Path(tree.runs) / name


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(tree: DictConfig) -> None:
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        take_part(folder_of(tree), lambda: run(tree))
    else:
        leave(lambda: run(tree))


if __name__ == "__main__":
    refuse_early(sys.argv[1:])
    sys.argv[1:] = loosened(sys.argv[1:], CONFIGS)
    main()
