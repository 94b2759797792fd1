"""The Triton kernels of residual streams: what a site of hyper-connections does with its streams.

Between two sub-layers there are N streams S'_j, the last output o, and weights β_j with which o is
written into them. The streams that the next site sees are

    S_j = S'_j + β_j o                                rounded to the dtype of S'

and no kernel stores them: each makes them again of the N + 1 tensors that it reads.

    stream_products     P = S W, and |S_j|², of which weights are made
    stream_mix          X_c = Σ_j A_{j,c} S_j         of c = 0 … N: the hidden state, the next S'
    mixing_gradient     dA_{j,c} = ⟨S_j, dX_c⟩
    stream_gradients    dS_j = Σ_c A_{j,c} dX_c + dP Wᵀ + 2 S_j d|S_j|², which is dS'_j as well;
                        do = Σ_j β_j dS_j; dβ_j = ⟨dS_j, o⟩
    map_gradient        dW = Sᵀ dP

With JOINT each stream has maps W_j of its own and P is the sum over the streams; else all have the
same maps, and a P each. Arithmetic is float32. NARROW, for bfloat16 streams, says that products are
of bfloat16 numbers: a float32 factor is then the sum of two, exact to 2⁻¹⁷.

An argument that stands for several tensors is a pair as in triton_kernels.py. The weights are
float32 and contiguous: β [tokens, N], A [tokens, N, N + 1], P [tokens, K] if JOINT, else [tokens,
N, K]. `maps` are one tensor [N or 1, K, D] float32, or two in bfloat16 if NARROW, which sum to
them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lrattnres.kernels.launch import INTERPRETED
from lrattnres.kernels.triton_kernels import _get, _inside, _load

# The interpreter cannot multiply bfloat16: there the same numbers are multiplied as float32.
FACTOR = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)


@triton.jit
def _stream(streams, write, output, j: tl.constexpr, row, column, mask, live, N: tl.constexpr):
    """S_j; `output` is o, float32 as well."""
    beta = _get(write + row * N + j, live)
    s = _load(streams, j, row, column, mask) + beta[:, None] * output
    return s.to(streams[0][j].dtype.element_ty).to(tl.float32)


@triton.jit
def _split(x, NARROW: tl.constexpr):
    """x as one factor, or as two if NARROW."""
    if NARROW:
        high = x.to(tl.bfloat16)
        parts = (high.to(FACTOR), (x - high.to(tl.float32)).to(tl.bfloat16).to(FACTOR))
    else:
        parts = (x,)
    return parts


@triton.jit
def _maps(
    maps, j: tl.constexpr, k, column, K: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    """The factors of W_j, [BLOCK_K, columns], or the other way round if TURNED."""
    known = (k < K)[:, None] & (column < D)[None, :]
    at = (j * K + k)[:, None] * D + column[None, :]
    parts = ()
    for i in tl.static_range(len(maps)):
        w = tl.load(maps[i] + at, mask=known, other=0.0)
        if len(maps) > 1:
            w = w.to(FACTOR)
        parts += (tl.trans(w) if TURNED else w,)
    return parts


@triton.jit
def _dot(a, b, total):
    """total + a @ b, each one factor or two; of two times two, all products but the smallest."""
    for i in tl.static_range(len(a)):
        for j in tl.static_range(len(b)):
            if i + j < 2:
                total = tl.dot(a[i], b[j], total, input_precision="ieee")
    return total


@triton.jit
def _rows(ROWS: tl.constexpr, tokens):
    """The tokens of a program, and which of them exist; None: all do."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, None if ROWS == 1 else row < tokens


@triton.jit
def stream_products(
    streams, write, output, maps, products, squares, tokens,
    D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, JOINT: tl.constexpr, NARROW: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes P, and |S_j|² [tokens, N], float32."""
    row, live = _rows(ROWS, tokens)
    k = tl.arange(0, BLOCK_K)
    P: tl.constexpr = 1 if JOINT else N
    found, norms = (), ()
    for _ in tl.static_range(P):
        found += (tl.zeros([ROWS, BLOCK_K], tl.float32),)
    for _ in tl.static_range(N):
        norms += (tl.zeros([ROWS], tl.float32),)
    for start in range(0, D, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = _inside(live, column, D, D % CHUNK == 0)
        o = _load(output, 0, row, column, inside)
        w = _maps(maps, 0, k, column, K, D, True)
        total = found[0]
        grown, more = (), ()
        for j in tl.static_range(N):
            s = _stream(streams, write, o, j, row, column, inside, live, N)
            factor = (s.to(tl.bfloat16).to(FACTOR),) if NARROW else (s,)  # exact
            if JOINT:
                if j > 0:
                    w = _maps(maps, j, k, column, K, D, True)
                total = _dot(factor, w, total)
            else:
                grown += (_dot(factor, w, found[j]),)
            more += (norms[j] + tl.sum(s * s, 1),)
        found = (total,) if JOINT else grown
        norms = more
    for p in tl.static_range(P):
        at = products + (row[:, None] * P + p) * K + k[None, :]
        tl.store(at, found[p], mask=_inside(live, k, K, K == BLOCK_K))
    for j in tl.static_range(N):
        tl.store(squares + row * N + j, norms[j], mask=live)


@triton.jit
def stream_mix(
    streams, write, output, mixing, mixed, tokens,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes X_0 … X_N, of the dtype of the streams."""
    row, live = _rows(ROWS, tokens)
    weights = ()
    for i in tl.static_range(N * (N + 1)):
        weights += (_get(mixing + row * N * (N + 1) + i, live),)
    for start in range(0, D, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = _inside(live, column, D, D % CHUNK == 0)
        o = _load(output, 0, row, column, inside)
        sources = ()
        for j in tl.static_range(N):
            sources += (_stream(streams, write, o, j, row, column, inside, live, N),)
        for c in tl.static_range(N + 1):
            x = weights[c][:, None] * sources[0]
            for j in tl.static_range(1, N):
                x += weights[j * (N + 1) + c][:, None] * sources[j]
            at = mixed[0][c] + row[:, None] * mixed[1][c] + column[None, :]
            tl.store(at, x, mask=inside)


@triton.jit
def mixing_gradient(
    upstream, streams, write, output, d_mixing, tokens,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes dA. A product is summed in each thread over the columns, and then over the threads."""
    row, live = _rows(ROWS, tokens)
    dots = ()
    for _ in tl.static_range(N * (N + 1)):
        dots += (tl.zeros([ROWS, CHUNK], tl.float32),)
    for start in range(0, D, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = _inside(live, column, D, D % CHUNK == 0)
        o = _load(output, 0, row, column, inside)
        gradients = ()
        for c in tl.static_range(N + 1):
            gradients += (_load(upstream, c, row, column, inside),)
        grown = ()
        for j in tl.static_range(N):
            s = _stream(streams, write, o, j, row, column, inside, live, N)
            for c in tl.static_range(N + 1):
                grown += (dots[j * (N + 1) + c] + s * gradients[c],)
        dots = grown
    for i in tl.static_range(N * (N + 1)):
        tl.store(d_mixing + row * N * (N + 1) + i, tl.sum(dots[i], 1), mask=live)


@triton.jit
def stream_gradients(
    upstream, mixing, streams, write, output, maps, d_products, d_squares,
    d_streams, d_write, d_output, tokens,
    D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, JOINT: tl.constexpr, NARROW: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes dS' and do, of the dtype of the streams, and dβ [tokens, N] float32."""
    row, live = _rows(ROWS, tokens)
    k = tl.arange(0, BLOCK_K)
    P: tl.constexpr = 1 if JOINT else N
    back, written = (), ()
    for p in tl.static_range(P):
        rows = d_products + (row[:, None] * P + p) * K + k[None, :]
        back += (_split(_get(rows, _inside(live, k, K, K == BLOCK_K)), NARROW),)
    for _ in tl.static_range(N):
        written += (tl.zeros([ROWS], tl.float32),)
    for start in range(0, D, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = _inside(live, column, D, D % CHUNK == 0)
        o = _load(output, 0, row, column, inside)
        gradients = ()
        for c in tl.static_range(N + 1):
            gradients += (_load(upstream, c, row, column, inside),)
        w = _maps(maps, 0, k, column, K, D, False)
        d_o = tl.zeros([ROWS, CHUNK], tl.float32)
        grown = ()
        for j in tl.static_range(N):
            s = _stream(streams, write, o, j, row, column, inside, live, N)
            if JOINT and j > 0:
                w = _maps(maps, j, k, column, K, D, False)
            ds = 2 * _get(d_squares + row * N + j, live)[:, None] * s
            ds = _dot(back[0 if JOINT else j], w, ds)
            for c in tl.static_range(N + 1):
                ds += _get(mixing + (row * N + j) * (N + 1) + c, live)[:, None] * gradients[c]
            at = d_streams[0][j] + row[:, None] * d_streams[1][j] + column[None, :]
            tl.store(at, ds, mask=inside)
            d_o += _get(write + row * N + j, live)[:, None] * ds
            grown += (written[j] + tl.sum(ds * o, 1),)
        written = grown
        tl.store(d_output + row[:, None] * D + column[None, :], d_o, mask=inside)
    for j in tl.static_range(N):
        tl.store(d_write + row * N + j, written[j], mask=live)


@triton.jit
def map_gradient(
    streams, write, output, d_products, partial, tokens,
    D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, JOINT: tl.constexpr, NARROW: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes dW, summed over SPAN tokens, to partial [programs, N or 1, D, K] float32.

    The caller adds up the programs. Nothing is added atomically, so the result is deterministic.
    """
    k = tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    G: tl.constexpr = N if JOINT else 1
    P: tl.constexpr = 1 if JOINT else N
    sums = ()
    for _ in tl.static_range(G):
        sums += (tl.zeros([CHUNK, BLOCK_K], tl.float32),)
    for start in range(0, SPAN, ROWS):
        row = tl.program_id(0).to(tl.int64) * SPAN + start + tl.arange(0, ROWS)
        live = row < tokens
        inside = _inside(live, column, D, D % CHUNK == 0)
        o = _load(output, 0, row, column, inside)
        grown = ()
        total = sums[0]
        for j in tl.static_range(N):
            s = tl.trans(_stream(streams, write, o, j, row, column, inside, live, N))
            factor = (s.to(tl.bfloat16).to(FACTOR),) if NARROW else (s,)  # exact
            at = d_products + (row[:, None] * P + (0 if JOINT else j)) * K + k[None, :]
            back = _split(_get(at, _inside(live, k, K, K == BLOCK_K)), NARROW)
            if JOINT:
                grown += (_dot(factor, back, sums[j]),)
            else:
                total = _dot(factor, back, total)
        sums = grown if JOINT else (total,)
    for g in tl.static_range(G):
        first = (tl.program_id(0).to(tl.int64) * G + g) * D
        at = partial + (first + column[:, None]) * K + k[None, :]
        tl.store(at, sums[g], mask=(column < D)[:, None] & (k < K)[None, :])
