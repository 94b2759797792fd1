"""Depth attention in Triton: two operators of torch, and the autograd function that joins them.

`torch.ops.lrattnres.read` and `torch.ops.lrattnres.read_backward` may be traced, exported and
checkpointed. `read` here is what a model calls; it means the same as `reference.read`.

Gradients between the operators of one pass are not passed on in the usual form. A finished read is
h = Σ_p e^(l_p − L) m_p + …, where m_p and l_p are the mixtures and log-sum-exps of its parts. The
operator that wrote a part needs from the operator that finished it only dh, L and ⟨dh, h⟩, and
these are the same for all parts. So they are returned in place of the gradients of m_p and l_p: one
tensor for all parts, not scaled, and each source's gradient is computed in one pass by the operator
that owns it. Therefore a Part must go to exactly one `read`, and to nothing else.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrattnres.kernels.launch import Launch, fire
from lrattnres.kernels.launches import (
    Backward,
    Gradients,
    backward_launches,
    forward_launch,
    query_launch,
)
from lrattnres.kernels.reference import Part, Reading, check_shapes

SPAN = 128  # tokens over which one program sums the gradient of the queries


@torch.library.custom_op("lrattnres::read", mutates_args=())
def read_op(
    queries: Tensor,
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    addend: Tensor | None,
    parts: Sequence[Tensor],
    part_stats: Sequence[Tensor],
    normalize: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The operator `torch.ops.lrattnres.read`.

    Args:
        queries: [C, r].
        values: K tensors [..., d].
        keys: K tensors [..., r], or none where a key is the last r columns of the value.
        addend: [..., d], added to the last value; None: nothing.
        parts: Mixtures [..., d] of the first query's unfinished reads.
        part_stats: Their statistics, [2, tokens] float32 each.
        normalize: Whether the first read is returned as RMSNorm(h).

    Returns:
        ([out, the last value with the addend if there is one, C - 1 mixtures unless K is 1], stats,
        scalars); the kernel `read_forward` gives their shapes.
    """
    results, launch = plan_read(queries, values, keys, addend, parts, part_stats, normalize)
    fire(launch)
    return results


def plan_read(
    queries: Tensor,
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    addend: Tensor | None,
    parts: Sequence[Tensor],
    part_stats: Sequence[Tensor],
    normalize: bool,
) -> tuple[tuple[list[Tensor], list[Tensor], Tensor], Launch]:
    """Allocates what `read_op` returns, and makes the launch that fills it; same arguments."""
    results = _read_outputs(queries, values, addend)
    return results, forward_launch(
        queries, values, keys, addend, parts, part_stats, normalize, results
    )


def _read_outputs(
    queries: Tensor, values: Sequence[Tensor], addend: Tensor | None
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Allocates what `read_op` returns."""
    sites, tokens = queries.shape[0], values[0].shape[:-1].numel()
    mixtures = sites - 1 if len(values) > 1 else 0
    wide = [
        values[0].new_empty(values[0].shape) for _ in range(1 + (addend is not None) + mixtures)
    ]
    stats = [values[0].new_empty(2, tokens, dtype=torch.float32) for _ in range(sites)]
    return wide, stats, values[0].new_empty(tokens, sites + 1, len(values), dtype=torch.float32)


@read_op.register_fake
def _(queries, values, keys, addend, parts, part_stats, normalize):  # type: ignore[no-untyped-def]
    return _read_outputs(queries, values, addend)


@torch.library.custom_op("lrattnres::read_backward", mutates_args=())
def read_backward_op(
    upstream: Sequence[Tensor],
    out: Tensor,
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    queries: Tensor,
    later_stats: Sequence[Tensor],
    stats: Tensor,
    scalars: Tensor,
    value_in: Sequence[Tensor | None],
    key_in: Sequence[Tensor | None],
    normalize: bool,
    emit: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor, list[Tensor], Tensor]:
    """The operator `torch.ops.lrattnres.read_backward`; its arguments are the fields of `Backward`.

    Returns:
        (d values, d keys, d queries, [dh if `emit`], d stats) in the shapes of what they are
        gradients of. d stats is [2, tokens] float32: L and ⟨dh, h⟩ of the first query.
    """
    given = Backward(
        upstream,
        out,
        values,
        keys,
        queries,
        later_stats,
        stats,
        scalars,
        value_in,
        key_in,
        normalize,
        emit,
    )
    results, launches = plan_backward(given)
    for launch in launches:
        fire(launch)
    partial = launches[-1].arguments["partial"]
    return *results[:2], partial.sum(0).to(queries.dtype), *results[3:]


def plan_backward(given: Backward) -> tuple[Gradients, list[Launch]]:
    """Allocates what `read_backward_op` returns, and makes the launches that fill it.

    The last launch is that of the queries' gradient.
    """
    values, keys, queries, scalars = given.values, given.keys, given.queries, given.scalars
    results = _backward_outputs(values, keys, queries, given.stats, given.emit)
    (tokens, _, count), (sites, rank) = scalars.shape, queries.shape
    beta, partial = (
        scalars.new_empty(tokens, sites, count),
        scalars.new_empty(-(-tokens // SPAN), sites, rank),
    )
    last = query_launch(
        keys or values, beta, partial, 0 if keys else values[0].shape[-1] - rank, SPAN
    )
    return results, [*backward_launches(given, results, beta), last]


def _backward_outputs(
    values: Sequence[Tensor], keys: Sequence[Tensor], queries: Tensor, stats: Tensor, emit: bool
) -> tuple[list[Tensor], list[Tensor], Tensor, list[Tensor], Tensor]:
    """Allocates what `read_backward_op` returns."""
    d_values = [value.new_empty(value.shape) for value in values]
    hidden = [values[0].new_empty(values[0].shape)] if emit else []
    return (
        d_values,
        [key.new_empty(key.shape) for key in keys],
        queries.new_empty(queries.shape),
        hidden,
        torch.empty_like(stats),
    )


@read_backward_op.register_fake
def _(  # type: ignore[no-untyped-def]
    upstream,
    out,
    values,
    keys,
    queries,
    later_stats,
    stats,
    scalars,
    value_in,
    key_in,
    normalize,
    emit,
):
    return _backward_outputs(values, keys, queries, stats, emit)


class _Layout(NamedTuple):
    """How many tensors of each kind there are in the flat arguments and results of `_Read`.

    Attributes:
        values, keys, parts: As given to `read`.
        later: Number of queries after the first.
        addend: Whether the last value has an addend.
        normalize, passes: As given to `read`.
    """

    values: int
    keys: int
    parts: int
    later: int
    addend: bool
    normalize: bool
    passes: bool

    def passed(self) -> tuple[int, int, int]:
        """How many sums (0 or 1), values and keys are returned with gradients."""
        return self.addend, (self.values - self.addend) * self.passes, self.keys * self.passes


class _Read(torch.autograd.Function):
    """`read` on flat tensors, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, layout: _Layout, queries: Tensor, addend: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        values, keys, parts, part_stats = _cut(
            tensors, layout.values, layout.keys, layout.parts, layout.parts
        )
        wide, stats, scalars = torch.ops.lrattnres.read(
            queries, values, keys, addend, parts, part_stats, layout.normalize
        )
        out, mixtures = wide[0], wide[1 + layout.addend :]
        if layout.addend:
            values = [*values[:-1], wide[1]]
        if layout.values == 1:  # the unfinished read of a single source is that source
            mixtures = [values[0].view_as(values[0]) for _ in range(layout.later)]
        ctx.set_materialize_grads(False)
        ctx.layout = layout
        ctx.save_for_backward(queries, out, stats[0], scalars, *values, *keys)
        total = wide[1:2] if layout.addend else []
        if not layout.passes:  # no gradient comes back, and autograd must not make zeros for it
            ctx.mark_non_differentiable(*total)
            return (out, *total, *mixtures, *stats[1:])
        passed = [tensor.view_as(tensor) for tensor in (*values[: len(values) - len(total)], *keys)]
        return (out, *total, *passed, *mixtures, *stats[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        layout = ctx.layout
        queries, out, stats, scalars, *sources = ctx.saved_tensors
        values, keys = _cut(sources, layout.values, layout.keys)
        grad, total_in, value_in, key_in, later, later_stats = _cut(
            gradients, 1, *layout.passed(), layout.later, layout.later
        )
        upstream = [torch.zeros_like(out) if g is None else g for g in (*grad, *later)]
        # An unused read has no gradient: with an infinite log-sum-exp its weights are 0.
        later_stats = [torch.full_like(stats, torch.inf) if s is None else s for s in later_stats]
        d_values, d_keys, d_queries, hidden, d_stats = torch.ops.lrattnres.read_backward(
            upstream,
            out,
            values,
            keys,
            queries,
            later_stats,
            stats,
            scalars,
            [*value_in, *total_in] if layout.passes else [None] * layout.values,
            key_in or [None] * layout.keys,
            layout.normalize,
            layout.normalize and layout.parts > 0,
        )
        dh = hidden[0] if hidden else upstream[0]
        d_addend = d_values[-1] if layout.addend else None
        return (
            None,
            d_queries,
            d_addend,
            *d_values,
            *d_keys,
            *[dh] * layout.parts,
            *[d_stats] * layout.parts,
        )


def _cut(flat: Sequence[Any], *counts: int) -> list[list[Any]]:
    """Cuts a sequence into pieces of the given lengths."""
    pieces, start = [], 0
    for count in counts:
        pieces.append(list(flat[start : start + count]))
        start += count
    assert start == len(flat)
    return pieces


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
    """`reference.read` in Triton; same arguments, but for `scoring`, which is the default one.

    The statistics of a Part are [2, tokens] float32: its log-sum-exp, and zeros.

    Raises:
        ValueError: The inputs are none that the kernels take, or of several dtypes, devices or
            shapes.
    """
    _check(queries, values, keys, addend)
    later = queries.shape[0] - 1
    layout = _Layout(
        len(values), len(keys), len(parts), later, addend is not None, normalize, passes
    )
    mixtures, stats = [part.mixture for part in parts], [part.stats for part in parts]
    out, *rest = _Read.apply(layout, queries, addend, *values, *keys, *mixtures, *stats)
    total, passed, passed_keys, made, made_stats = _cut(rest, *layout.passed(), later, later)
    if not passes:
        passed, passed_keys = list(values[: len(values) - len(total)]), list(keys)
    return Reading(out, (*passed, *total), tuple(passed_keys), tuple(map(Part, made, made_stats)))


def _check(
    queries: Tensor, values: Sequence[Tensor], keys: Sequence[Tensor], addend: Tensor | None
) -> None:
    """Checks what the kernels take for granted.

    Raises:
        ValueError: As `read` does.
    """
    first = values[0]
    if first.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"values are {first.dtype}: the Triton kernels take float32 and bfloat16; write "
            "kernels=reference"
        )
    if keys and len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys for {len(values)} values: write one a source, or none")
    written = values if addend is None else [*values, addend]
    check_shapes(queries.shape[-1], written, keys)
    for tensor in (*written, *keys):
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{tensor.dtype} on {tensor.device} among tensors of {first.dtype} on "
                f"{first.device}"
            )
