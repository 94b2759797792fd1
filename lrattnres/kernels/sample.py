"""Made-up inputs of one operator, to time it, to compile it or to count its memory traffic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrattnres.kernels.launches import Backward


def forward_arguments(
    owned: int,
    parts: int,
    later: int,
    addend: bool,
    *,
    tokens: int,
    dim: int,
    rank: int,
    separate: bool = False,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:
    """Random arguments for `torch.ops.lrattnres.read`.

    Args:
        owned, parts, later, addend: As in `Step` of lrattnres/residual/fused/schedule.py.
        tokens: Number of tokens.
        dim: d, width of a value.
        rank: r, width of a key.
        separate: Whether keys are tensors of their own.
        device: On the meta device nothing takes memory.
        dtype: Of values and keys; queries and statistics are float32.
    """

    def some(count: int, width: int) -> list[Tensor]:
        return [torch.randn(tokens, width, device=device, dtype=dtype) for _ in range(count)]

    queries = torch.randn(later + 1, rank, device=device) / 8
    part_stats = [torch.zeros(2, tokens, device=device) for _ in range(parts)]
    newest = some(1, dim)[0] if addend else None
    return (
        queries,
        some(owned, dim),
        some(owned * separate, rank),
        newest,
        some(parts, dim),
        part_stats,
        True,
    )


def backward_arguments(
    forward: tuple[Any, ...], results: tuple[Any, ...], passes: bool
) -> Backward:
    """Arguments for `torch.ops.lrattnres.read_backward`, with random gradients.

    Args:
        forward: The arguments of `read`.
        results: What it returned.
        passes: Whether gradients of the sources come from later operators too.
    """
    queries, values, keys, addend, parts, _, normalize = forward
    wide, stats, scalars = results
    out, *others = wide
    values = values if addend is None else [*values[:-1], others[0]]

    def like(tensors: list[Tensor]) -> list[Any]:
        return [torch.randn_like(tensor) if passes else None for tensor in tensors]

    upstream = [torch.randn_like(out) for _ in stats]
    later_stats = [torch.stack([each[0], torch.zeros_like(each[0])]) for each in stats[1:]]
    known = (like(values), like(keys))
    emit = normalize and bool(parts)
    return Backward(
        upstream,
        out,
        values,
        keys,
        queries,
        later_stats,
        stats[0],
        scalars,
        *known,
        normalize,
        emit,
    )
