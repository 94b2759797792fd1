"""The launches of the three kernels: their arguments and tile sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from lrattnres.kernels.launch import Launch, chunk_for, pointers, power, rows, rows_for, warps_for

Given = Sequence[Tensor | None]


def forward_launch(
    queries: Tensor,
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    addend: Tensor | None,
    parts: Sequence[Tensor],
    part_stats: Sequence[Tensor],
    normalize: bool,
    results: tuple[Sequence[Tensor], Sequence[Tensor], Tensor],
) -> Launch:
    """The launch of the kernel `read_forward`, whose docstring gives the shapes.

    Args:
        queries: [C, r].
        values: K tensors [..., d].
        keys: K tensors [..., r], or none where a key is the last r columns of the value.
        addend: What is added to the last value; None: nothing.
        parts: Mixtures [..., d] of the first query's unfinished reads.
        part_stats: Their statistics, [2, tokens] float32 each.
        normalize: Whether the first read is returned as RMSNorm(h).
        results: Tensors to write to: ([out, the sum if there is an addend, mixtures], stats,
            scalars).
    """
    wide, stats, scalars = results
    out, *others = map(rows, wide)
    total, mixtures = (out, others) if addend is None else (others[0], others[1:])
    dim, (tokens, _, count), (sites, rank) = values[0].shape[-1], scalars.shape, queries.shape
    size = rows_for(tokens)
    tensors = {
        "values": pointers(values),
        "keys": pointers(keys),
        "addend": pointers([values[-1] if addend is None else addend]),
        "parts": pointers(parts),
        "part_stats": tuple(part_stats),
        "queries": queries.float().contiguous(),
        "out": out,
        "total": total,
        "mixtures": tuple(mixtures),
        "stats": tuple(stats),
        "scalars": scalars,
        "weights": scalars.new_empty(tokens, sites, count),
        "tokens": tokens,
    }
    sizes = {"D": dim, "RANK": rank, "K": count, "C": sites, "P": len(parts)}
    modes = {
        "SEPARATE": bool(keys),
        "ADDEND": addend is not None,
        "NORMALIZE": normalize,
        "MIXTURES": bool(mixtures),
    }
    tiles = {"ROWS": size, "BLOCK_D": power(dim), "BLOCK_R": power(rank), "BLOCK_K": power(count)}
    tiles["CHUNK"] = chunk_for(dim, len(mixtures), beside=count)  # a pointer a source is kept
    return Launch(
        "read_forward", (-(-tokens // size),), tensors | sizes | modes | tiles, warps_for(dim)
    )


class Backward(NamedTuple):
    """The arguments of the operator `read_backward`, in its order.

    Attributes:
        upstream: C tensors [..., d]: the gradient of `out`, then those of the later queries' reads.
        out: [..., d], as `read` returned it.
        values: K tensors [..., d], the addend included.
        keys: K tensors [..., r], or none.
        queries: [C, r].
        later_stats: C - 1 tensors [2, tokens] float32: the log-sum-exp of the finished read of each
            later query, and ⟨dh, h⟩ of it.
        stats: [2, tokens] float32 of the first query, as `read` returned it.
        scalars: [tokens, C + 1, K] float32, as `read` returned them.
        value_in: Gradients of the values from later operators, [..., d] each; None where there is
            none.
        key_in: The same of the keys.
        normalize: Whether `out` is RMSNorm(h).
        emit: Whether the gradient of h is returned, for the parts of the first query.
    """

    upstream: Sequence[Tensor]
    out: Tensor
    values: Sequence[Tensor]
    keys: Sequence[Tensor]
    queries: Tensor
    later_stats: Sequence[Tensor]
    stats: Tensor
    scalars: Tensor
    value_in: Given
    key_in: Given
    normalize: bool
    emit: bool


Gradients = tuple[list[Tensor], list[Tensor], Tensor, list[Tensor], Tensor]


def _backward_launch(given: Backward, results: Gradients, beta: Tensor, total: int) -> Launch:
    """The launch of the kernel `read_backward` for at most MOST_SOURCES sources.

    Args:
        given: Arguments of the operator. If its sources are some of `total`, its `scalars` begin at
            the first of them and are not cut at the last.
        results: Tensors to write to: (d values, d keys, d queries, [dh if `emit`], d stats). The
            gradient of the queries is not written here.
        beta: [tokens, C, total] float32 to write to; it begins at the first source, as `scalars`
            do.
        total: Number of all sources of the operator.
    """
    values, keys, value_in, key_in = given.values, given.keys, given.value_in, given.key_in
    d_values, d_keys, _, hidden, d_stats = results
    dim, tokens, count, (sites, rank) = (
        values[0].shape[-1],
        given.scalars.shape[0],
        len(values),
        given.queries.shape,
    )
    size, together = rows_for(tokens), sources_for(count, sites)
    tensors = {
        "upstream": pointers(given.upstream),
        "out": pointers([given.out]),
        "values": pointers(values),
        "keys": pointers(keys),
        "queries": given.queries.float().contiguous(),
        "later_stats": tuple(given.later_stats),
        "stats": given.stats,
        "scalars": given.scalars,
        "value_in": _with_stand_ins(value_in, values),
        "key_in": _with_stand_ins(key_in, keys),
        "d_hidden": rows(hidden[0] if given.emit else d_values[0]),
        "d_stats": d_stats,
        "d_values": pointers(d_values),
        "d_keys": pointers(d_keys),
        "beta": beta,
        "tokens": tokens,
    }
    sizes = {"D": dim, "RANK": rank, "K": count, "TOTAL": total, "C": sites}
    modes = {
        "SEPARATE": bool(keys),
        "NORMALIZE": given.normalize,
        "EMIT": given.emit,
        "VALUE_IN": _bits(value_in),
        "KEY_IN": _bits(key_in),
    }
    tiles = {"ROWS": size, "BLOCK_D": power(dim), "BLOCK_R": power(rank)}
    whole = not keys and rank == dim  # then each source and site has a second coefficient
    wide = max(1, min(count, 8, 64 // ((1 + whole) * sites + 4)))
    tiles |= {"CHUNK": chunk_for(dim, together * sites), "GROUP": together}
    tiles |= {"WIDE_CHUNK": chunk_for(dim, 2 * wide), "WIDE_GROUP": wide}
    return Launch(
        "read_backward", (-(-tokens // size),), tensors | sizes | modes | tiles, warps_for(dim)
    )


def query_launch(
    keys: Sequence[Tensor], beta: Tensor, partial: Tensor, offset: int, span: int
) -> Launch:
    """The launch of the kernel `query_gradient`.

    Args:
        keys: K tensors that hold the keys.
        beta: [tokens, C, K] float32, from `read_backward`.
        partial: [programs, C, r] float32 to write to; a program for every `span` tokens.
        offset: Column at which a key begins in its tensor.
        span: Tokens of one program.
    """
    (tokens, sites, count), rank = beta.shape, partial.shape[-1]
    columns = min(64, power(rank))
    tensors = {"keys": pointers(keys), "beta": beta, "partial": partial, "tokens": tokens}
    sizes = {
        "OFFSET": offset,
        "RANK": rank,
        "K": count,
        "C": sites,
        "SPAN": span,
        "ROWS": 16,
        "COLUMNS": columns,
    }
    return Launch(
        "query_gradient",
        (partial.shape[0], -(-rank // columns)),
        tensors | sizes,
        4 if columns >= 32 else 1,
    )


# Sources of one launch of the backward kernel: its code and compile time grow with their number.
MOST_SOURCES = 16


def backward_launches(given: Backward, results: Gradients, beta: Tensor) -> Iterator[Launch]:
    """The launches of `read_backward` for any number of sources, at most MOST_SOURCES in each.

    Only the first writes dh. All write the same statistics. The arguments are those of
    `_backward_launch`.
    """
    d_values, d_keys, d_queries, hidden, d_stats = results
    for start in range(0, len(given.values), MOST_SOURCES):
        cut = slice(start, start + MOST_SOURCES)
        some = given._replace(
            values=given.values[cut],
            keys=given.keys[cut],
            scalars=given.scalars[..., start:],
            value_in=given.value_in[cut],
            key_in=given.key_in[cut],
            emit=given.emit and start == 0,
        )
        slots = (d_values[cut], d_keys[cut], d_queries, hidden, d_stats)
        yield _backward_launch(some, slots, beta[..., start:], len(given.values))


def sources_for(count: int, sites: int) -> int:
    """How many sources one pass over the gradients of the sites serves.

    Args:
        count: Number of sources.
        sites: Number of queries.
    """
    return max(1, min(count, 4, 26 // sites))


def _with_stand_ins(
    given: Given, others: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """`given` for a kernel: a pointer is needed even where the kernel does not read it."""
    return pointers(
        [other if tensor is None else tensor for tensor, other in zip(given, others, strict=True)]
    )


def _bits(given: Given) -> int:
    """Bit i is set where tensor i is there."""
    return sum(1 << i for i, tensor in enumerate(given) if tensor is not None)
