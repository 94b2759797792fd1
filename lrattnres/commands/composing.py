"""Settings that Hydra composes from the configurations of the package and from the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lrattnres.commands.words import ASIDE, check_name, check_words, flags_of, reason
from lrattnres.config import ConfigError, TrainConfig, defaults, parse
from lrattnres.config.checks import resolve
from lrattnres.entry import (
    FAULT,
    MemberFailed,
    leave,
    loosened,
    plain_settings,
    started_from,
)

PACKAGE = Path(__file__).parents[1]
# Inside an installed package; beside it in a clone, installed with `pip install -e` or not at all.
CONFIGS = next(
    folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir()
)
TRAIN = "python train.py" if CONFIGS.parent != PACKAGE else "lrattnres train"  # in messages
_failures: list[list[MemberFailed]] = []
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

    Words that Hydra cannot use are refused as all other settings are: one line each, exit code 2.

    Args:
        name: of the configuration, whose first default is `NAME_schema`.
        schema: the dataclass that has its keys, their types and defaults.
        task: a function of a module, so that a job of a cluster can import it.
    """
    # Flags come first, since Hydra takes no setting after one.
    words, overrides, folders = sys.argv[1:], list[str](), [CONFIGS]

    def check() -> bool:
        flags = flags_of(words)
        for word in flags.overrides:
            words.remove(word)
            overrides.append(word)
        if flags.config_path:
            folders[0] = Path(__file__).parent / flags.config_path  # as Hydra reads it
            if not folders[0].is_dir():
                raise ConfigError(
                    [
                        f"--config-path={flags.config_path}: no such folder; write "
                        "--config-dir=DIR to add your own configurations"
                    ]
                )
        folders.extend(own_configs(words)[0])
        if not any(getattr(flags, name) for name in ASIDE):
            check_name(flags.config_name or name, folders)
            check_words(overrides, schema, folders, flags.multirun)
        return True

    leave(check)
    ConfigStore.instance().store(name=f"{name}_schema", node=defaults(schema))
    sys.argv[1:] = [*words, *loosened(overrides, *folders)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises its errors, and prints none
    try:
        with members_here() as failures:
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(task)()
    except MemberFailed as failure:  # of a job elsewhere
        failures.append(failure)
    except Exception as error:
        if (line := reason(error, overrides, task)) is None:
            raise
        leave(partial(_refuse, line))
    if failures:
        print("\n".join(map(str, failures)), file=sys.stderr)
        sys.exit(FAULT)


def _refuse(line: str) -> NoReturn:
    raise ConfigError([line])


@contextmanager
def members_here() -> Iterator[list[MemberFailed]]:
    """A list of what failed in the runs of a sweep that this process makes; see `one_member`."""
    _failures.append([])
    try:
        yield _failures[-1]
    finally:
        _failures.pop()


@contextmanager
def one_member() -> Iterator[None]:
    """Around a run of a sweep: the process that began the sweep keeps its failure until all ended.

    Hydra would print a traceback of it. A job elsewhere can only raise it.
    """
    try:
        yield
    except MemberFailed as failure:
        if not _failures:
            raise
        _failures[-1].append(failure)


def composed(words: Iterable[str], **instead: Any) -> TrainConfig:
    """The configuration that `lrattnres train WORDS` runs, checked as training checks it.

    Args:
        words: settings, choices of groups, and `--config-dir`.
        instead: values that take the place of the configuration's own.

    Raises:
        ConfigError, FolderError: there is no such configuration.
    """
    own, given = own_configs(list(words))
    check_words(given, TrainConfig, [CONFIGS, *own], many=False)
    settings = loosened(given, CONFIGS, *own)
    quoted = ",".join("'file://{}'".format(str(folder).replace("'", r"\'")) for folder in own)
    ConfigStore.instance().store(name="train_schema", node=defaults(TrainConfig))
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            tree = compose("train", [*settings, f"hydra.searchpath=[{quoted}]"])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([reason(error, given, composed) or str(error)]) from None
    return resolve(parse(TrainConfig, started_from(plain_settings(tree), settings) | instead))[0]
