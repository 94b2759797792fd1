"""Registers, spills and instructions of every kernel that a model would launch.

    python bench/kernel_report.py --blocks 8 --rank 32 --capability 90 --json report.json

The kernels are compiled here, for a GPU that need not be in this machine. One line for each kernel
of each operator: what the operator reads, registers, spilled bytes, shared memory, and warp
instructions for each width of a value (d numbers of two bytes) that must be moved for a token.
"""

from __future__ import annotations

import common

from lrattnres.kernels.machine_code import inspect, launches
from lrattnres.residual.fused.schedule import Step, backward_traffic, forward_traffic


def report(
    step: Step, dim: int, rank: int, separate: bool, capability: int
) -> list[dict[str, float]]:
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
        code = inspect(launch, capability)
        units = (
            moved[launch.kernel].values / dim if launch.kernel in moved else step.owned * rank / dim
        )
        found = {
            "kernel": launch.kernel,
            **step._asdict(),
            "units": round(units, 2),
            **code._asdict(),
        }
        records.append(found | {"instructions_per_unit": round(code.instructions / units)})
        print(*(f"{name}={value}" for name, value in records[-1].items()), flush=True)
    return records


def main() -> None:
    parser = common.options(__doc__, device=False, plan=True)
    parser.add_argument("--separate", action="store_true", help="keys in tensors of their own")
    parser.add_argument("--capability", type=int, default=90, choices=(80, 90, 100))
    options = parser.parse_args()
    records = [
        r
        for step in common.operators(options)
        for r in report(step, options.dim, options.rank, options.separate, options.capability)
    ]
    common.write_json(options.json, records)


if __name__ == "__main__":
    main()
