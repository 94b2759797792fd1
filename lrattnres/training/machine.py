"""What this machine can do and has used: peak FLOP/s, for model FLOPs utilisation, and memory."""

from __future__ import annotations

import time
from pathlib import Path

import torch

# Dense bfloat16 FLOP/s from data sheets, by a part of the device's name.
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
    """The most FLOP/s that a device could do.

    Args:
        device: Where the model runs.
        dtype: Of its arithmetic.

    Returns:
        FLOP/s, and where the number is from: a data sheet for known GPUs in bfloat16, else a
        measured matrix product.
    """
    if device.type == "cuda" and dtype is torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, peak in DATA_SHEETS.items():
            if part in name:
                return peak, f"data sheet of {part}"
    return _measured(device, dtype), "measured matrix product"


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has used so far.

    On a GPU those of tensors, else the resident memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not getrusage: its peak may be that of the parent process.
    return proc_bytes("self/status", "VmHWM")


def proc_bytes(file: str, name: str) -> int:
    """A size that the Linux kernel states.

    Args:
        file: Of /proc, such as "meminfo".
        name: Of the line, which holds kilobytes.

    Returns:
        Bytes.
    """
    lines = (Path("/proc") / file).read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of six matrix products."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        begin = time.perf_counter()
        product = left @ right
        product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
