"""Registers, spills and instructions of every kernel that a model would launch.

    python bench/kernel_report.py --blocks 8 --rank 32 --capability 90 --json report.json
    python bench/kernel_report.py --streams 4

The kernels are compiled here, for a GPU that need not be in this machine. One line for each kernel
of each operator: what the operator reads, registers, spilled bytes, shared memory, and warp
instructions for each width of a value (d numbers of two bytes) that must be moved for a token.
With --streams, the kernels of a site of hyper-connections: those of hc and those of mhc.
"""

from __future__ import annotations

from typing import Any

import common

from lrattnres.kernels.launch import Launch
from lrattnres.kernels.machine_code import inspect, launches, stream_launches
from lrattnres.residual.fused.schedule import Step, backward_traffic, forward_traffic


def report(
    step: Step, dim: int, rank: int, separate: bool, capability: int
) -> list[dict[str, Any]]:
    """Prints and returns a record for each kernel of an operator.

    Args:
        step: The operator.
        dim: d, width of a value.
        rank: r, width of a key.
        separate: Whether keys are tensors of their own.
        capability: Compute capability without the dot, such as 90.
    """
    moved = {
        "read_forward": forward_traffic(step, dim, rank, separate),
        "read_backward": backward_traffic(step, dim, rank, separate),
    }
    records = []
    for launch in launches(
        step.owned, step.parts, step.later, step.addend, step.passes, dim, rank, separate
    ):
        units = (
            moved[launch.kernel].values / dim if launch.kernel in moved else step.owned * rank / dim
        )
        records.append(line(launch, step._asdict(), units, capability))
    return records


def report_streams(streams: int, dim: int, capability: int) -> list[dict[str, Any]]:
    """`report` for the kernels of several streams."""
    times = {"stream_mix": 2, "mixing_gradient": 2, "stream_gradients": 3}
    records = []
    for path, joint in (("hc", False), ("mhc", True)):
        for launch in stream_launches(joint, streams=streams, dim=dim):
            sizes = launch.arguments
            # A program of the maps' gradient takes some columns, and not all.
            part = sizes["CHUNK"] / dim if "SPAN" in sizes else times.get(launch.kernel, 1)
            records.append(line(launch, {"path": path}, (streams + 1) * part, capability))
    return records


def line(launch: Launch, what: dict[str, Any], units: float, capability: int) -> dict[str, Any]:
    """Prints and returns the record of one kernel that moves so many units."""
    code = inspect(launch, capability)
    found = {"kernel": launch.kernel, **what, "units": round(units, 2), **code._asdict()}
    found["instructions_per_unit"] = round(code.instructions / units)
    print(*(f"{name}={value}" for name, value in found.items()), flush=True)
    return found


def main() -> None:
    parser = common.options(__doc__, device=False, plan=True)
    parser.add_argument("--separate", action="store_true", help="keys in tensors of their own")
    parser.add_argument("--capability", type=int, default=90, choices=(80, 90, 100))
    parser.add_argument("--streams", type=int, choices=(1, 2, 3, 4), help="of hc and mhc instead")
    options = parser.parse_args()
    if options.streams:
        records = report_streams(options.streams, options.dim, options.capability)
        common.write_json(options.json, records)
        return
    records = [
        r
        for step in common.operators(options)
        for r in report(step, options.dim, options.rank, options.separate, options.capability)
    ]
    common.write_json(options.json, records)


if __name__ == "__main__":
    main()
