"""Where metrics go besides metrics.jsonl. A sink may fail; the run does not fail with it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Protocol

from lrattnres.config import LoggerConfig, LoggerName
from lrattnres.runs.errors import first_line
from lrattnres.runs.folder import RunFolder

Note = Callable[[str], None]
PATIENCE = 15.0  # seconds that a network may take at the start and at the end


class Sink(Protocol):
    """Takes the records of a run."""

    def write(self, record: dict[str, Any]) -> None:
        """Takes one record of metrics.jsonl. Raises nothing."""

    def close(self) -> None:
        """Is called when the run ends. Raises nothing."""


class NullSink:
    """Does nothing: metrics.jsonl is enough."""

    def __init__(self, config: LoggerConfig, run: RunFolder, tree: Mapping[str, Any], note: Note):
        pass

    def write(self, record: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class WandbSink:
    """Sends the records to Weights & Biases.

    Without credentials or network it records in the run folder. After an error it is off.
    """

    def __init__(self, config: LoggerConfig, run: RunFolder, tree: Mapping[str, Any], note: Note):
        """Starts the W&B run.

        Args:
            config: Project and entity.
            run: Gives the name, and the folder for the files of W&B.
            tree: All settings, to be shown.
            note: Gets a line when W&B does not do what was asked, and a line if it goes off later.
        """
        self._note = note
        self._run: Any = None
        try:
            self._run = self._start(config, run, tree)
            # Steps are shown by our own count. W&B's count would refuse the steps that a continued
            # run repeats.
            self._run.define_metric("*", step_metric="step")
        except ImportError:
            self._off("is not installed; write pip install lrattnres[wandb]")
        except Exception as error:  # whatever the library raises must not stop a run
            self._off(f"did not start: {first_line(error)}")

    def write(self, record: dict[str, Any]) -> None:
        if self._run is not None:
            try:
                self._run.log(record)
            except Exception as error:
                self._off(f"failed at step {record.get('step')}: {first_line(error)}")

    def close(self) -> None:
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                self._off(f"failed at the end: {first_line(error)}")
            self._run = None

    def _start(self, config: LoggerConfig, run: RunFolder, tree: Mapping[str, Any]) -> Any:
        wandb: Any = importlib.import_module("wandb")
        quiet = {
            "silent": True,
            "console": "off",
            "init_timeout": PATIENCE,
            "finish_timeout": PATIENCE,
        }
        known = {key: value for key, value in quiet.items() if key in wandb.Settings.model_fields}
        wandb.setup(settings=wandb.Settings(**known))
        options = {
            "project": config.project,
            "entity": config.entity,
            "name": run.path.name,
            "id": run_id(run),
            "resume": "allow",
            "dir": run.path,
            "config": dict(tree),
            "settings": wandb.Settings(**known),
        }
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_credentials(wandb) else "offline")
        reason = "no API key was found" if mode == "offline" else None
        if mode != "offline":
            try:
                return wandb.init(mode=mode, **options)
            except Exception as error:
                wandb.teardown()  # the failed run still occupies its id
                reason = first_line(error)
        started = wandb.init(mode="offline", **options)
        self._note(
            f"W&B records offline in {run.path / 'wandb'} ({reason}); `wandb sync` of a folder "
            "there uploads it later"
        )
        return started

    def _off(self, why: str) -> None:
        """Switches W&B off, and says why."""
        self._run = None
        self._note(f"W&B {why}. It is off for the rest of this start; metrics.jsonl has everything")


def run_id(run: RunFolder) -> str:
    """The W&B id of a run: the same for every continuation, another for a run begun anew."""
    first = run.starts()[0]["time"] if run.starts() else ""
    return sha256(f"{run.path.name}\n{first}".encode()).hexdigest()[:16]


SINKS: dict[LoggerName, Callable[[LoggerConfig, RunFolder, Mapping[str, Any], Note], Sink]] = {
    LoggerName.none: NullSink,
    LoggerName.wandb: WandbSink,
}


def build_sink(
    config: LoggerConfig, run: RunFolder, tree: Mapping[str, Any], note: Note = print
) -> Sink:
    """The sink that the settings name.

    Args:
        config: Names it.
        run: Folder of the run.
        tree: The whole configuration, for a sink that shows it.
        note: Gets lines for the user.
    """
    return SINKS[config.name](config, run, tree, note)


def _has_credentials(wandb: Any) -> bool:
    """Whether W&B has an API key in the environment, netrc or its settings; it asks nobody."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # before `login` had `prompt`
        return bool(wandb.api.api_key)
