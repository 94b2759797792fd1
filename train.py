"""Train one run, or a sweep of them: `python train.py [group=choice] [key=value] …`; see README.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lrattnres.checks import resolve
from lrattnres.config import TrainConfig, defaults, parse
from lrattnres.entry import leave, loosened, run_name
from lrattnres.report.run import draw_training
from lrattnres.training.run import train

CONFIGS = Path(__file__).parent / "configs"
ConfigStore.instance().store(name="train_schema", node=defaults(TrainConfig))


def run(tree: DictConfig) -> bool:
    """One run; False if a signal stopped it."""
    values: Any = OmegaConf.to_container(tree, resolve=True)
    named = values["name"] != "???"
    config, notes = resolve(parse(TrainConfig, values if named else values | {"name": "unnamed"}))
    if not named:
        choices = HydraConfig.get()
        experiment = str(choices.runtime.choices.get("experiment") or "run")
        config.name = run_name(experiment, config, choices.overrides.task)
    folder, finished = train(config, notes)
    if finished:
        draw_training(folder)
    return finished


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(tree: DictConfig) -> None:
    leave(lambda: run(tree))


if __name__ == "__main__":
    sys.argv[1:] = loosened(sys.argv[1:], CONFIGS)
    main()
