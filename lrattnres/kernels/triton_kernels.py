"""The three Triton kernels of depth attention: `read_forward`, `read_backward`, `query_gradient`.

A program computes ROWS tokens. Arithmetic is float32, and sources are not stacked.

One operator reads K sources v_i with keys k_i, which it *owns*, by C queries q_c of consecutive
sites. For the first query there are also P parts. A part is an unfinished read of the first query
over sources that other operators own: a mixture m_p, and the log-sum-exp l_p of its logits.

    s_ic = q_c · k_i · rsqrt(mean(k_i²) + ε)

    first query:    h = Σ_i e^(s_i0 − L) v_i + Σ_p e^(l_p − L) m_p
    later queries:  m_c = Σ_i e^(s_ic − l_c) v_i,   l_c = log Σ_i e^(s_ic)

L is the log-sum-exp over all sources and parts. What is written for the first query is RMSNorm(h),
or h itself. The key of a source is its last RANK columns (SEPARATE=False), or a tensor of its own.
The last source may be given as two summands. Their sum, rounded to their dtype, is then written as
well.

An argument that stands for several tensors is a pair: a tuple of pointers, and a tuple of strides
from token to token, in elements. `scalars` [tokens, C + 1, K] are the logits s_ic, and in the last
row rsqrt(mean(k_i²) + ε). A mask is None where it would be true everywhere: with one token a
program and a power of two of columns it would cost as much as the arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

EPSILON = tl.constexpr(2.0**-23)


@triton.jit
def _get(pointer, mask):
    """The value at a pointer; 0 where the mask is false."""
    return tl.load(pointer) if mask is None else tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def _load(tensors, i: tl.constexpr, row, column, mask):
    """[ROWS, columns] float32 of tensor i of an argument that stands for several."""
    return _get(tensors[0][i] + row[:, None] * tensors[1][i] + column[None, :], mask).to(tl.float32)


@triton.jit
def _inside(live, column, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """The mask of the elements of a tile that exist; None: all do.

    `live` [ROWS] says which rows exist, None: all. EVEN says that all columns do.
    """
    if live is None:
        mask = None if EVEN else (column < WIDTH)[None, :]
    else:
        mask = live[:, None] & (column < WIDTH)[None, :]
    return mask


@triton.jit
def _source(values, addend, i: tl.constexpr, LAST: tl.constexpr, row, column, mask):
    """Source i as float32.

    Source LAST gets its addend, and the sum is rounded to the dtype in which it is written.
    """
    x = _load(values, i, row, column, mask)
    if i == LAST:
        x = (
            (x + _load(addend, 0, row, column, mask))
            .to(values[0][i].dtype.element_ty)
            .to(tl.float32)
        )
    return x


@triton.jit
def read_forward(
    values, keys, addend, parts, part_stats, queries, out, total, mixtures, stats, scalars,
    weights, tokens,
    D: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
    SEPARATE: tl.constexpr, ADDEND: tl.constexpr, NORMALIZE: tl.constexpr, MIXTURES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes what one operator reads.

    Written, of the dtype of the values: out [tokens, D]; mixtures, C−1 × [tokens, D] (if MIXTURES);
    total [tokens, D], the last source with its addend (if ADDEND). Written in float32: scalars
    [tokens, C + 1, K]; stats, C × [2, tokens]: the log-sum-exp, and below it 1/rms(h) for the first
    query, zero for the others. weights [tokens, C, K] float32 is scratch memory.
    """
    LAST: tl.constexpr = K - 1 if ADDEND else -1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = None if ROWS == 1 else row < tokens
    _logits(
        values, keys, addend, queries, scalars, row, live, D, RANK, K, C, SEPARATE, LAST, BLOCK_R
    )
    tl.debug_barrier()  # every thread reads the scalars that one thread wrote
    first = _weights(part_stats, stats, scalars, weights, row, live, tokens, K, C, P, ROWS, BLOCK_K)
    tl.debug_barrier()

    column = tl.arange(0, BLOCK_D)
    inside = _inside(live, column, D, D == BLOCK_D)
    h = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for p in tl.static_range(P):
        h += tl.exp(_get(part_stats[p] + row, live) - first)[:, None] * _load(
            parts, p, row, column, inside
        )
    for i in tl.static_range(K):
        v = _source(values, addend, i, LAST, row, column, inside)
        h += _get(weights + row * C * K + i, live)[:, None] * v
        if i == LAST:
            tl.store(total + row[:, None] * D + column[None, :], v, mask=inside)
    scale = tl.rsqrt(tl.sum(h * h, 1) / D + EPSILON)
    tl.store(stats[0] + tokens + row, scale, mask=live)
    if NORMALIZE:
        h = h * scale[:, None]
    tl.store(out + row[:, None] * D + column[None, :], h, mask=inside)
    if MIXTURES:
        _mixtures(values, addend, mixtures, weights, row, live, D, K, C, LAST, ROWS, BLOCK_D, CHUNK)


@triton.jit
def _logits(
    values, keys, addend, queries, scalars, row, live,
    D: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    SEPARATE: tl.constexpr, LAST: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Writes s_ic of every owned source and query, and 1/rms of every key."""
    column = tl.arange(0, BLOCK_R)
    inside = _inside(live, column, RANK, RANK == BLOCK_R)
    for i in tl.static_range(K):
        k = (
            _load(keys, i, row, column, inside)
            if SEPARATE
            else _source(values, addend, i, LAST, row, D - RANK + column, inside)
        )
        scale = tl.rsqrt(tl.sum(k * k, 1) / RANK + EPSILON)
        tl.store(scalars + (row * (C + 1) + C) * K + i, scale, mask=live)
        for c in tl.static_range(C):
            q = _get(
                queries + c * RANK + column[None, :], _inside(None, column, RANK, RANK == BLOCK_R)
            )
            tl.store(scalars + (row * (C + 1) + c) * K + i, tl.sum(k * q, 1) * scale, mask=live)


@triton.jit
def _weights(
    part_stats, stats, scalars, weights, row, live, tokens,
    K: tl.constexpr, C: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes the log-sum-exp and the weights of every query.

    Returns the log-sum-exp of the first query, which includes its parts.
    """
    source = tl.arange(0, BLOCK_K)
    known = (source < K)[None, :] if live is None else live[:, None] & (source < K)[None, :]
    first = tl.zeros([ROWS], tl.float32)
    for c in tl.static_range(C):
        # A row beyond the last token has logits of zero: finite, and never stored.
        s = tl.load(
            scalars + (row[:, None] * (C + 1) + c) * K + source[None, :], mask=known, other=0.0
        )
        s = tl.where((source < K)[None, :], s, float("-inf"))
        top = tl.max(s, 1)
        lse = top + tl.log(tl.sum(tl.exp(s - top[:, None]), 1))
        if c == 0:
            for p in tl.static_range(P):
                other = _get(part_stats[p] + row, live)
                high = tl.maximum(lse, other)
                lse = high + tl.log(tl.exp(lse - high) + tl.exp(other - high))
            first = lse
        else:
            tl.store(stats[c] + tokens + row, tl.zeros([ROWS], tl.float32), mask=live)
        tl.store(stats[c] + row, lse, mask=live)
        tl.store(
            weights + (row[:, None] * C + c) * K + source[None, :],
            tl.exp(s - lse[:, None]),
            mask=known,
        )
    return first


@triton.jit
def _mixtures(
    values, addend, mixtures, weights, row, live,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    LAST: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes m_c of all later queries; each source is read once, in chunks of columns."""
    for start in range(0, BLOCK_D, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = _inside(live, column, D, D == BLOCK_D)
        sums = ()
        for _ in tl.static_range(1, C):
            sums += (tl.zeros([ROWS, CHUNK], tl.float32),)
        for i in tl.static_range(K):
            v = _source(values, addend, i, LAST, row, column, inside)
            grown = ()
            for c in tl.static_range(1, C):
                grown += (sums[c - 1] + _get(weights + (row * C + c) * K + i, live)[:, None] * v,)
            sums = grown
        for c in tl.static_range(1, C):
            tl.store(mixtures[c - 1] + row[:, None] * D + column[None, :], sums[c - 1], mask=inside)


@triton.jit
def read_backward(
    upstream, out, values, keys, queries, later_stats, stats, scalars, value_in, key_in,
    d_hidden, d_stats, d_values, d_keys, beta, tokens,
    D: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr, TOTAL: tl.constexpr, C: tl.constexpr,
    SEPARATE: tl.constexpr, NORMALIZE: tl.constexpr, EMIT: tl.constexpr,
    VALUE_IN: tl.constexpr, KEY_IN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, WIDE_CHUNK: tl.constexpr, WIDE_GROUP: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of every owned source, added to that from later operators.

    With α_ic = e^(s_ic − L_c), and g_c the gradient of the finished h of query c:

        dv_i = Σ_c α_ic g_c
        ds_ic = α_ic (⟨g_c, v_i⟩ − ⟨g_c, h_c⟩)
        dk_i follows from ds_ic through the norm of the key

    upstream: the gradient of `out`, then g_c of the later queries. later_stats: C−1 × [2, tokens],
    L_c and ⟨g_c, h_c⟩. Bit i of VALUE_IN and KEY_IN says whether value_in and key_in hold a
    gradient of source i from later operators.

    The same statistics of the first query go to d_stats, and g_0 to d_hidden (if EMIT), for the
    operators that own its parts. beta [tokens, C, TOTAL] float32 is ds_ic·rsqrt(mean(k_i²) + ε);
    `query_gradient` reads it. The K sources may be some of TOTAL: rows of scalars and beta have
    TOTAL entries.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = None if ROWS == 1 else row < tokens
    column = tl.arange(0, BLOCK_D)
    inside = _inside(live, column, D, D == BLOCK_D)
    g = _load(upstream, 0, row, column, inside)
    h = _load(out, 0, row, column, inside)
    scale = _get(stats + tokens + row, live)
    along, inner = tl.zeros_like(scale), tl.sum(g * h, 1)
    if NORMALIZE:
        # g_0 = (g − out·mean(g·out))/rms(h). So ⟨g_0, h⟩ is this, and not zero, because of ε and
        # of the rounding of out.
        along = inner / D
        inner = along * tl.sum(tl.where(column < D, 1.0 - h * h, 0.0), 1)
    if EMIT:
        tl.store(
            d_hidden + row[:, None] * D + column[None, :],
            (g - h * along[:, None]) * scale[:, None],
            mask=inside,
        )
    tl.store(d_stats + row, _get(stats + row, live), mask=live)
    tl.store(d_stats + tokens + row, inner, mask=live)
    tl.debug_barrier()
    finished = (along, scale, out)
    all_stats = (d_stats,) + later_stats  # noqa: RUF005 — no unpacking in the kernel language
    for base in tl.static_range(0, K, GROUP):
        _score_gradients(
            upstream, finished, values, all_stats, scalars, beta, row, live, tokens,
            D, K, TOTAL, C, NORMALIZE, ROWS, BLOCK_D, CHUNK, base, GROUP,
        )  # fmt: skip
    tl.debug_barrier()
    for base in tl.static_range(0, K, WIDE_GROUP):
        _value_gradients(
            upstream, finished, values, queries, all_stats, scalars, beta, value_in, d_values,
            row, live, D, RANK, K, TOTAL, C, SEPARATE, NORMALIZE, VALUE_IN, ROWS, BLOCK_D,
            WIDE_CHUNK, base, WIDE_GROUP,
        )  # fmt: skip
    if SEPARATE or RANK < D:
        for i in tl.static_range(K):
            _key_gradient(
                upstream, finished, values, keys, queries, all_stats, scalars, beta, value_in,
                key_in, d_values, d_keys, row, live, i, D, RANK, TOTAL, C, SEPARATE, NORMALIZE,
                VALUE_IN, KEY_IN, ROWS, BLOCK_R,
            )  # fmt: skip


@triton.jit
def _gradient(upstream, finished, c: tl.constexpr, NORMALIZE: tl.constexpr, row, column, mask):
    """g_c; that of the first query is taken back through its RMSNorm."""
    g = _load(upstream, c, row, column, mask)
    if c == 0 and NORMALIZE:
        along, scale, out = finished
        g = (g - _load(out, 0, row, column, mask) * along[:, None]) * scale[:, None]
    return g


@triton.jit
def _weight(
    all_stats, scalars, c: tl.constexpr, i: tl.constexpr, row, live,
    TOTAL: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """α_ic."""
    return tl.exp(
        _get(scalars + (row * (C + 1) + c) * TOTAL + i, live) - _get(all_stats[c] + row, live)
    )


@triton.jit
def _score_gradients(
    upstream, finished, values, all_stats, scalars, beta, row, live, tokens,
    D: tl.constexpr, K: tl.constexpr, TOTAL: tl.constexpr, C: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    START: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Writes beta of GROUP sources, from source START on.

    ⟨g_c, v_i⟩ is summed in each thread over the columns, and once over the threads at the end.
    """
    END: tl.constexpr = START + GROUP if START + GROUP < K else K
    dots = ()
    for _ in tl.static_range((END - START) * C):
        dots += (tl.zeros([ROWS, CHUNK], tl.float32),)
    for start in range(0, BLOCK_D, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = _inside(live, column, D, D == BLOCK_D)
        sources = ()
        for i in tl.static_range(START, END):
            sources += (_load(values, i, row, column, inside),)
        grown = ()
        for c in tl.static_range(C):
            g = _gradient(upstream, finished, c, NORMALIZE, row, column, inside)
            for i in tl.static_range(START, END):
                grown += (dots[c * (END - START) + i - START] + g * sources[i - START],)
        dots = grown
    for c in tl.static_range(C):
        inner = _get(all_stats[c] + tokens + row, live)
        for i in tl.static_range(START, END):
            scale = _get(scalars + (row * (C + 1) + C) * TOTAL + i, live)
            ds = _weight(all_stats, scalars, c, i, row, live, TOTAL, C) * (
                tl.sum(dots[c * (END - START) + i - START], 1) - inner
            )
            tl.store(beta + (row * C + c) * TOTAL + i, ds * scale, mask=live)


@triton.jit
def _shrink(
    scalars, beta, i: tl.constexpr, row, live,
    ROWS: tl.constexpr, RANK: tl.constexpr, TOTAL: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The factor of k_i in its own gradient: Σ_c beta_ic s_ic · rsqrt(mean(k_i²) + ε)/r."""
    total = tl.zeros([ROWS], tl.float32)
    for c in tl.static_range(C):
        total += _get(scalars + (row * (C + 1) + c) * TOTAL + i, live) * _get(
            beta + (row * C + c) * TOTAL + i, live
        )
    return total * _get(scalars + (row * (C + 1) + C) * TOTAL + i, live) / RANK


@triton.jit
def _value_gradients(
    upstream, finished, values, queries, all_stats, scalars, beta, value_in, d_values, row, live,
    D: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr, TOTAL: tl.constexpr, C: tl.constexpr,
    SEPARATE: tl.constexpr, NORMALIZE: tl.constexpr,
    VALUE_IN: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    START: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Writes columns of dv_i for GROUP sources, from source START on.

    They are the columns that belong to no key, or all if the key is the whole value.
    """
    END: tl.constexpr = START + GROUP if START + GROUP < K else K
    N: tl.constexpr = END - START
    WHOLE: tl.constexpr = not SEPARATE and RANK == D
    WIDTH: tl.constexpr = D if SEPARATE or WHOLE else D - RANK
    factors, alphas, betas = (), (), ()
    for i in tl.static_range(START, END):
        factors += (_shrink(scalars, beta, i, row, live, ROWS, RANK, TOTAL, C),)
    for c in tl.static_range(C):
        for i in tl.static_range(START, END):
            alphas += (_weight(all_stats, scalars, c, i, row, live, TOTAL, C)[:, None],)
            betas += (_get(beta + (row * C + c) * TOTAL + i, live)[:, None],)
    for start in range(0, BLOCK_D, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = _inside(live, column, WIDTH, WIDTH == BLOCK_D)
        sums = ()
        for i in tl.static_range(START, END):
            total = tl.zeros([ROWS, CHUNK], tl.float32)
            if (VALUE_IN >> i) & 1:
                total = _load(value_in, i, row, column, inside)
            if WHOLE:
                total -= factors[i - START][:, None] * _load(values, i, row, column, inside)
            sums += (total,)
        for c in tl.static_range(C):
            g = _gradient(upstream, finished, c, NORMALIZE, row, column, inside)
            grown = ()
            for i in tl.static_range(N):
                grown += (sums[i] + alphas[c * N + i] * g,)
            if WHOLE:
                q = _get(
                    queries + c * RANK + column[None, :],
                    _inside(None, column, RANK, RANK == BLOCK_D),
                )
                sums, grown = grown, ()
                for i in tl.static_range(N):
                    grown += (sums[i] + betas[c * N + i] * q,)
            sums = grown
        for i in tl.static_range(START, END):
            tl.store(
                d_values[0][i] + row[:, None] * d_values[1][i] + column[None, :],
                sums[i - START],
                mask=inside,
            )


@triton.jit
def _key_gradient(
    upstream, finished, values, keys, queries, all_stats, scalars, beta, value_in, key_in,
    d_values, d_keys, row, live, i: tl.constexpr,
    D: tl.constexpr, RANK: tl.constexpr, TOTAL: tl.constexpr, C: tl.constexpr,
    SEPARATE: tl.constexpr, NORMALIZE: tl.constexpr, VALUE_IN: tl.constexpr, KEY_IN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Writes dk_i to a tensor of its own, or as the last RANK columns of dv_i."""
    rank = tl.arange(0, BLOCK_R)
    inside = _inside(live, rank, RANK, RANK == BLOCK_R)
    column = D - RANK + rank
    k = _load(keys, i, row, rank, inside) if SEPARATE else _load(values, i, row, column, inside)
    total = -_shrink(scalars, beta, i, row, live, ROWS, RANK, TOTAL, C)[:, None] * k
    if SEPARATE and (KEY_IN >> i) & 1:
        total += _load(key_in, i, row, rank, inside)
    if not SEPARATE and (VALUE_IN >> i) & 1:
        total += _load(value_in, i, row, column, inside)
    for c in tl.static_range(C):
        q = _get(queries + c * RANK + rank[None, :], _inside(None, rank, RANK, RANK == BLOCK_R))
        total += _get(beta + (row * C + c) * TOTAL + i, live)[:, None] * q
        if not SEPARATE:
            g = _gradient(upstream, finished, c, NORMALIZE, row, column, inside)
            total += _weight(all_stats, scalars, c, i, row, live, TOTAL, C)[:, None] * g
    if SEPARATE:
        tl.store(d_keys[0][i] + row[:, None] * d_keys[1][i] + rank[None, :], total, mask=inside)
    else:
        tl.store(
            d_values[0][i] + row[:, None] * d_values[1][i] + column[None, :], total, mask=inside
        )


@triton.jit
def query_gradient(
    keys, beta, partial, tokens,
    OFFSET: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes Σ_i beta_ic k_i, summed over SPAN tokens, to partial [programs, C, RANK] float32.

    The caller adds up the programs. Nothing is added atomically, so the result is deterministic.
    """
    span = tl.program_id(0).to(tl.int64) * SPAN
    rank = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = ()
    for _ in tl.static_range(C):
        sums += (tl.zeros([ROWS, COLUMNS], tl.float32),)
    for start in range(0, SPAN, ROWS):
        row = span + start + tl.arange(0, ROWS)
        live = row < tokens
        inside = live[:, None] & (rank < RANK)[None, :]
        for i in tl.static_range(K):
            k = _load(keys, i, row, OFFSET + rank, inside)
            grown = ()
            for c in tl.static_range(C):
                grown += (sums[c] + _get(beta + (row * C + c) * K + i, live)[:, None] * k,)
            sums = grown
    for c in tl.static_range(C):
        target = partial + (tl.program_id(0).to(tl.int64) * C + c) * RANK + rank
        tl.store(target, tl.sum(sums[c], 0), mask=rank < RANK)
