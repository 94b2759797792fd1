"""The operators of depth attention one by one: time, bytes a second, and their share of a copy.

    python bench/kernels.py --blocks 8 --rank 32 --tokens 16384 --json kernels.json

On a GPU: the forward and backward operator of every kind of site; and one read, which is compared
with plain torch, eager and compiled, and with the packages in `rivals.py` that are installed. On a
CPU only the read, without Triton. (With the interpreter all is run, but only to see that it runs.)
All rates count the bytes that our own operator must move, by the plan.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import rivals
import torch

from lrattnres import depth_attention
from lrattnres.kernels.launch import INTERPRETED
from lrattnres.residual.fused.schedule import Step, backward_traffic, forward_traffic


def timed(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median seconds of single calls, after two that compile."""
    for _ in range(2):
        call()
    return statistics.median(common.seconds(call, device) for _ in range(repeats))


def operator(step: Step, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Times the forward and backward operator of one kind of site, without autograd.

    Args:
        step: The operator.
        options: Of this script.
        rate: Bytes a second of a copy.

    Returns:
        A record with microseconds, GB/s and the share of a copy.
    """
    from lrattnres.kernels import ops  # noqa: F401 — defines the operators
    from lrattnres.kernels.sample import backward_arguments, forward_arguments

    size = {
        "tokens": options.tokens,
        "dim": options.dim,
        "rank": options.rank,
        "device": options.device,
    }
    forward = forward_arguments(step.owned, step.parts, step.later, step.addend, **size)
    backward = backward_arguments(forward, torch.ops.lrattnres.read(*forward), step.passes)
    record: dict[str, Any] = step._asdict()
    for name, call, traffic in (
        ("forward", lambda: torch.ops.lrattnres.read(*forward), forward_traffic),
        ("backward", lambda: torch.ops.lrattnres.read_backward(*backward), backward_traffic),
    ):
        found = timed(call, torch.device(options.device), options.repeats)
        moved = options.tokens * traffic(step, options.dim, options.rank, False).bytes(2)
        record |= {
            f"{name}_us": 1e6 * found,
            f"{name}_gb_s": moved / found / 1e9,
            f"{name}_of_copy": moved / found / rate,
        }
    return record


def plain_read(name: str, rank: int, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Times forward and backward of one read of nine sources and its norm.

    Args:
        name: A backend of ours, or a name in RIVALS.
        rank: r, width of a key.
        options: Of this script.
        rate: Bytes a second of a copy.

    Returns:
        A record with microseconds, GB/s and the share of a copy.
    """
    rival = rivals.RIVALS.get(name)
    device, dim = torch.device(options.device), options.dim
    values = [
        torch.randn(options.tokens, dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(9)
    ]
    query = torch.randn(
        rank, device=device, dtype=rival.query if rival else torch.float32, requires_grad=True
    )
    gradient = torch.randn_like(values[0])
    read = rival.load() if rival else partial(depth_attention, normalize=True, kernels=name)

    def call() -> None:
        torch.autograd.grad(read(query, values), [query, *values], gradient)

    found, step = timed(call, device, options.repeats), Step(True, 9, 0, 0, False, False)
    moved = options.tokens * sum(
        f(step, dim, rank, False).bytes(2) for f in (forward_traffic, backward_traffic)
    )
    return {
        "kernels": name,
        "rank": rank,
        "us": 1e6 * found,
        "gb_s": moved / found / 1e9,
        "of_copy": moved / found / rate,
    }


def main() -> None:
    parser = common.options(__doc__, plan=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--budget",
        type=float,
        default=3600,
        help="seconds after which no further operator is tried",
    )
    options = parser.parse_args()
    device, start = torch.device(options.device), time.monotonic()
    rate = common.copy_rate(device)
    print(f"copy: {rate / 1e9:.0f} GB/s", flush=True)
    able = device.type == "cuda" or INTERPRETED
    found: dict[str, Any] = common.machine(device) | {
        "copy_gb_s": rate / 1e9,
        "plain_read": [],
        "operators": [],
    }
    # Ours with the rank that was asked for, and with keys of full width, as some packages have only
    # these.
    contestants = [
        (name, options.rank) for name in (("triton",) if able else ()) + ("compiled", "reference")
    ]
    contestants += [("triton", options.dim)] if able and options.rank < options.dim else []
    contestants += [
        (name, rivals.RIVALS[name].rank(options.rank, options.dim))
        for name in rivals.installed(device)
    ]
    for name, rank in contestants:
        found["plain_read"].append(plain_read(name, rank, options, rate))
        shown = "read of 9: {kernels:13} r = {rank:<5}{us:12.1f} us {gb_s:8.0f} GB/s {of_copy:6.0%}"
        print(shown.format(**found["plain_read"][-1]), "of a copy", flush=True)
    for step in common.operators(options) if able else []:
        if time.monotonic() - start > options.budget:
            print("no time left for the other operators")
            break
        record = operator(step, options, rate)
        found["operators"].append(record)
        shown = (
            "{owned:3} sources {parts:2} parts {later:2} later: "
            "forward {forward_us:8.1f} us {forward_of_copy:5.0%}, "
        )
        print(
            (shown + "backward {backward_us:8.1f} us {backward_of_copy:5.0%} of a copy").format(
                **record
            ),
            flush=True,
        )
    common.write_json(options.json, found)


if __name__ == "__main__":
    main()
