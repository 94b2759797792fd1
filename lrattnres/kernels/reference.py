"""Depth attention in plain torch: the definition that every faster kernel is tested against.

A source is a value [..., d] with its key [..., r]. Sources are not stacked, so nothing of width d
is copied. All arithmetic is float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 2.0**-23


def wide(x: Tensor) -> Tensor:
    """x as float32; float64 stays as it is. This is the dtype of all arithmetic here."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, eps: float = EPSILON) -> Tensor:
    """x·rsqrt(mean(x²) + ε) over the last dimension, without a gain.

    Computed in float32 (float64 for float64), returned in the dtype of x.
    """
    return F.rms_norm(wide(x), x.shape[-1:], eps=eps).to(x.dtype)


class Scoring(NamedTuple):
    """How keys are scored. Every kernel computes the defaults, and some compute more.

    Attributes:
        normalize: Whether the logit is query · RMSNorm(key), or query · key.
        heads: Query, key and value are cut into this number of equal slices. Each slice has a
            softmax of its own over the sources. The mixtures are joined again.
        whole: Whether a key is normalised before it is cut, or each slice by itself.
    """

    normalize: bool = True
    heads: int = 1
    whole: bool = False

    def split(self, x: Tensor) -> Tensor:
        """[..., width] as [..., heads, width / heads]; with one head, x as it is."""
        return x if self.heads == 1 else x.unflatten(-1, (self.heads, -1))

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`."""
        return x if self.heads == 1 else x.flatten(-2)


PLAIN = Scoring()


def depth_weights(query: Tensor, keys: Sequence[Tensor], scoring: Scoring = PLAIN) -> Tensor:
    """α = softmax over the sources of query · RMSNorm(key), without scale or bias.

    Args:
        query: [r], or [..., r] where it depends on the input.
        keys: One [..., r] for each source.
        scoring: How keys are scored.

    Returns:
        float32 [..., sources], or [..., heads, sources] with several heads.
    """
    return torch.softmax(depth_logits(query, keys, scoring), dim=-1)


def depth_logits(query: Tensor, keys: Sequence[Tensor], scoring: Scoring = PLAIN) -> Tensor:
    """The logits whose softmax is `depth_weights`, with the same arguments and shape."""
    logits, query = [], scoring.split(query)
    for whole in map(wide, keys):
        key = scoring.split(whole)
        # The dot product is scaled, not the key: so no normalised key is kept.
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
    """h = Σ_i α_i v_i over the sources.

    Args:
        query: As in `depth_weights`.
        keys: As in `depth_weights`.
        values: One [..., d] for each source.
        scoring: How keys are scored.

    Returns:
        float32 [..., d].
    """
    return scoring.join(
        weighted_sum(depth_weights(query, keys, scoring), list(map(scoring.split, values)))
    )


def weighted_sum(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Σ_i w_i v_i.

    Args:
        weights: float32 [..., K].
        values: K tensors [..., d].

    Returns:
        float32 [..., d].
    """
    first, *others = weights.unsqueeze(-1).unbind(-2)
    mixture = first * wide(values[0])
    for weight, value in zip(others, values[1:], strict=True):
        mixture = torch.addcmul(mixture, weight, wide(value))
    return mixture


def check_shapes(rank: int, values: Sequence[Tensor], keys: Sequence[Tensor]) -> None:
    """Checks that tensors are the sources of one read; nothing is broadcast.

    Args:
        rank: r, width of the queries.
        values: At least one tensor [..., d].
        keys: Tensors [..., r]; none: a key is the last r coordinates of a value.

    Raises:
        ValueError: A shape does not fit.
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
    """An unfinished read over some of the sources.

    Attributes:
        mixture: [..., d], Σ α_i v_i over these sources, or [..., heads, d / heads].
        stats: What is needed to finish it. The layout is that of the kernel that wrote it; here the
            log-sum-exp of the logits, float32 [...], or [..., heads].
    """

    mixture: Tensor
    stats: Tensor


class Reading(NamedTuple):
    """What `read` returns.

    Attributes:
        out: [..., d], the finished read of the first query.
        values: The sources as later operators must see them, the addend included.
        keys: The same of the keys; empty if none were given.
        parts: One Part for each later query.
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
    """Reads for consecutive sites: finishes the read of the first, and begins those of the others.

    Args:
        queries: [C, r], or [C, ..., r] where they depend on the input.
        values: K tensors [..., d]; `addend` is still to be added to the last.
        keys: K tensors [..., r]; none: a key is the last r coordinates of a value.
        addend: [..., d], added to the last value; None: nothing.
        parts: What the first query has read of other sources already.
        normalize: Whether `out` is RMSNorm(h), or h.
        passes: Whether a later operator reads the returned sources too, so that gradients come back
            through them. Plain torch does not need to know it.
        scoring: How keys are scored.

    Returns:
        The finished read in the dtype of the values, the sources, and a Part for each later query.
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
