"""Prints the SLURM jobs of a sweep instead of submitting them; nothing of SLURM needs to be installed.

    python scripts/submission.py '+table1=glob(*)' model.blocks=4 hydra.launcher.partition=gpu

takes the settings of `python train.py -m … cluster=slurm`. Hydra composes every run and its launcher writes the batch
file, as they would; only the call of `sbatch` is left out.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import submitit
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from submitit.slurm.slurm import SlurmExecutor

import train
from lrattnres.entry import loosened


class Printed:
    """Stands for a job that was not submitted."""

    def results(self) -> list[JobReturn]:
        return [JobReturn(status=JobStatus.COMPLETED)]


def print_jobs(
    executor: submitit.AutoExecutor, launcher: Any, overrides: list[list[str]], *rest: Any
) -> list[Printed]:
    """In the place of `AutoExecutor.map_array`."""
    slurm: Any = executor._executor
    slurm.parameters["map_count"] = len(overrides)
    print(slurm._make_submission_file_text(slurm._submitit_command_str, "not submitted"))
    for number, settings in enumerate(overrides):
        print(
            f"{number}: python train.py {' '.join(setting.removeprefix('++') for setting in filter_overrides(settings))}"
        )
    print(f"{len(overrides)} jobs, none of them submitted")
    return [Printed() for _ in overrides]


def main() -> None:
    SlurmExecutor.affinity = classmethod(lambda cls: 2)  # type: ignore[method-assign,assignment]
    submitit.AutoExecutor.map_array = print_jobs  # type: ignore[method-assign,assignment]
    settings = loosened(
        (word for word in sys.argv[1:] if word not in ("-m", "--multirun", "cluster=slurm")),
        train.CONFIGS,
    )
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = [
            f"--config-path={train.CONFIGS}",
            "-m",
            *settings,
            "cluster=slurm",
            f"hydra.sweep.dir={folder}",
        ]
        train.main()


if __name__ == "__main__":
    main()
