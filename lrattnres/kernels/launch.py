"""How a Triton kernel is launched: arguments by name, grid, tile sizes and warps.

Depth attention is limited by memory traffic, so the sizes aim at few instructions for each byte.
One warp holds a whole token up to d = 1024; then no sum over columns needs more than one warp.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MOST_STREAMS = 4  # of a kernel; its code and registers grow with the square of their number
WORDS = 104  # registers of a thread for sums that are kept over a loop


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
        kernel: Name of the function in `triton_kernels` or `stream_kernels`.
        grid: Number of programs along each axis.
        arguments: By name: tensors, tuples of tensors and their strides, sizes, and constants at
            compile time, whose names are in upper case.
        warps: Warps of each program.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int


def rows(x: Tensor) -> Tensor:
    """x [..., width] as [tokens, width] with stride 1 along the width.

    It is copied only where no view has that shape.
    """
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def pointers(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Tensors [..., width] as the kernels take several of them.

    Returns:
        The tensors as `rows` gives them, and the stride of each from token to token, in elements.
    """
    flat = tuple(map(rows, tensors))
    return flat, tuple(tensor.stride(0) for tensor in flat)


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def warps_for(dim: int) -> int:
    """Warps for a row of `dim` columns: 1 up to 1024 columns, at most 16."""
    return min(16, max(1, power(dim) // 1024))


def rows_for(tokens: int) -> int:
    """Tokens of one program.

    One on a GPU. The interpreter runs programs one after another, so there few programs are faster:
    up to 64 tokens.
    """
    return min(64, power(max(tokens, 1))) if INTERPRETED else 1


def chunk_for(dim: int, sums: int, beside: int = 0) -> int:
    """Columns of one step of a loop, a power of two, so that the running sums fit into registers.

    Args:
        dim: Columns in all.
        sums: Running sums that are kept over the loop.
        beside: Registers a thread that hold other values over the loop.
    """
    width = 32 * warps_for(dim)
    return min(
        power(dim),
        width * max(4, min(32, 1 << max((WORDS - beside) // max(sums, 1), 1).bit_length() - 1)),
    )


def fire(launch: Launch) -> None:
    """Runs a kernel; a launch whose grid is empty does nothing.

    Raises:
        RuntimeError: The tensors are on a CPU, and the interpreter is off.
    """
    device = next(value for value in launch.arguments.values() if isinstance(value, Tensor)).device
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"a kernel of Triton runs on a CUDA GPU, and the tensors are on {device}; "
            "write kernels=reference, or set TRITON_INTERPRET=1 before the start to have it "
            "interpreted"
        )
    if not all(launch.grid):
        return
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        function(launch)[launch.grid](**launch.arguments, num_warps=launch.warps)


def function(launch: Launch) -> Any:
    """The kernel of a launch."""
    from lrattnres.kernels import stream_kernels, triton_kernels

    module = triton_kernels if hasattr(triton_kernels, launch.kernel) else stream_kernels
    return getattr(module, launch.kernel)


TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def compile_ahead(launch: Launch, capability: int) -> Any:
    """Compiles a kernel for a GPU that need not be in this machine.

    Args:
        launch: What the kernel is compiled for; its tensors may be on the meta device.
        capability: Compute capability without the dot: 80, 90 or 100.

    Returns:
        Triton's compiled kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def kind(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            return tuple(kind(item, (*path, i)) for i, item in enumerate(value))
        # A storage begins at an aligned address. So a pointer is divisible by 16 if its offset in
        # bytes is, and a stride if it is so itself.
        number = (
            value.storage_offset() * value.element_size() if isinstance(value, Tensor) else value
        )
        if number % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return TYPES[value.dtype] if isinstance(value, Tensor) else "i32"

    for index, (name, value) in enumerate(launch.arguments.items()):
        if name.isupper():
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = kind(value, (index,))
    source = ASTSource(function(launch), signature, constants, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": launch.warps}
    )
