"""What the measuring scripts share: options, models, timing.

A script imports it before lrattnres. Then it runs from a clone that is not installed, with torch
and Triton only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
# Only parsing settings needs omegaconf, and here settings are not parsed.
BARE = importlib.util.find_spec("omegaconf") is None
if BARE:
    stand_in, errors = types.ModuleType("omegaconf"), types.ModuleType("omegaconf.errors")
    stand_in.__dict__.update(MISSING="???", OmegaConf=None)
    errors.__dict__.update(OmegaConfBaseException=Exception)
    sys.modules |= {"omegaconf": stand_in, "omegaconf.errors": errors}

from lrattnres.config import ModelConfig
from lrattnres.model.attention import choose_attention
from lrattnres.model.head import choose_loss
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual import base
from lrattnres.residual.fused.schedule import Step, cheapest, steps
from lrattnres.residual.plan import DepthPlan

if BARE:
    base.parse_options = lambda options, values, prefix: options(**values)

SIZES = ("layers", "dim", "heads", "mlp_width", "context", "vocabulary")
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(zip(SIZES, (3, 32, 2, 48, 8, 64), strict=True)),
    "demo": dict(zip(SIZES, (6, 128, 4, 352, 256, 257), strict=True)),
    "small": dict(zip(SIZES, (8, 256, 4, 704, 512, 4096), strict=True)),
    "paper": dict(zip(SIZES, (24, 1024, 16, 2816, 2048, 100_277), strict=True)),
}


def options(
    doc: str | None, *, device: bool = True, model: bool = False, plan: bool = False
) -> argparse.ArgumentParser:
    """A parser with the options that several scripts have; --json always.

    Args:
        doc: Shown by --help.
        device: Whether to add --device.
        model: Whether to add --shape, --variants, --precision and --threads.
        plan: Whether to add --sublayers, --blocks, --dim and --rank.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file that all figures are written to")
    if device:
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    if model:
        parser.add_argument("--shape", default="small", choices=SHAPES)
        parser.add_argument(
            "--variants", nargs="*", help="residual[:blocks[:rank]]; blocks may be `full`"
        )
        parser.add_argument(
            "--precision", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU"
        )
        parser.add_argument("--threads", type=int)
    if plan:
        parser.add_argument("--sublayers", type=int, default=48)
        parser.add_argument("--blocks", type=int, help="default: every sub-layer a source")
        parser.add_argument("--dim", type=int, default=1024)
        parser.add_argument("--rank", type=int, default=32)
    return parser


def settle(chosen: argparse.Namespace) -> None:
    """Sets the precision that follows from the device, and the number of threads."""
    chosen.precision = chosen.precision or ("bfloat16" if chosen.device == "cuda" else "float32")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)


def words(chosen: argparse.Namespace) -> dict[str, str]:
    """The options as texts, to be written beside the figures."""
    return {name: str(value) for name, value in vars(chosen).items()}


def model_config(name: str, shape: dict[str, Any]) -> ModelConfig:
    """The settings of a model.

    Args:
        name: residual[:blocks[:rank]]; blocks may be `full`.
        shape: The values of SIZES.
    """
    residual, blocks, rank = [*name.split(":"), *("full", "")[name.count(":") :]]
    config = ModelConfig(
        residual, int(rank) if rank else None, None if blocks == "full" else int(blocks), **shape
    )
    return base.path_of(config).settled(config)[0]


def build(
    name: str,
    shape: dict[str, Any],
    chosen: argparse.Namespace,
    *,
    kernels: str = "auto",
    training: bool,
    compiled: bool = False,
    batch: int = 1,
) -> Transformer:
    """A model with random weights.

    Args:
        name: residual[:blocks[:rank]]; blocks may be `full`.
        shape: The values of SIZES.
        chosen: Options with `device` and `precision`.
        kernels: Name of the backend for depth attention.
        training: Whether gradients are needed.
        compiled: Whether the model will be compiled.
        batch: Windows of a forward pass.
    """
    config = model_config(name, shape)
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.precision)
    return build_model(
        config,
        seed=0,
        device=device,
        attention=choose_attention("auto", device, dtype, training=training),
        dtype=dtype,
        kernels=base.path_of(config).choose_kernels(
            config, kernels, device, dtype, compiled=compiled
        ),
        loss=choose_loss(
            "auto", device, batch * config.context, config.vocabulary, compiled=compiled
        ),
    )


def operators(chosen: argparse.Namespace) -> list[Step]:
    """The operators of a plan, each kind once; `chosen` has the options of a plan."""
    plan = DepthPlan(chosen.sublayers, chosen.blocks)
    return sorted(set(steps(plan, cheapest(plan, chosen.rank / chosen.dim))))


def machine(device: torch.device) -> dict[str, Any]:
    """What a figure must be read with: device, threads and versions."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU"
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Duration of one call, with the work of the GPU finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_rate(device: torch.device) -> float:
    """Bytes a second of a large copy, reads and writes counted: the limit that memory sets."""
    source = torch.empty(
        (2**30 if device.type == "cuda" else 2**27) // 2, dtype=torch.bfloat16, device=device
    )
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source), device) for _ in range(8))


def matmul_rate(
    tokens: int, dim: int, width: int, dtype: torch.dtype, device: torch.device
) -> float:
    """FLOP a second of a matrix product [tokens, dim] x [dim, width], the best of ten."""
    left, right = (
        torch.randn(tokens, dim, device=device, dtype=dtype),
        torch.randn(dim, width, device=device, dtype=dtype),
    )
    return 2 * tokens * dim * width / min(seconds(lambda: left @ right, device) for _ in range(10))


def write_json(path: Path | None, record: Any) -> None:
    """Writes a record as JSON; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")
