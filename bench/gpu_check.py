"""Checks on a GPU whether the kernels are correct, and how fast they are.

    python bench/gpu_check.py --json gpu.json          (make gpu-check)

Needs only torch and Triton; ends after about --budget seconds. First come comparisons with float64
on the device; an error that is too large ends the script with status 1. Then single operators
(kernels.py), then training steps at the paper's shape (step.py), as many as the time allows. Prints
tables, and writes one JSON file. TRITON_INTERPRET=1 and --rehearse do the same on a CPU with very
few tokens, to see whether the command would run.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor

from lrattnres import depth_attention
from lrattnres.config import ModelConfig
from lrattnres.kernels.backends import KERNELS
from lrattnres.kernels.launch import INTERPRETED
from lrattnres.residual.base import path_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SHAPES = (
    (1, 96, 8),
    (9, 1024, 32),
    (9, 1024, 1024),
    (2, 4096, 33),
    (17, 1000, 64),
    (2, 7186, 7186),
)

# Arguments of kernels.py and step.py.
PAPER = (("--blocks", "8"), ("--shape", "paper", "--compile", "regions", "--batch", "8"))
REHEARSAL = (
    (
        "--sublayers",
        "6",
        "--blocks",
        "3",
        "--dim",
        "32",
        "--rank",
        "4",
        "--tokens",
        "4",
        "--repeats",
        "1",
    ),
    ("--shape", "tiny", "--compile", "off", "--batch", "1", "--rounds", "1", "--kernels", "triton"),
)


def worst(found: list[Tensor], truths: list[Tensor]) -> float:
    """The largest error relative to the norm; a truth that is only rounding does not count.

    Args:
        found: Tensors to check.
        truths: The same in float64.
    """
    pairs = [
        (x.double(), truth) for x, truth in zip(found, truths, strict=True) if truth.norm() > 1e-6
    ]
    return max(((x - truth).norm() / truth.norm()).item() for x, truth in pairs)


def plain_error(sources: int, dim: int, rank: int, separate: bool, dtype: torch.dtype) -> float:
    """Largest error of one read and all its gradients, over 300 tokens."""
    query, count = 2 * torch.randn(rank, device=DEVICE) / rank**0.5, sources
    values = [torch.randn(300, dim, device=DEVICE).to(dtype) for _ in range(sources)]
    keys = [torch.randn(300, rank, device=DEVICE).to(dtype) for _ in range(sources * separate)]
    probe, results = torch.randn(300, dim, device=DEVICE), []
    for kernels, double in (("triton", False), ("reference", True)):
        leaves = [
            (x.double() if double else x).detach().requires_grad_() for x in (query, *values, *keys)
        ]
        made = leaves[count + 1 :] or None
        out = depth_attention(
            leaves[0], leaves[1 : count + 1], made, normalize=True, kernels=kernels
        )
        results.append([out, *torch.autograd.grad((out.double() * probe).sum(), leaves)])
    return worst(*results)


def path_error(name: str, blocks: int | None, dtype: torch.dtype) -> float:
    """Largest error of a path: all reads of twelve sub-layers, and all gradients.

    It has 256 tokens of width 256.
    """
    sizes = {"layers": 6, "dim": 256, "heads": 4, "mlp_width": 512, "context": 64, "vocabulary": 64}
    config = ModelConfig(name, 32, blocks, **sizes)  # type: ignore[arg-type]
    router = path_of(config).build(config, KERNELS["triton"]).to(DEVICE)
    truth = path_of(config).build(config, KERNELS["reference"]).double().to(DEVICE)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    truth.load_state_dict(router.state_dict())
    outputs = [
        torch.randn(256, 256 + router.emit_dim * (i > 0), device=DEVICE).to(dtype)
        for i in range(13)
    ]
    probes, results = torch.randn(13, 256, 256, device=DEVICE), []
    for model, kind in ((router, dtype), (truth, torch.float64)):
        leaves = [output.to(kind).requires_grad_() for output in outputs]
        state = model.begin(leaves[0])
        reads = [model.read(state, 0).x]
        for site, output in enumerate(leaves[1:]):
            state = model.write(state, site, output)
            reads.append(model.read(state, site + 1).x)
        loss = sum((read.double() * probe).sum() for read, probe in zip(reads, probes, strict=True))
        results.append([*reads, *torch.autograd.grad(loss, [*leaves, *model.parameters()])])
    return worst(*results)


def correctness(budget: float) -> list[dict[str, Any]]:
    """Compares case by case with float64 until the time is over; most of it is compilation.

    Args:
        budget: Seconds.

    Returns:
        A record for each case.
    """
    start = time.monotonic()
    records: list[dict[str, Any]] = []
    cases: list[tuple[str, torch.dtype, Any]] = []
    for (name, blocks), dtype in itertools.product(
        (("s_lr", 4), ("p_lr", None), ("attn_res", 3), ("delta", 4)), TOLERANCE
    ):
        cases.append((f"path {name}, N={blocks}", dtype, partial(path_error, name, blocks, dtype)))
    for (n, dim, rank), separate, dtype in itertools.product(SHAPES, (False, True), TOLERANCE):
        error = partial(plain_error, n, dim, rank, separate, dtype)
        cases.append((f"{n} sources, d={dim}, r={rank}{', own keys' * separate}", dtype, error))
    for name, dtype, error in cases:
        if time.monotonic() - start > budget:
            print(f"no time left for {len(cases) - len(records)} further cases")
            break
        found = error()
        records.append(
            {"case": name, "dtype": str(dtype), "error": found, "right": found < TOLERANCE[dtype]}
        )
        print("{case:44}{dtype:16}{error:10.1e}  {right}".format(**records[-1]), flush=True)
    return records


def script(name: str, *arguments: str) -> Any:
    """Runs a measuring script in a process of its own; returns its record, or its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "record.json"
        code = subprocess.run(
            [sys.executable, str(Path(__file__).parent / name), *arguments, "--json", str(target)]
        ).returncode
        return json.loads(target.read_text()) if target.exists() else {"exit": code}


def main() -> None:
    parser = common.options(__doc__, device=False)
    parser.add_argument(
        "--budget", type=float, default=220, help="seconds; compiling may take some more"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, interpreted")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not (options.rehearse and INTERPRETED):
        sys.exit(
            "gpu_check.py: torch sees no CUDA GPU here; on a CPU, `python -m pytest tests/kernels` "
            "interprets the kernels"
        )
    checked = correctness(0.25 * options.budget)
    record: dict[str, Any] = common.machine(DEVICE) | {"correctness": checked}
    common.write_json(options.json, record)
    if not all(case["right"] for case in checked):
        sys.exit(1)
    share = str(0.25 * options.budget)
    operators, step = REHEARSAL if options.rehearse else PAPER
    record["operators"] = script("kernels.py", *operators, "--budget", share)
    common.write_json(options.json, record)
    record["step"] = script("step.py", *step, "--budget", str(0.5 * options.budget))
    common.write_json(options.json, record)
    sys.exit(any("exit" in record[part] for part in ("operators", "step")))


if __name__ == "__main__":
    main()
