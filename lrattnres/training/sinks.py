"""Where metrics go besides metrics.jsonl. A sink may fail; a run never fails with it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Protocol

from lrattnres.config import LoggerConfig, LoggerName
from lrattnres.runs.folder import RunFolder

Note = Callable[[str], None]
PATIENCE = 15.0  # seconds that a network may take at the start and at the end


class Sink(Protocol):
    def write(self, record: dict[str, Any]) -> None:
        """Takes one record of metrics.jsonl. Raises nothing."""

    def close(self) -> None:
        """The run is over. Raises nothing."""


class NullSink:
    """metrics.jsonl is enough."""

    def __init__(self, config: LoggerConfig, run: RunFolder, tree: Mapping[str, Any], note: Note):
        pass

    def write(self, record: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class WandbSink:
    """Weights & Biases.

    Without credentials or network it records in the run folder; after an error it is off.

    Args:
        config: Project and entity.
        run: Whose name and place it takes.
        tree: All settings, to be shown.
        note: Gets a line when it does not do what was asked, and another if it goes off later.
    """

    def __init__(self, config: LoggerConfig, run: RunFolder, tree: Mapping[str, Any], note: Note):
        self._note = note
        self._run: Any = None
        try:
            self._run = self._start(config, run, tree)
            # Steps are drawn by our own count: that of W&B would refuse the steps that a continued
            # run repeats.
            self._run.define_metric("*", step_metric="step")
        except ImportError:
            self._off("is not installed; write pip install lrattnres[wandb]")
        except Exception as error:  # a library of many moving parts must not stop a run
            self._off(f"did not start: {_first_line(error)}")

    def write(self, record: dict[str, Any]) -> None:
        if self._run is not None:
            try:
                self._run.log(record)
            except Exception as error:
                self._off(f"failed at step {record.get('step')}: {_first_line(error)}")

    def close(self) -> None:
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                self._off(f"failed at the end: {_first_line(error)}")
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
                reason = _first_line(error)
        started = wandb.init(mode="offline", **options)
        self._note(
            f"W&B records offline in {run.path / 'wandb'} ({reason}); `wandb sync` of a folder "
            "there uploads it later"
        )
        return started

    def _off(self, why: str) -> None:
        self._run = None
        self._note(f"W&B {why}. It is off for the rest of this start; metrics.jsonl has everything")


def run_id(run: RunFolder) -> str:
    """The same for every continuation, another for a run that is begun anew under the same name."""
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

    `tree` is the whole configuration, for a sink that shows it.
    """
    return SINKS[config.name](config, run, tree, note)


def _has_credentials(wandb: Any) -> bool:
    """An API key in the environment, netrc or W&B's own settings; no terminal is asked for one."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # before `login` had `prompt`
        return bool(wandb.api.api_key)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
