"""Print the SLURM jobs of a sweep instead of submitting them.

    lrattnres submission '+table1=glob(*)' model.blocks=4 hydra.launcher.partition=gpu

The settings are those of `lrattnres train -m … cluster=slurm`. Hydra composes every run and its
launcher writes the batch file, as they would; only the call of `sbatch` is left out, so nothing of
SLURM needs to be installed.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, filter_overrides

from lrattnres.commands import HELP, train
from lrattnres.commands.composing import TRAIN
from lrattnres.entry import refuse_early

IMPLIED = ("-m", "--multirun", "cluster=slurm")


class Printed:
    """Stands for a job that was not submitted."""

    def results(self) -> list[JobReturn]:
        return [JobReturn(status=JobStatus.COMPLETED)]


def print_jobs(
    executor: Any, launcher: Any, overrides: list[list[str]], *rest: Any
) -> list[Printed]:
    """In the place of `submitit.AutoExecutor.map_array`."""
    slurm = executor._executor
    slurm.parameters["map_count"] = len(overrides)
    print(slurm._make_submission_file_text(slurm._submitit_command_str, "not submitted"))
    for number, settings in enumerate(overrides):
        words = (setting.removeprefix("++") for setting in filter_overrides(settings))
        print(f"{number}: {TRAIN} {' '.join(words)}")
    print(f"{len(overrides)} jobs, none of them submitted")
    return [Printed() for _ in overrides]


def main() -> None:
    words = [word for word in sys.argv[1:] if word not in IMPLIED]
    if HELP & set(words):
        print(str(__doc__).strip())
        return
    refuse_early(IMPLIED)  # without the launcher
    import submitit
    from submitit.slurm.slurm import SlurmExecutor

    SlurmExecutor.affinity = classmethod(lambda cls: 2)  # type: ignore[method-assign,assignment]
    submitit.AutoExecutor.map_array = print_jobs  # type: ignore[method-assign,assignment]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = ["-m", *words, "cluster=slurm", f"hydra.sweep.dir={folder}"]
        train.main()
