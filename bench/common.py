"""What the measuring scripts share: timing, and running from a bare checkout with nothing installed
but torch and Triton.
"""

from __future__ import annotations

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
if (
    importlib.util.find_spec("omegaconf") is None
):  # only parsing configuration files needs it, and nothing here does
    stand_in, errors = types.ModuleType("omegaconf"), types.ModuleType("omegaconf.errors")
    stand_in.__dict__.update(MISSING="???", OmegaConf=None)
    errors.__dict__.update(OmegaConfBaseException=Exception)
    sys.modules |= {"omegaconf": stand_in, "omegaconf.errors": errors}


def machine(device: torch.device) -> dict[str, Any]:
    """What a figure must be read with."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU"
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """One run, waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_rate(device: torch.device) -> float:
    """Bytes a second of a large copy, reads and writes counted: what a kernel bound by memory could
    reach here.
    """
    source = torch.empty(
        (2**30 if device.type == "cuda" else 2**27) // 2, dtype=torch.bfloat16, device=device
    )
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source), device) for _ in range(8))


def matmul_rate(
    tokens: int, dim: int, width: int, dtype: torch.dtype, device: torch.device
) -> float:
    """FLOP a second of the model's most common matrix product."""
    left, right = (
        torch.randn(tokens, dim, device=device, dtype=dtype),
        torch.randn(dim, width, device=device, dtype=dtype),
    )
    return 2 * tokens * dim * width / min(seconds(lambda: left @ right, device) for _ in range(10))


def write_json(path: Path | None, record: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")
