"""How fast this machine could be: the denominator of model FLOPs utilisation."""

from __future__ import annotations

import time
from pathlib import Path

import torch

# Dense bfloat16 FLOP/s by the makers' data sheets, by a part of the device's name.
DATA_SHEETS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "GH200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """How fast a device could be.

    Args:
        device: Where the model runs.
        dtype: Of its arithmetic.

    Returns:
        FLOP/s, and where the figure is from: a data sheet for known GPUs in bfloat16, else a
        measured matrix product.
    """
    if device.type == "cuda" and dtype is torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, peak in DATA_SHEETS.items():
            if part in name:
                return peak, f"data sheet of {part}"
    return _measured(device, dtype), "measured matrix product"


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has taken at most: of a GPU for tensors, of the host resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not getrusage: its peak is handed down by whoever started the process.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        begin = time.perf_counter()
        product = left @ right
        product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
