"""What runs where: devices, arithmetic, kernels, and one run on many ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from lrattnres.config.schema import option


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class AttentionBackend(Enum):
    auto = "auto"
    flash3 = "flash3"
    flash = "flash"
    varlen = "varlen"
    flex = "flex"
    sdpa = "sdpa"


class Kernels(Enum):
    auto = "auto"
    triton = "triton"
    compiled = "compiled"
    reference = "reference"


class Loss(Enum):
    auto = "auto"
    whole = "whole"
    chunked = "chunked"


class Compile(Enum):
    off = "off"
    model = "model"
    regions = "regions"


class AC(Enum):
    none = "none"
    selective = "selective"
    full = "full"


class ParallelMode(Enum):
    auto = "auto"
    none = "none"
    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"


def cpu_threads(may_change: bool = False) -> Any:
    """The setting that most commands have."""
    return option(
        "CPU threads; null: torch's choice", None, at_least=1, at_most=4096, may_change=may_change
    )


@dataclass
class ParallelConfig:
    mode: ParallelMode = option(
        "how weights, gradients and moments lie on the ranks: none (one process), ddp (whole on "
        "each), fsdp (in as many shards as ranks), hsdp (in shard_degree shards); auto: none for "
        "one process, else fsdp",
        ParallelMode.auto,
        may_change=True,
    )
    shard_degree: int | None = option(
        "ranks that share one copy of the weights, for hsdp; null otherwise",
        None,
        at_least=1,
        may_change=True,
    )
    reshard: bool = option(
        "free gathered weights after the forward pass, and gather them once more",
        True,
        may_change=True,
    )
    prefetch: int = option(
        "units (pairs of sub-layers) whose weights are gathered ahead of time",
        1,
        at_least=0,
        may_change=True,
    )
    timeout: float = option(
        "seconds after which a rank that does not answer is given up",
        600.0,
        at_least=1,
        at_most=10**7,
        may_change=True,
    )


@dataclass
class ClusterConfig:
    requeue: bool = option(
        "when a signal stops a SLURM job: save, and put the job back into the queue",
        False,
        may_change=True,
    )
