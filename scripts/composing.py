"""What scripts about a configuration share: the settings of train.py, composed and checked as train.py does it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from lrattnres.config import ConfigError, TrainConfig, defaults, parse
from lrattnres.config.checks import resolve
from lrattnres.entry import REFUSED, loosened, plain_settings, started_from
from lrattnres.exchange.folder import FolderError

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
TABLE1 = tuple(sorted(file.stem for file in (CONFIGS / "table1").glob("*.yaml")))


def composed(settings: Iterable[str], **instead: Any) -> TrainConfig:
    """The configuration that `python train.py SETTINGS` runs, with the values of `instead` in place of its own.

    Says what is wrong and exits with 2 where there is none.
    """
    settings = list(settings)
    strange = [word for word in settings if "=" not in word]
    if strange:
        print(f"{', '.join(strange)}: must be key=value", file=sys.stderr)
        sys.exit(REFUSED)
    ConfigStore.instance().store(name="train_schema", node=defaults(TrainConfig))
    try:
        with initialize_config_dir(str(CONFIGS.resolve()), version_base="1.3"):
            words = loosened(settings, CONFIGS)
            tree = compose("train", words)
        return resolve(parse(TrainConfig, started_from(plain_settings(tree), words) | instead))[0]
    except FolderError as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        sys.exit(REFUSED)
    except ConfigError as refusal:
        print(f"the configuration is not possible:\n{refusal}", file=sys.stderr)
        sys.exit(REFUSED)
