"""What a kernel is launched with: its arguments by name, its grid, its shape on the machine. Also
compiles ahead of time.

Depth attention is bound by memory traffic, so the shapes aim at few instructions a byte: one warp
holds a whole token up to d = 1024, so that no sum over columns crosses warps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WORDS = 104  # registers a thread may spend on sums that stay alive over a loop


class Launch(NamedTuple):
    """kernel: its name in `triton_kernels`; arguments: tensors, groups of them, sizes, and
    constants in upper case.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int


def rows(x: Tensor) -> Tensor:
    """x as [tokens, width] with unit stride along the width; copied only where no view has that
    shape.
    """
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def group(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Pointers and row strides, as the kernels take a group of tensors."""
    flat = tuple(map(rows, tensors))
    return flat, tuple(tensor.stride(0) for tensor in flat)


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def warps_for(dim: int) -> int:
    """One warp up to 1024 columns: 32 values a thread."""
    return min(16, max(1, power(dim) // 1024))


def rows_for(tokens: int) -> int:
    """Tokens a program holds: one on a GPU. The interpreter runs programs one after another and
    likes few.
    """
    return min(64, power(max(tokens, 1))) if INTERPRETED else 1


def chunk_for(dim: int, sums: int, beside: int = 0) -> int:
    """Columns a loop step holds, so that `sums` running sums of that width, and `beside` words, fit
    into registers.
    """
    width = 32 * warps_for(dim)
    return min(
        power(dim),
        width * max(4, min(32, 1 << max((WORDS - beside) // max(sums, 1), 1).bit_length() - 1)),
    )


def fire(launch: Launch) -> None:
    """Runs a kernel. Raises RuntimeError for tensors on a CPU, unless the interpreter is on."""
    from lrattnres.kernels import triton_kernels

    device = next(value for value in launch.arguments.values() if isinstance(value, Tensor)).device
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"depth attention in Triton runs on a CUDA GPU, and the tensors are on {device}; "
            "write kernels=reference, or set TRITON_INTERPRET=1 before the start to have it interpreted"
        )
    if all(launch.grid):
        getattr(triton_kernels, launch.kernel)[launch.grid](
            **launch.arguments, num_warps=launch.warps
        )


TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def compile_ahead(launch: Launch, capability: int) -> Any:
    """The kernel compiled for a GPU that need not be there (80, 90 or 100), as this launch would
    compile it.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lrattnres.kernels import triton_kernels

    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def kind(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            return tuple(kind(item, (*path, i)) for i, item in enumerate(value))
        # Pointers come from an allocator that aligns them; a stride is known to be even only if it
        # is.
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
    source = ASTSource(getattr(triton_kernels, launch.kernel), signature, constants, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": launch.warps}
    )
