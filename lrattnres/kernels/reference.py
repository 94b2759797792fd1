"""Depth attention in plain torch: the truth that every faster kernel is held against.

A source is one tensor [..., d] with its key [..., r]; sources are never stacked, so nothing of width d is copied.
All arithmetic is float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 2.0**-23


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor) -> Tensor:
    """x·rsqrt(mean(x²) + 2⁻²³) over the last dimension, without a gain; computed in float32, returned in x's dtype."""
    return F.rms_norm(_wide(x), x.shape[-1:], eps=EPSILON).to(x.dtype)


def depth_weights(query: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """α = softmax over sources of query · RMSNorm(key), with neither scale nor bias.

    query: [r]; keys: one [..., r] a source. Returns [..., number of sources] in float32.
    """
    logits = []
    for key in map(_wide, keys):
        # The dot product comes first, so that only a scalar a token is scaled, and no normalised key is kept.
        mean_square = torch.linalg.vecdot(key, key) / key.shape[-1]
        logits.append(key @ query.to(key.dtype) * torch.rsqrt(mean_square + EPSILON))
    return torch.softmax(torch.stack(logits, dim=-1), dim=-1)


def depth_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Σ α_i v_i over the sources; values: one [..., d] a source. Returns [..., d] in float32."""
    weights = depth_weights(query, keys).unsqueeze(-1).unbind(-2)
    mixture = weights[0] * _wide(values[0])
    for weight, value in zip(weights[1:], values[1:], strict=True):
        mixture = torch.addcmul(mixture, weight, _wide(value))
    return mixture
