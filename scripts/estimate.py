"""Memory and time of a run before it starts: `python scripts/estimate.py [settings of train.py] gpu=H100 gpus=8`.

For every activation-checkpointing mode: what each GPU holds, and how long a step takes at best. Memory is counted
(lrattnres/training/memory.py). Time is a sum of bounds by arithmetic, memory traffic of depth routing and traffic
between GPUs, with the share of each peak that is assumed in EFFICIENCY: a guess to plan with, not a measurement.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import NamedTuple

from composing import composed

from lrattnres.config import AC, Device, TrainConfig
from lrattnres.config.checks import DTYPES
from lrattnres.entry import REFUSED
from lrattnres.residual.cost import cost
from lrattnres.training.machine import DATA_SHEETS
from lrattnres.training.memory import GB, Memory, estimate_memory

EFFICIENCY = 0.4  # of each peak


class Gpu(NamedTuple):
    """From the data sheets: FLOP/s in dense bfloat16, bytes, bytes a second of its memory, and to other GPUs."""

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


def seconds(config: TrainConfig, gpu: Gpu, gpus: int) -> float:
    """Of one step."""
    price = cost(config.model)
    tokens = config.global_batch * config.model.context / gpus
    again = 1.0 if config.ac is AC.none else 4 / 3  # a second forward pass
    arithmetic = price.training_flops * again * tokens / gpu.flops
    size = DTYPES[config.precision].itemsize
    depth = (
        3 * again * price.added.mixing * size * tokens / gpu.bandwidth
    )  # every source read once a pass
    weights = price.model_parameters
    passes = -(-config.global_batch // (gpus * config.micro_batch))
    sent = (
        weights * passes * (2 * size + 4) * (gpus - 1) / gpus if gpus > 1 else 0
    )  # gathered twice, reduced in float32
    return (max(arithmetic, sent / gpu.link) + depth) / EFFICIENCY


def lines(config: TrainConfig, name: str, gpus: int) -> list[str]:
    gpu = GPUS[name]
    heads = [field.name for field in dataclasses.fields(Memory)]
    rows = [("ac", *heads, "total", "fits", "step")]
    for ac in AC:
        chosen = dataclasses.replace(config, ac=ac)
        memory = estimate_memory(chosen, gpus)
        parts = [f"{getattr(memory, head) / GB:.2f}" for head in heads]
        fits = "yes" if memory.total <= 0.95 * gpu.memory else "no"
        rows.append(
            (
                ac.name,
                *parts,
                f"{memory.total / GB:.2f}",
                fits,
                f"{seconds(chosen, gpu, gpus):.3g} s",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    price = cost(config.model)
    return [
        f"{gpus} x {name} ({gpu.memory / GB:.0f} GB), {price.training_flops * config.global_batch * config.model.context:.3g} "
        f"FLOPs a step of {config.global_batch} x {config.model.context} tokens, micro-batch {config.micro_batch}; GB a GPU:",
        *(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ),
        f"steps: {config.steps:,}; time at {EFFICIENCY:.0%} of the peaks; sources are part of the activations",
    ]


def main() -> None:
    own = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith(("gpu=", "gpus=")))
    settings = [word for word in sys.argv[1:] if not word.startswith(("gpu=", "gpus="))]
    name, gpus = own.get("gpu", "H100"), own.get("gpus", "1")
    if name not in GPUS or not gpus.isdigit() or gpus == "0":
        print(
            f"gpu={name} gpus={gpus}: write one of {', '.join(GPUS)}, and a number", file=sys.stderr
        )
        sys.exit(REFUSED)
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": gpus,
        "LOCAL_RANK": "0",
    }  # what is checked is one of so many processes
    config = composed(settings, name="estimate", device="cpu")
    print("\n".join(lines(dataclasses.replace(config, device=Device.cuda), name, int(gpus))))


if __name__ == "__main__":
    main()
