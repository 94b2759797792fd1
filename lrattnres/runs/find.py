"""Which checkpoint of which run a person means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lrattnres.config import ConfigError
from lrattnres.runs.checkpoint import Checkpoint, Checkpoints
from lrattnres.runs.folder import RunError, RunFolder


def find_checkpoint(
    run: str, step: int | None, say: Callable[[str], None]
) -> tuple[RunFolder, Checkpoint]:
    """The run folder and the checkpoint that a person names.

    Args:
        run: A run folder, or one of the folders under its `checkpoints`.
        step: Of the checkpoint; None: the newest whole one, or the one that `run` names.
        say: Gets a sentence for each checkpoint that is passed over.

    Raises:
        RunError: There is no run, or it has no checkpoint.
        CheckpointError: The checkpoint is damaged or missing.
        ConfigError: `step` and `run` name different ones.
    """
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
    checkpoints = Checkpoints(folder.checkpoints_path)
    if step is not None:
        return folder, checkpoints.at(step)
    newest = checkpoints.newest(say)
    if newest is None:
        raise RunError(
            f"{folder.checkpoints_path}: no whole checkpoint to evaluate; train the run first"
        )
    return folder, newest
