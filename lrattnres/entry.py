"""What train.py and eval.py share: how they take arguments, and how they leave."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path

from lrattnres.config import ConfigError, TrainConfig, fields_of
from lrattnres.data.errors import DataError
from lrattnres.depth.router import VARIANTS
from lrattnres.ranks import Elsewhere
from lrattnres.runs.checkpoint import CheckpointError
from lrattnres.runs.folder import RunError
from lrattnres.training.signals import STOPPED
from lrattnres.training.trainer import TrainingError

FINISHED, REFUSED, BROKEN_OFF = 0, 2, 3


def loosened(arguments: Iterable[str], configs: Path) -> list[str]:
    """Command-line settings as Hydra's `++key=value`, so that an unknown key reaches the schema's own check.

    Hydra stops at the first unknown key and proposes to add it; the schema names all of them, and what was meant.
    Choices of groups (the folders of `configs`) stay as they are.
    """
    groups = {folder.name for folder in configs.iterdir() if folder.is_dir()}
    setting = re.compile(r"(?!hydra\.)([A-Za-z_][\w.]*)=")
    return [
        "++" + argument if (match := setting.match(argument)) and match[1] not in groups else argument for argument in arguments
    ]


def leave(run: Callable[[], bool]) -> None:
    """Runs to the end and exits: 0 finished, 2 refused before anything was done, 3 broken off (it diverged, or the disk
    is full), 75 stopped by a signal and saved. Anything else is a fault of ours, with its traceback, and 1.
    """
    try:
        code = FINISHED if run() else STOPPED
    except (ConfigError, DataError, RunError, CheckpointError) as refusal:
        heading = "the configuration is not possible:\n" if isinstance(refusal, ConfigError) else "refused: "
        print(f"{heading}{refusal}", file=sys.stderr)
        code = REFUSED
    except TrainingError as failure:
        print(f"broken off: {failure}", file=sys.stderr)
        code = BROKEN_OFF
    except Elsewhere:
        code = BROKEN_OFF
    if code != FINISHED:
        sys.exit(code)


def run_name(experiment: str, config: TrainConfig, overrides: Iterable[str]) -> str:
    """The name of a run's folder: experiment, residual path, and every other choice of the command line, sorted.

    Choices on which no result depends do not count, so that they can change when a run is continued.
    """
    model = config.model
    blocks = f"N{model.blocks}" if model.blocks else "full"
    parts = [experiment, model.residual]
    parts += [model.routing.name] if model.routing else []
    parts += [blocks] if VARIANTS[model.residual].keys else []
    parts += [f"r{model.rank}"] if model.rank else []
    ignored = {"experiment", "logger", "name", "model.residual", "model.routing", "model.blocks", "model.rank"}
    ignored |= {key for key, (_, metadata) in fields_of(TrainConfig).items() if metadata["may_change"]}
    choices = dict(override.lstrip("+~").partition("=")[::2] for override in overrides)
    parts += [f"{key}={choices[key]}" for key in sorted(choices) if key not in ignored]
    name = re.sub(r"[^\w.=+-]", "_", "-".join(parts))
    return name if len(name) <= 150 else f"{name[:130]}-{blake2b(name.encode(), digest_size=8).hexdigest()}"
