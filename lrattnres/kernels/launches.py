"""The launch of each kernel: what it is given, and the sizes of its tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from lrattnres.kernels.launch import Launch, chunk_for, group, power, rows, rows_for, warps_for

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
    """`read_forward`, writing into results: ([out, total if there is an addend, mixtures], stats,
    scalars).
    """
    wide, stats, scalars = results
    out, *others = map(rows, wide)
    total, mixtures = (out, others) if addend is None else (others[0], others[1:])
    dim, (tokens, _, count), (sites, rank) = values[0].shape[-1], scalars.shape, queries.shape
    size = rows_for(tokens)
    tensors = {
        "values": group(values),
        "keys": group(keys),
        "addend": group([values[-1] if addend is None else addend]),
        "parts": group(parts),
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
    tiles["CHUNK"] = chunk_for(
        dim, len(mixtures), beside=count
    )  # where each source lies is known all the while
    return Launch(
        "read_forward", (-(-tokens // size),), tensors | sizes | modes | tiles, warps_for(dim)
    )


class Backward(NamedTuple):
    """What the operator `read_backward` is given, in its order: see the kernel of that name."""

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
    """`read_backward`, writing into results (d values, d keys, not d queries, [dh if `emit`], d
    stats) and beta.

    The sources may be some of `total`; scalars and beta then begin at the first of them, without
    being cut to size.
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
        "upstream": group(given.upstream),
        "out": group([given.out]),
        "values": group(values),
        "keys": group(keys),
        "queries": given.queries.float().contiguous(),
        "later_stats": tuple(given.later_stats),
        "stats": given.stats,
        "scalars": given.scalars,
        "value_in": _with_stand_ins(value_in, values),
        "key_in": _with_stand_ins(key_in, keys),
        "d_hidden": rows(hidden[0] if given.emit else d_values[0]),
        "d_stats": d_stats,
        "d_values": group(d_values),
        "d_keys": group(d_keys),
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
    whole = not keys and rank == dim  # then a second coefficient a source and site is held
    wide = max(1, min(count, 8, 64 // ((1 + whole) * sites + 4)))
    tiles |= {"CHUNK": chunk_for(dim, together * sites), "GROUP": together}
    tiles |= {"WIDE_CHUNK": chunk_for(dim, 2 * wide), "WIDE_GROUP": wide}
    return Launch(
        "read_backward", (-(-tokens // size),), tensors | sizes | modes | tiles, warps_for(dim)
    )


def query_launch(
    keys: Sequence[Tensor], beta: Tensor, partial: Tensor, offset: int, span: int
) -> Launch:
    """`query_gradient`; partial: [programs, C, r], one program each `span` tokens; offset: of the
    key in its tensor.
    """
    (tokens, sites, count), rank = beta.shape, partial.shape[-1]
    columns = min(64, power(rank))
    tensors = {"keys": group(keys), "beta": beta, "partial": partial, "tokens": tokens}
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


MOST_SOURCES = 16  # in one launch of the backward kernel: its code, and the time to compile it, grow with their number


def backward_launches(given: Backward, results: Gradients, beta: Tensor) -> Iterator[Launch]:
    """`read_backward` for any number of sources, in slices; only the first writes dh, all write the
    same statistics.
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
    """Sources whose gradients are made together, sharing one look at the gradients of the sites."""
    return max(1, min(count, 4, 26 // sites))


def _with_stand_ins(
    given: Given, others: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """A pointer must point somewhere, even where a bit says that it is not read."""
    return group(
        [other if tensor is None else tensor for tensor, other in zip(given, others, strict=True)]
    )


def _bits(given: Given) -> int:
    return sum(1 << i for i, tensor in enumerate(given) if tensor is not None)
