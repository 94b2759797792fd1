"""The operators of depth attention one by one: time, bytes a second by the plan's own count, and their share of a copy.

    python scripts/bench_kernels.py --blocks 8 --rank 32 --tokens 16384 --json kernels.json

On a GPU: the forward and backward operator of every kind of site, and one plain read against plain torch, eager and
compiled. On a CPU only the latter, without Triton.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_common
import torch
from torch import Tensor

from lrattnres import depth_attention
from lrattnres.depth.groups import Step, backward_traffic, cheapest, forward_traffic, steps
from lrattnres.depth.plan import DepthPlan


def timed(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median of single runs, after two that compile."""
    for _ in range(2):
        call()
    return statistics.median(bench_common.seconds(call, device) for _ in range(repeats))


def operator(step: Step, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """The forward and backward operator of one kind of site, without autograd around them."""
    from lrattnres.kernels import ops  # noqa: F401 — defines the operators

    device, dim, sites = torch.device(options.device), options.dim, step.later + 1

    def some(count: int) -> list[Tensor]:
        return [torch.randn(options.tokens, dim, device=device, dtype=torch.bfloat16) for _ in range(count)]

    queries, values, parts = torch.randn(sites, options.rank, device=device) / 8, some(step.owned), some(step.parts)
    part_stats = [torch.zeros(2, options.tokens, device=device) for _ in parts]
    forward: tuple[Any, ...] = (queries, values, [], some(1)[0] if step.addend else None, parts, part_stats, True)
    wide, stats, scalars = torch.ops.lrattnres.read(*forward)
    given = some(step.owned) if step.passes else [None] * step.owned
    later_stats = [torch.stack([s[0], torch.zeros_like(s[0])]) for s in stats[1:]]
    backward: tuple[Any, ...] = (
        some(sites),
        wide[0],
        values,
        [],
        queries,
        later_stats,
        stats[0],
        scalars,
        given,
        [],
        True,
        step.parts > 0,
    )
    record: dict[str, Any] = step._asdict()
    for name, call, traffic in (
        ("forward", lambda: torch.ops.lrattnres.read(*forward), forward_traffic),
        ("backward", lambda: torch.ops.lrattnres.read_backward(*backward), backward_traffic),
    ):
        found = timed(call, device, options.repeats)
        moved = options.tokens * traffic(step, dim, options.rank, False).bytes(2)
        record |= {f"{name}_us": 1e6 * found, f"{name}_gb_s": moved / found / 1e9, f"{name}_of_copy": moved / found / rate}
    return record


def plain_read(kernels: str, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Forward and backward of one read of nine sources, as somebody's own model would do it."""
    device, dim = torch.device(options.device), options.dim
    values = [torch.randn(options.tokens, dim, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(9)]
    query = torch.randn(options.rank, device=device, requires_grad=True)
    gradient = torch.randn_like(values[0])

    def call() -> None:
        out = depth_attention(query, values, normalize=True, kernels=kernels)
        torch.autograd.grad(out, [query, *values], gradient)

    found, step = timed(call, device, options.repeats), Step(True, 9, 0, 0, False, False)
    moved = options.tokens * sum(f(step, dim, options.rank, False).bytes(2) for f in (forward_traffic, backward_traffic))
    return {"kernels": kernels, "us": 1e6 * found, "gb_s": moved / found / 1e9, "of_copy": moved / found / rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sublayers", type=int, default=48)
    parser.add_argument("--blocks", type=int, default=None, help="default: every sub-layer a source")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no further operator is tried")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, start = torch.device(options.device), time.monotonic()
    rate = bench_common.copy_rate(device)
    print(f"copy: {rate / 1e9:.0f} GB/s", flush=True)
    contestants = ("triton", "compiled", "reference") if device.type == "cuda" else ("compiled", "reference")
    found: dict[str, Any] = bench_common.machine(device) | {"copy_gb_s": rate / 1e9, "plain_read": [], "operators": []}
    for kernels in contestants:
        found["plain_read"].append(plain_read(kernels, options, rate))
        print("read of 9: {kernels:10}{us:12.1f} us {gb_s:8.0f} GB/s {of_copy:6.0%} of a copy".format(**found["plain_read"][-1]))
    plan = DepthPlan(options.sublayers, options.blocks)
    for step in sorted(set(steps(plan, cheapest(plan, options.rank / options.dim)))) if device.type == "cuda" else []:
        if time.monotonic() - start > options.budget:
            print("no time left for the other operators")
            break
        record = operator(step, options, rate)
        found["operators"].append(record)
        shown = "{owned:3} sources {parts:2} parts {later:2} later: forward {forward_us:8.1f} us {forward_of_copy:5.0%}, "
        print((shown + "backward {backward_us:8.1f} us {backward_of_copy:5.0%} of a copy").format(**record), flush=True)
    bench_common.write_json(options.json, found)


if __name__ == "__main__":
    main()
