"""What the kernels become: registers, spills and instructions, compiled for a GPU that need not be there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lrattnres.kernels.launch import Launch, compile_ahead
from lrattnres.kernels.launches import backward_launches, forward_launch, query_launch
from lrattnres.kernels.ops import SPAN


class MachineCode(NamedTuple):
    """registers a thread; spilled: bytes of stack and local memory a thread; shared: bytes a program; size: instructions
    as they stand; instructions: warp instructions a token, each loop counted as often as it runs.
    """

    registers: int
    spilled: int
    shared: int
    size: int
    instructions: int


def launches(
    owned: int, parts: int, later: int, addend: bool, passes: bool, dim: int, rank: int, separate: bool = False
) -> Iterator[Launch]:
    """All launches of one operator (see `depth.groups.Step`) on bfloat16 sources without memory."""
    tokens = 4 * SPAN

    def some(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        return [torch.empty(*shape, dtype=dtype, device="meta") for _ in range(count)]

    values, keys, mixed = some(owned, tokens, dim), some(owned * separate, tokens, rank), some(parts, tokens, dim)
    sites = later + 1
    wide = some(1 + addend + (later if owned > 1 else 0), tokens, dim)
    stats = some(sites + parts, 2, tokens, dtype=torch.float32)
    queries, scalars = some(1, sites, rank, dtype=torch.float32)[0], some(1, tokens, sites + 1, owned, dtype=torch.float32)[0]
    yield forward_launch(
        queries, values, keys, values[-1] if addend else None, mixed, stats[sites:], True, (wide, stats[:sites], scalars)
    )
    beta, given = some(1, tokens, sites, owned, dtype=torch.float32)[0], values if passes else [None] * owned
    results = (values, keys, queries, mixed[:1], stats[0])
    arguments = (some(sites, tokens, dim), values[0], values, keys, queries, stats[1:sites], stats[0], scalars, given)
    yield from backward_launches(*arguments, keys if passes else [None] * len(keys), True, parts > 0, results, beta)
    partial = some(1, tokens // SPAN, sites, rank, dtype=torch.float32)[0]
    yield query_launch(keys or values, beta, partial, 0 if separate else dim - rank, SPAN)


def inspect(launch: Launch, capability: int) -> MachineCode:
    """Compiles for sm_<capability> and reads the machine code with the tools that come with Triton."""
    from triton.backends import nvidia

    compiled = compile_ahead(launch, capability)
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout
            for what in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", code)]
    registers, stack, local = map(int, found.groups())
    return MachineCode(registers, stack + local, compiled.metadata.shared, len(lines), _executed(lines, launch))


def _executed(lines: list[tuple[int, str]], launch: Launch) -> int:
    """Warp instructions a token. Loops are backward branches, in the order of the kernel, and run as the launch says."""
    jumps = [(int(goal[1], 16), at) for at, text in lines if (goal := re.search(r"\bBRA\S*\s.*?(0x[0-9a-f]+)", text))]
    bodies = [sum(start <= at <= end for at, _ in lines) for start, end in jumps if start < end]
    sizes = launch.arguments
    if launch.kernel == "query_gradient":
        turns, tokens = [sizes["SPAN"] // sizes["ROWS"]], sizes["SPAN"]
    elif launch.kernel == "read_forward":
        turns, tokens = [sizes["BLOCK_D"] // sizes["CHUNK"]], sizes["ROWS"]
    else:
        scores, values = (-(-sizes["K"] // sizes[name]) for name in ("GROUP", "WIDE_GROUP"))
        turns = [sizes["BLOCK_D"] // sizes["CHUNK"]] * scores + [sizes["BLOCK_D"] // sizes["WIDE_CHUNK"]] * values
        tokens = sizes["ROWS"]
    loops = [count for count in turns if count > 1]
    bodies = [body for body in bodies if body > 10]  # a program ends in a branch to itself
    if len(bodies) < len(loops):  # the compiler unrolled the rest
        loops = loops[: len(bodies)]
    return (len(lines) + sum(body * (count - 1) for body, count in zip(bodies, loops, strict=False))) * launch.warps // tokens
