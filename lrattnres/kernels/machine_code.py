"""What the compiler makes of the kernels: registers, spills and instructions.

The GPU that they are compiled for need not be in this machine.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from lrattnres.kernels import stream_ops
from lrattnres.kernels.launch import Launch, compile_ahead
from lrattnres.kernels.ops import SPAN, plan_backward, plan_read
from lrattnres.kernels.sample import backward_arguments, forward_arguments


class MachineCode(NamedTuple):
    """Figures of one compiled kernel.

    Attributes:
        registers: Of a thread.
        spilled: Bytes of stack and local memory of a thread; 0 if everything is in registers.
        shared: Bytes of shared memory of a program.
        size: Number of instructions in the code.
        instructions: Warp instructions executed for a token, every turn of a loop counted.
    """

    registers: int
    spilled: int
    shared: int
    size: int
    instructions: int


def launches(
    owned: int,
    parts: int,
    later: int,
    addend: bool,
    passes: bool,
    dim: int,
    rank: int,
    separate: bool = False,
) -> list[Launch]:
    """All launches of one operator on bfloat16 sources of the meta device.

    Args:
        owned, parts, later, addend, passes: As in `Step` of lrattnres/residual/fused/schedule.py.
        dim: d, width of a value.
        rank: r, width of a key.
        separate: Whether keys are tensors of their own.

    Returns:
        Those of the forward pass, the backward pass, and the gradient of the queries.
    """
    forward = forward_arguments(
        owned, parts, later, addend, tokens=4 * SPAN, dim=dim, rank=rank, separate=separate
    )
    results, launch = plan_read(*forward)
    return [launch, *plan_backward(backward_arguments(forward, results, passes))[1]]


def stream_launches(
    joint: bool, *, streams: int = 4, dim: int = 1024, tokens: int = 4 * stream_ops.SPAN
) -> list[Launch]:
    """All launches of a site of several bfloat16 streams, on the meta device.

    Args:
        joint: As in `stream_ops.project`: with the maps of `mhc`, or else those of `hc`.
        streams: n.
        dim: d, width of a stream.
        tokens: Number of tokens.

    Returns:
        Two of the forward pass, and three of the backward pass.
    """
    count = streams * (streams + 2) if joint else streams + 3

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=dtype)

    own = [some(tokens, dim, dtype=torch.bfloat16) for _ in range(streams)]
    write, output = some(tokens, streams), some(tokens, dim, dtype=torch.bfloat16)
    maps = some(streams if joint else 1, count, dim)
    mixing = some(tokens, streams, streams + 1)
    made, products = stream_ops.plan_products(own, write, output, maps, joint)
    mixed, mix = stream_ops.plan_mix(own, write, output, mixing)
    _, mixing_gradient = stream_ops.plan_mixing_gradient(mixed, own, write, output)
    _, gradients = stream_ops.plan_gradients(mixed, mixing, own, write, output, maps, *made, joint)
    _, of_maps = stream_ops.plan_map_gradient(own, write, output, made[0], count, joint)
    return [products, mix, mixing_gradient, gradients, of_maps]


def inspect(launch: Launch, capability: int) -> MachineCode:
    """Compiles a kernel and reads its machine code with the tools that Triton brings.

    Args:
        launch: Of the kernel.
        capability: Compute capability without the dot, such as 90 for sm_90.
    """
    from triton.backends import nvidia

    compiled = compile_ahead(launch, capability)
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(
                [tool, what, file.name], capture_output=True, text=True, check=True
            ).stdout
            for what in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    lines = [
        (int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", code)
    ]
    registers, stack, local = map(int, found.groups())
    return MachineCode(
        registers, stack + local, compiled.metadata.shared, len(lines), _executed(lines, launch)
    )


def _executed(lines: list[tuple[int, str]], launch: Launch) -> int:
    """Warp instructions for a token.

    A loop is a branch backwards. Loops stand in the order of the kernel's source, and the launch
    tells how many turns each takes.

    Args:
        lines: (address, text) of every instruction.
        launch: Of the kernel.
    """
    jumps = [
        (int(goal[1], 16), at)
        for at, text in lines
        if (goal := re.search(r"\bBRA\S*\s.*?(0x[0-9a-f]+)", text))
    ]
    bodies = [sum(start <= at <= end for at, _ in lines) for start, end in jumps if start < end]
    sizes = launch.arguments
    tokens = sizes["SPAN" if "SPAN" in sizes else "ROWS"]
    if "SPAN" in sizes:
        turns = [sizes["SPAN"] // sizes["ROWS"]]
    elif launch.kernel == "read_backward":
        scores, values = (-(-sizes["K"] // sizes[name]) for name in ("GROUP", "WIDE_GROUP"))
        turns = [sizes["BLOCK_D"] // sizes["CHUNK"]] * scores + [
            sizes["BLOCK_D"] // sizes["WIDE_CHUNK"]
        ] * values
    else:
        turns = [-(-sizes.get("BLOCK_D", sizes["D"]) // sizes["CHUNK"])]
    loops = [count for count in turns if count > 1]
    bodies = [body for body in bodies if body > 10]  # a program ends in a branch to itself
    if len(bodies) < len(loops):  # the compiler unrolled the rest
        loops = loops[: len(bodies)]
    return (
        (len(lines) + sum(body * (count - 1) for body, count in zip(bodies, loops, strict=False)))
        * launch.warps
        // tokens
    )
