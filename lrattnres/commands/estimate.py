"""Estimate memory and time of a run before it starts.

    lrattnres estimate gpu=H100 gpus=8 [settings of training]

For every activation-checkpointing mode: what each GPU holds, and how long a step takes at best.
Memory is counted (lrattnres/training/memory.py). Time is a sum of bounds by arithmetic, by memory
traffic of the residual path and by what GPUs send, with the share of each peak that is assumed in
EFFICIENCY: a guess to plan with, not a measurement.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import NamedTuple

from lrattnres.commands.composing import composed
from lrattnres.commands.running import command, table
from lrattnres.config import AC, ConfigError, Device, TrainConfig, option
from lrattnres.config.checks import DTYPES
from lrattnres.residual.cost import cost
from lrattnres.training.machine import DATA_SHEETS
from lrattnres.training.memory import GB, Memory, estimate_memory

EFFICIENCY = 0.4  # of each peak
FITS = 0.95  # of a GPU's memory: the rest is the driver's and the allocator's


class Gpu(NamedTuple):
    """From the data sheets.

    Attributes:
        flops: FLOP/s in dense bfloat16.
        memory: bytes.
        bandwidth: bytes a second of its memory.
        link: bytes a second to other GPUs.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float


GPUS = {
    "A100": Gpu(DATA_SHEETS["A100"], 80e9, 2.0e12, 300e9),
    "H100": Gpu(DATA_SHEETS["H100"], 80e9, 3.35e12, 450e9),
    "H200": Gpu(DATA_SHEETS["H200"], 141e9, 4.8e12, 450e9),
    "B200": Gpu(DATA_SHEETS["B200"], 180e9, 8.0e12, 900e9),
    "L40S": Gpu(DATA_SHEETS["L40S"], 48e9, 0.864e12, 32e9),
    "RTX4090": Gpu(DATA_SHEETS["RTX 4090"], 24e9, 1.008e12, 32e9),
}


@dataclass
class EstimateConfig:
    gpu: str = option(f"one of {', '.join(GPUS)}", "H100")
    gpus: int = option("how many of them, each with one rank", 1, at_least=1, at_most=2**20)


def seconds(config: TrainConfig, gpu: Gpu, gpus: int) -> float:
    """Of one step."""
    price = cost(config.model)
    tokens = config.global_batch * config.model.context / gpus
    again = 1.0 if config.ac is AC.none else 4 / 3  # a second forward pass
    arithmetic = price.training_flops * again * tokens / gpu.flops
    size = DTYPES[config.precision].itemsize
    # Every source is read once a pass.
    depth = 3 * again * price.added.mixing * size * tokens / gpu.bandwidth
    weights = price.model_parameters
    passes = -(-config.global_batch // (gpus * config.micro_batch))
    # Gathered twice, reduced in float32.
    sent = weights * passes * (2 * size + 4) * (gpus - 1) / gpus if gpus > 1 else 0
    return (max(arithmetic, sent / gpu.link) + depth) / EFFICIENCY


def description(config: TrainConfig, name: str, gpus: int) -> str:
    """The table over activation checkpointing, with what it is about."""
    gpu = GPUS[name]
    heads = [field.name for field in dataclasses.fields(Memory)]
    rows = [["ac", *heads, "total", "fits", "step"]]
    for ac in AC:
        chosen = dataclasses.replace(config, ac=ac)
        memory = estimate_memory(chosen, gpus)
        parts = [f"{getattr(memory, head) / GB:.2f}" for head in (*heads, "total")]
        fits = "yes" if memory.total <= FITS * gpu.memory else "no"
        rows.append([ac.name, *parts, fits, f"{seconds(chosen, gpu, gpus):.3g} s"])
    price = cost(config.model)
    flops = price.training_flops * config.global_batch * config.model.context
    return (
        f"{gpus} x {name} ({gpu.memory / GB:.0f} GB), {flops:.3g} FLOPs a step of "
        f"{config.global_batch} x {config.model.context} tokens, micro-batch {config.micro_batch}; "
        f"GB a GPU:\n{table(rows)}\nsteps: {config.steps:,}; time at {EFFICIENCY:.0%} of the "
        "peaks; sources are part of the activations"
    )


def run(config: EstimateConfig, words: list[str]) -> None:
    """One table, printed."""
    if config.gpu not in GPUS:
        raise ConfigError([f"gpu={config.gpu}: must be one of {', '.join(GPUS)}"])
    # What is checked is one of so many processes.
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(config.gpus), "LOCAL_RANK": "0"}
    training = dataclasses.replace(
        composed(words, name="estimate", device="cpu"), device=Device.cuda
    )
    print(description(training, config.gpu, config.gpus))


def main() -> None:
    command(__doc__, EstimateConfig, run, training=True)
