"""The paths that read the blocks before, and those that reuse keys and values, against loops over
numbers.

Each loop is its path's equations for one token, in float64 and numpy: (embedding and outputs,
parameters, settings) -> h of every site before its norm, or three where attention reads three.
"""

import math
import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lrattnres.residual.base import path_of, pattern_of
from lrattnres.residual.coefficients import Traced
from tests.residual.making import config_of
from tests.residual.test_stream_paths import (
    DIM,
    LAYERS,
    SIZES,
    built,
    grid,
    hiddens,
    named,
    possible,
    rms,
    sizes,
    written,
)

PAIR = 2  # heads of keys and values, each of width DIM / PAIR
erf = np.vectorize(math.erf)


def denseformer(o, p, dilation=1, period=1):
    stream, blocks, reads = o[0], [o[0]], []
    for b in range(1, LAYERS + 1):
        reads += [stream, stream + o[2 * b - 1]]
        blocks.append(stream + o[2 * b - 1] + o[2 * b])
        stream = blocks[-1]
        if b % period == 0:
            taken = [j for j in range(b + 1) if (b - j) % dilation == 0]
            stream = sum(
                weight * blocks[j] for weight, j in zip(p[f"alpha.{b}"], taken, strict=True)
            )
    return [*reads, stream]


def mudd(o, p, ways=4, dynamic=True, expand_last=True, round64=True, norms=True):
    streams, sources, reads = [o[0]] * ways, [o[0]], []
    if norms:
        sources = [p["pre_gain.0"] * rms(o[0])]
    for b in range(1, LAYERS + 1):
        left = streams[-1]
        reads += [tuple(streams[:3]) if ways == 4 and b > 1 else left, left + o[2 * b - 1]]
        x = left + o[2 * b - 1] + o[2 * b]
        sources.append(p[f"pre_gain.{b}"] * rms(x) if norms else x)
        weights = p[f"static.{b}"]
        if dynamic:
            inner = p[f"w1.{b}"] @ rms(x)
            expected = (4 if ways == 4 and b < LAYERS else 1) * (b + 1)
            expected *= 4 if b == LAYERS and expand_last else 1
            assert len(inner) == (64 * (expected // 64 + 1) if round64 else expected)
            inner = inner * (1 + erf(inner / math.sqrt(2))) / 2
            weights = weights + (p[f"w2.{b}"] @ inner).reshape(weights.shape)
        streams = [sum(w * z for w, z in zip(way, sources, strict=True)) for way in weights]
        if norms:
            streams[-1] = p[f"post_gain.{b}"] * rms(streams[-1])
            streams = [x + stream for stream in streams]
    return [*reads, streams[-1]]


def dca(o, p, version=3, ways=3, last=None):
    deltas, reads = [o[0]], []
    for b in range(1, LAYERS + 2):
        sources = deltas
        if last is not None and b > last + 2:
            sources = [deltas[0], sum(deltas[1:-last]), *deltas[-last:]]
        streams = []
        for c in range(ways if b <= LAYERS else 1):
            total = 0
            for j, source in enumerate(sources):
                omega = p[f"weight.{b}"][c][j]
                if version == 3:
                    omega = omega + max(0.0, p[f"score.{b}"][c] @ rms(source))
                total = total + omega * source
            streams.append(total)
        if b > LAYERS:
            return [*reads, streams[0]]
        attended = o[2 * b - 1]
        reads += [tuple(streams) if ways == 3 else streams[0], streams[0] + attended]
        deltas.append(attended + o[2 * b])
    raise AssertionError


def lambdas(o, p, resid=True, first=True, unet=False, backout=False, norm_embedding=False):
    x0 = rms(o[0]) if norm_embedding else o[0]
    x, half, pushed, middle, reads = x0, LAYERS // 2, [], None, []
    for i in range(LAYERS):
        if unet and i >= LAYERS - half:
            x = x + p["skip"][i - (LAYERS - half)] * pushed.pop()
        x = (p["stream"][i] if resid else 1) * x + (p["embedding"][i] * x0 if first else 0)
        reads += [x, x + o[2 * i + 1]]
        x = x + o[2 * i + 1] + o[2 * i + 2]
        if i < half:
            pushed.append(x)
        if i == half:
            middle = x
    return [*reads, x - p["backout"][0] * middle if backout else x]


TRUTH = [True, False]
CASES = [
    *grid(denseformer, dilation=[1, 2, 3], period=[1, 2, 3]),
    *grid(mudd, ways=[1, 4], dynamic=TRUTH, norms=TRUTH),
    *grid(mudd, expand_last=TRUTH, round64=TRUTH, norms=[False]),
    *grid(dca, version=[1, 2, 3], ways=[1, 3], last=[None, 1, 2]),
    *grid(lambdas, resid=TRUTH, first=TRUTH, unet=TRUTH, backout=[True]),
    *grid(lambdas, unet=TRUTH, norm_embedding=TRUTH),
]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=st.sampled_from(CASES), **SIZES)
def test_loops_over_numbers_of_any_size(case, layers: int, width: int) -> None:
    assume(possible(case, layers, 4 * width))
    with sizes(layers, 4 * width, sys.modules[__name__]):
        test_loops_over_numbers(case)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_loops_over_numbers(case) -> None:
    loop, _, options = case
    torch.manual_seed(0)
    path, outputs = built(loop.__name__, drawn=True, **options), written()
    parameters = {name: value.detach().numpy() for name, value in path.named_parameters()}
    reads, state = [], path.begin(outputs[0])
    with torch.no_grad():
        for site, output in enumerate(outputs[1:]):
            reads.append(path.read(state, site))
            state = path.write(state, site, output)
        reads.append(path.read(state, len(outputs) - 1))
    for token in range(3):
        truth = loop([output[token].numpy() for output in outputs], parameters, **options)
        for read, expected in zip(reads, truth, strict=True):
            found = [part[token].numpy() for part in read if part is not None]
            each = expected if isinstance(expected, tuple) else (expected,) * len(found)
            for one, other in zip(found, each, strict=True):
                np.testing.assert_allclose(one, rms(other), rtol=1e-9, atol=1e-10)


def raw(tokens: int = 3) -> Tensor:
    """Keys and values of every block, [block, 2, tokens, heads, width]."""
    generator = torch.Generator().manual_seed(3)
    shape = (LAYERS, 2, tokens, PAIR, DIM // PAIR)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def resformer(kv, p, b, sparse=None, learn=True):
    key, value = kv[b - 1]
    blocks = sorted(sparse or range(2, LAYERS + 1))
    if b not in blocks:
        return key, value
    first, own = p["value_mix"][blocks.index(b)] if learn else (0.5, 0.5)
    return key, first * kv[0][1] + own * value


def svformer(kv, p, b):
    return kv[b - 1][0], kv[0][1]


def lime(kv, p, b):
    if b == 1:
        return kv[0]
    router, mixed = p[f"router.{b - 1}"], []
    for part in (0, 1):
        heads = np.zeros((PAIR, DIM // PAIR))
        for g in range(PAIR):
            for before in range(b):
                for other in range(PAIR):
                    heads[g] += router[g, before * PAIR + other] * kv[before][part][other]
        mixed.append(heads)
    return tuple(mixed)


REUSED = [
    *grid(resformer, sparse=[None, [2], [3, 2]], learn=[True]),
    *grid(resformer, learn=[False]),
    *grid(svformer),
    *grid(lime),
]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=st.sampled_from(REUSED), **SIZES)
def test_keys_and_values_by_loops_of_any_size(case, layers: int, width: int) -> None:
    assume(possible(case, layers, 4 * width))
    with sizes(layers, 4 * width, sys.modules[__name__]):
        test_keys_and_values_by_loops_over_numbers(case)


@pytest.mark.parametrize("case", REUSED, ids=named)
def test_keys_and_values_by_loops_over_numbers(case) -> None:
    loop, _, options = case
    path, outputs, heads = built(loop.__name__, drawn=True, **options), written(), raw()
    parameters = {name: value.detach().numpy() for name, value in path.named_parameters()}
    state, used = path.begin(outputs[0]), []
    for site, output in enumerate(outputs[1:]):
        torch.testing.assert_close(path.hidden(state, site), sum(outputs[: site + 1]))
        given = None
        if site % 2 == 0:
            given = tuple(heads[site // 2])
            used.append([part.detach().numpy() for part in path.change(state, site)(*given)])
        state = path.write(state, site, output, given)
    for token in range(3):
        kv = [(block[0][token], block[1][token]) for block in heads.numpy()]
        for b in range(1, LAYERS + 1):
            for found, truth in zip(used[b - 1], loop(kv, parameters, b, **options), strict=True):
                np.testing.assert_allclose(found[token], truth, rtol=1e-10, atol=1e-11)


BITS = [
    *[("mudd", options) for _, _, options in grid(mudd, ways=[1, 4], dynamic=TRUTH, norms=TRUTH)],
    *[("denseformer", {"dilation": k, "period": p}) for k, p in ((1, 1), (2, 1), (1, 2))],
    *[("lambdas", {"unet": unet, "backout": backout}) for unet in TRUTH for backout in TRUTH],
]


@pytest.mark.parametrize(("residual", "options"), BITS)
def test_reads_start_as_the_baselines_to_the_last_bit(residual: str, options: dict) -> None:
    path = built(residual, drawn=False, **options).float()
    outputs = [output.float() for output in written()]
    stream = outputs[0].clone()
    for found, output in zip(hiddens(path, outputs), [*outputs[1:], outputs[0]], strict=True):
        assert torch.equal(found, stream)
        stream = stream + output


@pytest.mark.parametrize("residual", ["resformer", "lime"])
def test_neutral_starts_change_no_key_and_no_value(residual: str) -> None:
    path, heads = built(residual, drawn=False, start="neutral"), raw()
    outputs, state = written(), None
    state = path.begin(outputs[0])
    for site, output in enumerate(outputs[1:]):
        given = tuple(heads[site // 2]) if site % 2 == 0 else None
        if given:
            assert all(map(torch.equal, path.change(state, site)(*given), given))
        state = path.write(state, site, output, given)


def test_published_starts() -> None:
    routers = built("lime", drawn=False).router
    for block in range(1, LAYERS):
        router = routers[str(block)]
        assert torch.equal(router[:, -PAIR:], torch.eye(PAIR))
        bound = math.sqrt(3 / router.shape[1])
        assert 0 < router[:, :-PAIR].abs().max() <= bound
    assert torch.equal(built("resformer", drawn=False).value_mix, torch.full((2, 2), 0.5))
    tuned = built("lambdas", drawn=False, start="nanochat", unet=True, backout=True)
    assert tuned.stream.tolist() == pytest.approx([1.15, 1.10, 1.05])
    assert tuned.embedding.tolist() == pytest.approx([0.20, 0.125, 0.05])
    assert (tuned.skip.tolist(), tuned.backout.tolist()) == ([1.0], [pytest.approx(0.2)])
    dense = built("mudd", drawn=False, norms=True)
    assert dense.w1["1"].std().item() == pytest.approx(DIM**-0.5, rel=0.2)
    assert dense.post_gain["2"].unique().tolist() == [pytest.approx(1e-3)]
    scored = built("dca", drawn=False)
    assert scored.score["2"].abs().max() > 0 and scored.weight["2"].unique().tolist() == [1]


@pytest.mark.parametrize(("version", "rtol"), [(1, 1e-12), (2, 1e-12), (3, 0.05)])
def test_dca_starts_as_the_baseline_but_for_rounding_or_its_scores(version, rtol) -> None:
    outputs = written()
    found = hiddens(built("dca", drawn=False, version=version), outputs)
    for site, hidden in enumerate(found):
        plain = sum(outputs[: site + 1])
        assert (hidden - plain).norm() <= rtol * plain.norm()
        assert version < 3 or site == 0 or not torch.equal(hidden, plain)


@pytest.mark.parametrize("options", [{"version": 2}, {"version": 3, "last": 1}])
def test_a_coefficient_of_channels_is_their_mean(options: dict) -> None:
    path, outputs = built("dca", drawn=True, **options), written()
    traced = Traced(path)
    state = traced.begin(outputs[0])
    for site, output in enumerate(outputs[1:]):
        state = traced.write(state, site, output)
    found = traced.coefficients(state, len(outputs) - 1)
    one = [torch.ones_like(output) for output in outputs]
    for i in range(len(outputs)):  # h is linear in o_i where the weights are held
        if options["version"] == 2:
            alone = [output if j == i else 0 * output for j, output in enumerate(one)]
            expected = hiddens(path, alone)[-1].mean(-1)
            torch.testing.assert_close(found[..., i].expand(3), expected)
    assert found.shape[-1] == len(outputs)


REFUSED = [
    ("mudd", {"ways": 2}, "ways=2: must be 1 or 4"),
    ("dca", {"version": 4}, "version=4: must be between 1 and 3"),
    ("dca", {"ways": 2}, "ways=2: must be 1 or 3"),
    ("dca", {"last": 0}, "last=0: must be at least 1"),
    ("dca", {"last": 3}, "last=3: .*write model.path.last=null"),
    ("resformer", {"sparse": [1]}, "sparse=.1.: must be different blocks from 2 to"),
    ("resformer", {"sparse": [2, 2]}, "sparse=.2, 2.: must be different blocks"),
    ("resformer", {"sparse": []}, "no block would mix; write model.path.sparse=null"),
    ("lambdas", {"resid": False, "first": False}, "nothing is left that is learned"),
    ("denseformer", {"period": 4}, "period=4: no block would have an average"),
]


@pytest.mark.parametrize(("residual", "options", "words"), REFUSED)
def test_what_cannot_be_is_refused(residual: str, options: dict, words: str) -> None:
    config = config_of(residual, layers=LAYERS, path=options)
    (error,) = path_of(config).errors(config)
    assert re.search(words, error), error


@pytest.mark.parametrize("residual", ["svformer", "resformer", "lime"])
def test_one_block_has_none_before_it(residual: str) -> None:
    config = config_of(residual, layers=1)
    (error,) = path_of(config).errors(config)
    assert "write model.layers=2" in error


NO_MEANING = [
    ("mudd", {"dynamic": False, "round64": False}, ["round64"]),
    ("mudd", {"dynamic": False}, []),
]


@pytest.mark.parametrize(("residual", "options", "said"), NO_MEANING)
def test_settings_that_another_leaves_without_a_meaning(residual, options, said) -> None:
    config = config_of(residual, rank=None, path=options)
    settled, notes = path_of(config).settled(config)
    assert len(notes) == len(said)
    assert all(words in note for words, note in zip(said, notes, strict=True))
    assert path_of(settled).settled(settled) == (settled, [])
    assert {pattern_of(name) for name in path_of(settled).roles(settled)}
