"""Depth attention for one token at a time: sources are stacked, and one product serves all sites.

With many tokens a stack is one more copy of everything. With one token that copy is cheap, and the
number of operators costs most: a handful here, where `reference.read` needs several for every
source and site.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lrattnres.kernels.backends import DepthKernels
from lrattnres.kernels.reference import EPSILON, Part, Reading, rms_norm, wide


def read(
    queries: Tensor,
    values: Sequence[Tensor],
    keys: Sequence[Tensor] = (),
    addend: Tensor | None = None,
    parts: Sequence[Part] = (),
    *,
    normalize: bool,
    passes: bool,
) -> Reading:
    """`reference.read` with the default `Scoring`: the same arguments, results and arithmetic.

    The statistics of a Part are the same too.
    """
    if addend is not None:
        values = (*values[:-1], addend + values[-1])
    count = len(values)
    rows = _stack([*values, *(part.mixture for part in parts)])  # [..., K + parts, d]
    stack = rows[..., :count, :] if parts else rows
    made = _stack(keys) if keys else stack[..., stack.shape[-1] - queries.shape[-1] :]
    scale = torch.rsqrt(torch.linalg.vecdot(made, made) / made.shape[-1] + EPSILON)
    logits = made @ queries.to(made.dtype).T * scale.unsqueeze(-1)
    logits = logits.transpose(-1, -2)  # [..., C, K]
    first = logits[..., 0, :]
    if parts:
        first = torch.cat([first, *(part.stats.unsqueeze(-1) for part in parts)], dim=-1)
    hidden = (torch.softmax(first, dim=-1).unsqueeze(-2) @ rows).squeeze(-2)
    out = (rms_norm(hidden) if normalize else hidden).to(values[0].dtype)
    prepared: tuple[Part, ...] = ()
    if len(queries) > 1:
        later = logits[..., 1:, :]
        mixtures, stats = torch.softmax(later, dim=-1) @ stack, later.logsumexp(-1)
        prepared = tuple(map(Part, mixtures.unbind(-2), stats.unbind(-1)))
    return Reading(out, tuple(values), tuple(keys), prepared)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return wide(torch.stack(tuple(tensors), dim=-2))


STACKED = DepthKernels("stacked", read, True, lambda device, dtype: None, plain=True)
