"""Settings that Hydra composes from the configurations of the package and from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig

from lrattnres.config import ConfigError, TrainConfig, defaults, parse
from lrattnres.config.checks import resolve
from lrattnres.entry import leave, loosened, plain_settings, started_from

PACKAGE = Path(__file__).parents[1]
# Inside an installed package; beside it in a clone, installed with `pip install -e` or not at all.
CONFIGS = next(
    folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir()
)
TRAIN = "python train.py" if CONFIGS.parent != PACKAGE else "lrattnres train"  # in messages
TABLE1 = tuple(sorted(file.stem for file in (CONFIGS / "table1").glob("*.yaml")))


def own_configs(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The folder of `--config-dir`, if there is one, and the words without that option.

    Raises:
        ConfigError: it is no folder, or has a file that the packaged configurations have too,
            which Hydra would prefer without a word.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    found, rest = parser.parse_known_args(list(words))
    if found.config_dir is None:
        return [], rest
    folder = found.config_dir.absolute()
    if not folder.is_dir():
        raise ConfigError([f"--config-dir={found.config_dir}: no such folder"])
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.yaml"))
    twice = [str(file) for file in files if (CONFIGS / file).is_file()]
    if twice:
        names = ", ".join(twice)
        raise ConfigError(
            [f"--config-dir={found.config_dir}: {names}: is packaged already; write another name"]
        )
    return [folder], rest


def start(name: str, schema: type, task: Callable[[DictConfig], None]) -> None:
    """Runs a program of Hydra's: `task` with the tree that the command line makes of NAME.yaml.

    Args:
        name: of the configuration, whose first default is `NAME_schema`.
        schema: the dataclass that has its keys, their types and defaults.
        task: a function of a module, so that a job of a cluster can import it.
    """
    own: list[Path] = []

    def look() -> bool:
        own.extend(own_configs(sys.argv[1:])[0])
        return True

    leave(look)
    ConfigStore.instance().store(name=f"{name}_schema", node=defaults(schema))
    sys.argv[1:] = loosened(sys.argv[1:], CONFIGS, *own)
    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(task)()


def composed(words: Iterable[str], **instead: Any) -> TrainConfig:
    """The configuration that `lrattnres train WORDS` runs, checked as training checks it.

    Args:
        words: settings, choices of groups, and `--config-dir`.
        instead: values that take the place of the configuration's own.

    Raises:
        ConfigError, FolderError: there is no such configuration.
    """
    own, settings = own_configs(list(words))
    strange = [word for word in settings if "=" not in word]
    if strange:
        raise ConfigError([f"{', '.join(strange)}: must be key=value"])
    settings = loosened(settings, CONFIGS, *own)
    quoted = ",".join("'file://{}'".format(str(folder).replace("'", r"\'")) for folder in own)
    ConfigStore.instance().store(name="train_schema", node=defaults(TrainConfig))
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            tree = compose("train", [*settings, f"hydra.searchpath=[{quoted}]"])
    except HydraException as error:
        raise ConfigError([" ".join(str(error).split())]) from None
    return resolve(parse(TrainConfig, started_from(plain_settings(tree), settings) | instead))[0]
