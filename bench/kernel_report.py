"""Registers, spills and instructions of every kernel a model would launch.

They are compiled here, for a GPU that need not be here.

    python bench/kernel_report.py --blocks 8 --rank 32 --capability 90 --json report.json

One line an operator: what it owns, and for its three kernels registers, spilled bytes, shared
memory, and warp instructions for each value-width (d two-byte values) that must be moved for a
token.
"""

from __future__ import annotations

import common

from lrattnres.kernels.machine_code import inspect, launches
from lrattnres.residual.fused.schedule import (
    Step,
    backward_traffic,
    cheapest,
    forward_traffic,
    steps,
)
from lrattnres.residual.plan import DepthPlan


def report(
    step: Step, dim: int, rank: int, separate: bool, capability: int
) -> list[dict[str, float]]:
    """One record a kernel of the operator."""
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
    parser = common.options(__doc__, device=False)
    parser.add_argument("--sublayers", type=int, default=48)
    parser.add_argument(
        "--blocks", type=int, default=None, help="default: every sub-layer a source"
    )
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--separate", action="store_true", help="keys in tensors of their own")
    parser.add_argument("--capability", type=int, default=90, choices=(80, 90, 100))
    options = parser.parse_args()
    plan = DepthPlan(options.sublayers, options.blocks)
    operators = sorted(set(steps(plan, cheapest(plan, options.rank / options.dim))))
    records = [
        r
        for step in operators
        for r in report(step, options.dim, options.rank, options.separate, options.capability)
    ]
    common.write_json(options.json, records)


if __name__ == "__main__":
    main()
