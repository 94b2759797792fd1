"""Depth attention in plain torch: the truth that every faster kernel is held against.

A source is one tensor [..., d] with its key [..., r]; sources are never stacked, so nothing of
width d is copied. All arithmetic is float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 2.0**-23


def wide(x: Tensor) -> Tensor:
    """x in the type of all arithmetic here: float64 stays, everything else is float32."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, eps: float = EPSILON) -> Tensor:
    """x·rsqrt(mean(x²) + ε) over the last dimension, without a gain; computed in float32, returned
    in x's dtype.
    """
    return F.rms_norm(wide(x), x.shape[-1:], eps=eps).to(x.dtype)


class Scoring(NamedTuple):
    """How a key is scored; the defaults are what every kernel computes.

    Args:
        normalize: score RMSNorm(key), else the key.
        heads: query, key and value are cut into as many equal slices, each with a softmax of its
            own over the sources; the mixtures lie side by side.
        whole: a key is normalised before it is cut; else each slice by itself.
    """

    normalize: bool = True
    heads: int = 1
    whole: bool = False

    def split(self, x: Tensor) -> Tensor:
        """[..., heads, width / heads] of [..., width]; one head is left without a dimension of its
        own.
        """
        return x if self.heads == 1 else x.unflatten(-1, (self.heads, -1))

    def join(self, x: Tensor) -> Tensor:
        """What `split` cut."""
        return x if self.heads == 1 else x.flatten(-2)


PLAIN = Scoring()


def depth_weights(query: Tensor, keys: Sequence[Tensor], scoring: Scoring = PLAIN) -> Tensor:
    """α = softmax over sources of query · RMSNorm(key), with neither scale nor bias.

    query: [r], or [..., r] where it depends on the input; keys: one [..., r] a source. Returns
    float32 [..., number of sources], or [..., heads, number of sources] for several heads.
    """
    return torch.softmax(depth_logits(query, keys, scoring), dim=-1)


def depth_logits(query: Tensor, keys: Sequence[Tensor], scoring: Scoring = PLAIN) -> Tensor:
    """query · RMSNorm(key) of every source: float32 [..., number of sources], as in
    `depth_weights`.
    """
    logits, query = [], scoring.split(query)
    for whole in map(wide, keys):
        key = scoring.split(whole)
        # The dot product is scaled, not the key: only a scalar a token, and no normalised key is
        # kept.
        scale = None
        if scoring.normalize:
            part = whole if scoring.whole else key
            scale = torch.rsqrt(torch.linalg.vecdot(part, part) / part.shape[-1] + EPSILON)
            if scoring.whole and scoring.heads > 1:
                scale = scale.unsqueeze(-1)
        logit = (
            key @ query.to(key.dtype)
            if query.dim() == 1
            else torch.linalg.vecdot(key, query.to(key.dtype))
        )
        logits.append(logit if scale is None else logit * scale)
    return torch.stack(logits, dim=-1)


def depth_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scoring: Scoring = PLAIN
) -> Tensor:
    """Σ α_i v_i over the sources; values: one [..., d] a source. Returns [..., d] in float32."""
    return scoring.join(
        weighted_sum(depth_weights(query, keys, scoring), list(map(scoring.split, values)))
    )


def weighted_sum(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    first, *others = weights.unsqueeze(-1).unbind(-2)
    mixture = first * wide(values[0])
    for weight, value in zip(others, values[1:], strict=True):
        mixture = torch.addcmul(mixture, weight, wide(value))
    return mixture


def check_shapes(rank: int, values: Sequence[Tensor], keys: Sequence[Tensor]) -> None:
    """Raises ValueError for tensors that are not the sources of one read by queries of width
    `rank`: nothing is broadcast.
    """
    first = values[0].shape
    dim = first[-1] if first else 0
    if not keys and not 1 <= rank <= dim:
        raise ValueError(
            f"queries of width {rank}: a key is the tail of a value, so write between 1 and {dim}"
        )
    for name, tensors, shape in (("values", values, first), ("keys", keys, (*first[:-1], rank))):
        for tensor in tensors:
            if tensor.shape != shape:
                raise ValueError(f"{name}: {tuple(tensor.shape)} among tensors of {tuple(shape)}")


class Part(NamedTuple):
    """An unfinished read over some sources: their mixture [..., d], and statistics of which only
    the kernel that wrote them knows the layout (here the log-sum-exp of their logits, [...]).
    """

    mixture: Tensor
    stats: Tensor


class Reading(NamedTuple):
    """What `read` returns: the first query's read, the sources as later operators must see them,
    one Part a later query.
    """

    out: Tensor
    values: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    parts: tuple[Part, ...]


def read(
    queries: Tensor,
    values: Sequence[Tensor],
    keys: Sequence[Tensor] = (),
    addend: Tensor | None = None,
    parts: Sequence[Part] = (),
    *,
    normalize: bool,
    passes: bool,
    scoring: Scoring = PLAIN,
) -> Reading:
    """Depth attention for consecutive sites at once: finishes the read of the first, prepares those
    of the others.

    queries [C, r], or [C, ..., r] where they depend on the input; values: K tensors [..., d], the
    last one lacking `addend` if there is one; keys: as many [..., r], or none where the key is the
    last r coordinates of the value. `parts`: what the first query has read of other sources
    already; of several heads (`scoring`) their mixtures are [..., heads, d / heads]. Returns
    RMSNorm(h) if `normalize`, else h, in the type of the values. `passes`: whether a later operator
    reads the returned sources too, so that gradients will come through them; plain torch need not
    know.
    """
    if addend is not None:
        values = (*values[:-1], addend + values[-1])
    rank = queries.shape[-1]
    made = keys or [value[..., value.shape[-1] - rank :] for value in values]
    logits = [depth_logits(query, made, scoring) for query in queries.unbind()]
    mixed = list(map(scoring.split, values))
    all_logits = torch.cat([logits[0], *(part.stats.unsqueeze(-1) for part in parts)], dim=-1)
    hidden = scoring.join(
        weighted_sum(torch.softmax(all_logits, dim=-1), [*mixed, *(part.mixture for part in parts)])
    )
    out = (rms_norm(hidden) if normalize else hidden).to(values[0].dtype)
    prepared = tuple(
        Part(weighted_sum(torch.softmax(s, dim=-1), mixed), s.logsumexp(-1)) for s in logits[1:]
    )
    return Reading(out, tuple(values), tuple(keys), prepared)
