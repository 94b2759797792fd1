"""What `run=` names: a run, one checkpoint of it, or an exported or converted folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lrattnres.config import ConfigError
from lrattnres.exchange.folder import Exported, is_exported, read_exported
from lrattnres.runs.checkpoint import Checkpoint, CheckpointError, Checkpoints
from lrattnres.runs.folder import RunError, RunFolder

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """Where the weights lie that are meant.

    Attributes:
        folder: The run, or the exported or converted folder as far as it has the files of one.
        step: The checkpoint of the run; None: the newest one.
        exported: What an exported or converted folder says of itself; None for a run.
    """

    folder: RunFolder
    step: int | None = None
    exported: Exported | None = None

    def take(
        self,
        load: Callable[[Checkpoint | Exported], T],
        *,
        strict: bool,
        say: Callable[[str], None],
    ) -> tuple[T, Checkpoint | Exported, list[int]]:
        """What `load` makes of the weights.

        A training that goes on beside this may remove the newest checkpoint while it is read: the
        next one is taken then.

        Args:
            load: Reads the weights.
            strict: Whether a damaged newest checkpoint is an error; else the newest whole one is
                taken instead.
            say: Gets a line for each checkpoint that is passed over.

        Returns:
            What `load` returned; what it was given; and the steps of newer, damaged checkpoints
            that were passed over.

        Raises:
            RunError: There is no whole checkpoint.
            CheckpointError: The checkpoint is damaged, not there, or of another model.
            FolderError: The same for an exported or converted folder.
        """
        if self.exported is not None:
            return load(self.exported), self.exported, []
        checkpoints, passed_over = Checkpoints(self.folder.checkpoints_path), list[int]()
        if self.step is not None:
            checkpoint = checkpoints.at(self.step)
            return load(checkpoint), checkpoint, []
        while steps := [step for step in checkpoints.steps() if step not in passed_over]:
            step, whole = steps[-1], False
            try:
                checkpoint = checkpoints.at(step)
                whole = True
                return load(checkpoint), checkpoint, passed_over
            except CheckpointError as error:
                if step not in checkpoints.steps():
                    say(f"{self.folder.checkpoints_path}: step {step} was removed meanwhile")
                    continue
                if whole:
                    raise
                if strict:
                    raise CheckpointError(f"{error}; {_remedy(steps[:-1])}") from error
                say(f"{error}; passed over")
                passed_over.append(step)
        raise RunError(
            f"{self.folder.checkpoints_path}: no whole checkpoint to evaluate; train the run first"
        )


def _remedy(earlier: list[int]) -> str:
    other = f"write step={earlier[-1]} for the one before it, or " if earlier else ""
    return f"it is the newest checkpoint; {other}restore it"


def find_source(run: str, step: int | None) -> Source:
    """The run or the folder that `run=` and `step=` name.

    Args:
        run: A run folder, a folder under its `checkpoints`, or an exported or converted folder.
        step: The checkpoint; None: the newest one.

    Raises:
        RunError: `run` is none of these.
        FolderError: It is an exported or converted folder, but not one that can be read.
        ConfigError: `run` and `step` name different checkpoints.
    """
    path = Path(run)
    if not is_exported(path):
        return find_run(run, step)
    exported = read_exported(path)
    if step not in (None, exported.step):
        raise ConfigError(
            [f"step={step}: run={path} was exported at step {exported.step}; leave step out"]
        )
    return Source(RunFolder(path), exported=exported)


def find_run(run: str, step: int | None) -> Source:
    """The same, for a run or one of its checkpoints alone."""
    path = Path(run)
    if path.parent.name == "checkpoints" and path.name.removeprefix("step_").isdigit():
        named = int(path.name.removeprefix("step_"))
        if step not in (None, named):
            raise ConfigError(
                [f"step={step}: run={path} is the checkpoint of step {named}; leave step out"]
            )
        path, step = path.parent.parent, named
    if not path.is_dir():
        raise RunError(
            f"run={run}: no such folder; write run=RUNS/NAME, the folder that training left"
        )
    folder = RunFolder(path)
    RunFolder.read_config(path)
    return Source(folder, step)
