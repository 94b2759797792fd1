"""The paths of several streams, and of one stream that is more than a sum, against loops over
numbers.

Each loop is its path's equations for one token, in float64 and numpy, written here again:
(embedding and outputs, parameters, settings) -> h of every site before its norm.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lrattnres.config import AC
from lrattnres.distributed.parallel import AC_MODES
from lrattnres.kernels.backends import KERNELS
from lrattnres.model.transformer import Transformer, initialize
from lrattnres.optim.groups import assign
from lrattnres.residual.base import ResidualPath, path_of, pattern_of
from lrattnres.residual.coefficients import Traced
from tests.residual.making import config_of

EPS, DIM, LAYERS = 2.0**-23, 8, 3


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x):
    return x / np.sqrt(np.mean(x**2) + EPS)


def layer(x):
    return (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)


def learned(parts, p, t, dynamic=True, norm="layer", tanh=True, **_):
    alpha, beta = p["static_alpha"][t].copy(), p["static_beta"][t].copy()
    for j, part in enumerate(parts if dynamic else []):
        normed = {"layer": layer, "rms": rms}[norm](part)
        bound = np.tanh if tanh else lambda x: x
        for k in range(alpha.shape[1]):
            alpha[j, k] += p["scale_alpha"][t] * bound(normed @ p["dynamic_alpha"][t][:, k])
        beta[j] += p["scale_beta"][t] * bound(normed @ p["dynamic_beta"][t])
    return alpha, beta


def hc(o, p, n=4, **options):
    streams, reads = [o[0]] * n, []
    for t in range(len(o) - 1):
        alpha, beta = learned(streams, p, t, **options)
        reads.append(sum(alpha[j, 0] * streams[j] for j in range(n)))
        mixed = [sum(alpha[j, k + 1] * streams[j] for j in range(n)) for k in range(n)]
        streams = [mixed[k] + beta[k] * o[t + 1] for k in range(n)]
    return [*reads, sum(streams)]


def mhc(o, p, n=4, iterations=20, eps=1e-6, head="learned"):
    streams, reads = [o[0]] * n, []
    for t in range(len(o) - 1):
        found = p["projection"][t] @ rms(np.concatenate(streams))
        scale, bias = p["scale"][t], p["bias"][t]
        pre = sigmoid(scale[0] * found[:n] + bias[:n]) + eps
        post = 2 * sigmoid(scale[1] * found[n : 2 * n] + bias[n : 2 * n])
        c = np.exp((scale[2] * found[2 * n :] + bias[2 * n :]).reshape(n, n))
        for i in range(n):
            c[i] = c[i] / c[i].sum() + eps
        for turn in range(iterations):
            if turn:
                c = np.array([row / (row.sum() + eps) for row in c])
            c = np.array([column / (column.sum() + eps) for column in c.T]).T
        reads.append(sum(pre[j] * streams[j] for j in range(n)))
        streams = [
            post[k] * o[t + 1] + sum(c[j, k] * streams[j] for j in range(n)) for k in range(n)
        ]
    if head == "sum":
        return [*reads, sum(streams)]
    found = p["head_projection"] @ rms(np.concatenate(streams))
    weights = sigmoid(p["head_scale"][0] * found + p["head_bias"]) + eps
    return [*reads, sum(weights[j] * streams[j] for j in range(n))]


def frac(o, p, m=4, **options):
    streams, reads = np.split(o[0], m), []
    for t in range(len(o) - 1):
        alpha, beta = learned(streams, p, t, **options)
        mixed = [sum(alpha[j, c] * streams[j] for j in range(m)) for c in range(2 * m)]
        reads.append(np.concatenate(mixed[:m]))
        new = np.split(o[t + 1], m)
        streams = [mixed[m + k] + beta[k] * new[k] for k in range(m)]
    return [*reads, np.concatenate(streams)]


def laurel(o, p, parts="rw+lr", back=3):
    reads = [o[0]]
    for t in range(1, len(o)):
        a = c = 1.0
        if "rw" in parts:
            first, second = np.exp(p["mix"][t - 1])
            a, c = 2 * first / (first + second), 2 * second / (first + second)
        y = reads[-1]
        if "pa" in parts:
            y = sum(p["past"][t - 1][j] * reads[t - 1 - j] for j in range(min(back, t)))
        low = 0.0
        if parts != "rw":
            low = p["up"][t - 1] @ (p["down"][t - 1] @ y)
        reads.append(a * o[t] + c * (reads[-1] + low))
    return reads


def postnorm(o, p, branch=1.0):
    reads = [rms(o[0])]
    for output in o[1:]:
        reads.append(rms(branch * reads[-1] + output))
    return reads


def highway(o, p, gate="scalar"):
    reads = [o[0]]
    for t, output in enumerate(o[1:]):
        x = reads[-1]
        opened = sigmoid(p["gate"][t] @ rms(x) + p["gate_bias"][t])
        reads.append(opened * output + (1 - opened) * x)
    return reads


def altup(o, p, n=2, dynamic=False):
    streams, reads = [o[0]] * n, []
    for b in range(len(o) // 2):
        a, predict, correct = b % n, p["predict"][b], p["correct"][b]
        if dynamic:
            modes = np.tanh(p["router"][b] @ rms(streams[a]))
            predict = predict + (p["predict_router"][b] @ modes).reshape(n, n)
        guess = [sum(predict[k, j] * streams[j] for j in range(n)) for k in range(n)]
        reads += [guess[a], guess[a] + o[2 * b + 1]]
        left = guess[a] + o[2 * b + 1] + o[2 * b + 2]
        if dynamic:
            correct = correct + p["correct_router"][b] @ np.tanh(p["router"][b] @ rms(left))
        streams = [guess[k] + correct[k] * (left - guess[a]) for k in range(n)]
    return [*reads, sum(streams)]


def grid(loop, rank=None, **values):
    return [
        (loop, rank, dict(zip(values, each, strict=True)))
        for each in itertools.product(*values.values())
    ]


LEARNED = {"dynamic": [True, False], "norm": ["layer", "rms"], "tanh": [True, False]}
CASES = [
    *grid(hc, n=[1, 2, 4], **LEARNED),
    *grid(mhc, n=[1, 2, 3], iterations=[1, 2, 20], eps=[1e-6, 1e-2], head=["learned", "sum"]),
    *grid(frac, m=[1, 2, 4], **LEARNED),
    *grid(laurel, rank=3, parts=["rw", "lr", "pa", "rw+lr", "rw+pa"], back=[1, 3, 6]),
    *grid(laurel, rank=1, parts=["lr", "rw+pa"]),
    *grid(postnorm, branch=[1.0, 1.6]),
    *grid(highway, gate=["scalar", "vector"]),
    *grid(altup, n=[1, 2, 3], dynamic=[True, False]),
]


def built(residual: str, rank: int | None = None, *, drawn: bool, **options) -> ResidualPath:
    """In float64; at its start, or with every parameter drawn."""
    config = config_of(residual, layers=LAYERS, dim=DIM, rank=rank, path=options)
    assert not list(path_of(config).errors(config))
    path = path_of(config).build(config, KERNELS["reference"]).double()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in path.named_parameters():
        start = path.roles(config)[pattern_of(name)].start
        if not drawn and callable(start):
            start = start(parameter.shape, generator)
        parameter.data.copy_(torch.as_tensor(start) if not drawn else parameter.data.normal_())
    return path


def written(tokens: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (2 * LAYERS + 1, tokens, DIM)
    return list(torch.randn(shape, generator=generator, dtype=torch.float64))


def hiddens(path: ResidualPath | Traced, outputs: list[Tensor]) -> list[Tensor]:
    state, found = path.begin(outputs[0]), []
    for site, output in enumerate(outputs[1:]):
        found.append(path.hidden(state, site))
        state = path.write(state, site, output)
    return [*found, path.hidden(state, len(outputs) - 1)]


def named(case) -> str:
    loop, rank, options = case
    return "-".join([loop.__name__, *map(str, options.values()), str(rank or "")])


@contextmanager
def sizes(layers: int, dim: int, *modules: ModuleType) -> Iterator[None]:
    """Other LAYERS and DIM, in this module and in others that have them."""
    with ExitStack() as stack:
        for module in (sys.modules[__name__], *modules):
            stack.enter_context(patch.multiple(module, LAYERS=layers, DIM=dim))
        yield


def possible(case, layers: int, dim: int) -> bool:
    """Whether a path with these options can be so small."""
    loop, rank, options = case
    config = config_of(loop.__name__, layers=layers, dim=dim, rank=rank, path=options)
    return not list(path_of(config).errors(config))


SIZES = {"layers": st.integers(1, 5), "width": st.integers(1, 5)}  # the width is of a quarter


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=st.sampled_from(CASES), **SIZES)
def test_loops_over_numbers_of_any_size(case, layers: int, width: int) -> None:
    assume(possible(case, layers, 4 * width))
    with sizes(layers, 4 * width):
        test_loops_over_numbers(case)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_loops_over_numbers(case) -> None:
    loop, rank, options = case
    torch.manual_seed(0)
    path, outputs = built(loop.__name__, rank, drawn=True, **options), written()
    parameters = {name: value.detach().numpy() for name, value in path.named_parameters()}
    with torch.no_grad():
        found = torch.stack(hiddens(path, outputs)).numpy()
    for token in range(3):
        truth = loop([output[token].numpy() for output in outputs], parameters, **options)
        np.testing.assert_allclose(found[:, token], np.stack(truth), rtol=1e-10, atol=1e-11)


STREAM = [("hc", {"n": n, "dynamic": d}) for n in (1, 2, 3, 4) for d in (True, False)]
EXACT = [
    *[("laurel", {"parts": parts}) for parts in ("rw", "lr", "pa", "rw+lr", "rw+pa")],
    *[("frac", {"m": m, "dynamic": d}) for m in (1, 2, 4, 8) for d in (True, False)],
]


@pytest.mark.parametrize(("residual", "options"), STREAM + EXACT)
def test_streams_start_as_the_baseline_to_the_last_bit(residual: str, options: dict) -> None:
    """In float32; the head of n streams reads n times the baseline's."""
    path = built(residual, 3, drawn=False, **options).float()
    outputs = [output.float() for output in written()]
    plain = list(itertools.accumulate(outputs))
    *inner, last = hiddens(path, outputs)
    assert all(map(torch.equal, inner, plain))
    assert torch.equal(last, options.get("n", 1) * plain[-1])


def test_starts_that_the_first_reads_do_not_show() -> None:
    """Equal streams hide which one a site reads, and a zero map what it multiplies."""
    streams = built("hc", drawn=False, n=4)
    reads = streams.static_alpha[:, :, 0].argmax(-1)
    assert reads.tolist() == [0, 1, 2, 3, 0, 1]
    for scale in (streams.scale_alpha, streams.scale_beta):
        assert scale.tolist() == pytest.approx([0.01] * 6)
    low = built("laurel", 3, drawn=False, parts="rw+pa", back=4)
    assert torch.equal(low.past, torch.full_like(low.past, 0.25))
    for matrix in low.down:
        for row, column in itertools.product(range(3), range(DIM)):
            there = 1 / math.sqrt(3 * DIM) if column % 3 == row else 0
            assert matrix[row, column].item() == pytest.approx(there, rel=1e-6)
    gates = built("highway", drawn=False)
    assert gates.gate_bias.unique().tolist() == [-2]
    for path, name in ((gates, "gate"), (built("mhc", drawn=False), "projection")):
        assert path.get_parameter(name).std().item() == pytest.approx(0.02, rel=0.25)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_altup_starts_as_the_baseline_but_for_rounding(n: int, dynamic: bool) -> None:
    outputs = written()
    *inner, last = hiddens(built("altup", drawn=False, n=n, dynamic=dynamic), outputs)
    plain = list(itertools.accumulate(outputs))
    torch.testing.assert_close([*inner, last / n], plain, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("drawn", "rtol"), [(False, 1e-4), (True, 5e-3)])
def test_mhc_starts_near_half_of_n_times_the_baseline(drawn: bool, rtol: float) -> None:
    """Without projections to what epsilon takes of each column sum; with them less near."""
    path, outputs = built("mhc", drawn=False), written()
    if not drawn:
        nn.init.zeros_(path.projection), nn.init.zeros_(path.head_projection)
    for found, plain in zip(hiddens(path, outputs), itertools.accumulate(outputs), strict=True):
        assert (found / 2 - plain).norm() < rtol * plain.norm()


def test_projections_of_muon_are_the_same_path_in_matrices() -> None:
    """One matrix a site that Muon owns, drawn as the stacked ones are: the same hidden states."""
    stacked = built("mhc", drawn=False)
    split = built("mhc", drawn=False, projections="muon")
    for site in range(2 * LAYERS):
        split.projection[site].data.copy_(stacked.projection[site])
    split.head_projection.data.copy_(stacked.head_projection)
    for found, truth in zip(hiddens(split, written()), hiddens(stacked, written()), strict=True):
        assert torch.equal(found, truth)
    model = Transformer(config_of("mhc", layers=1, rank=None, path={"projections": "muon"}))
    owned = assign(model.named_parameters(), model.roles())["muon"]
    assert {name.removeprefix("router.") for name, _ in owned if "router" in name} == {
        "projection.0", "projection.1", "head_projection",
    }  # fmt: skip
    for parameter in built("mhc", drawn=False, projections="muon").projection:
        assert parameter.std().item() == pytest.approx(0.02, rel=0.25)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_fraction_takes_of_each_fraction_what_its_marks_say(dynamic: bool) -> None:
    """The matrices that stand behind a heat map's numbers of Frac-Connections give h back."""
    path, outputs = built("frac", drawn=True, m=4, dynamic=dynamic), written()
    torch.manual_seed(0)
    traced = Traced(path)
    state = traced.begin(outputs[0])
    for site, output in enumerate(outputs[1:]):
        state = traced.write(state, site, output)
        matrices = state.hidden.marks  # [tokens, fraction, source, its fraction]
        pieces = torch.stack(outputs, 1).unflatten(-1, (4, -1))
        mixed = torch.einsum("tcsj,tsjw->tcw", matrices, pieces)
        torch.testing.assert_close(mixed, state.hidden.values)
        torch.testing.assert_close(mixed.flatten(-2), traced.hidden(state, site + 1))
        means = traced.coefficients(state, site + 1)
        own = torch.einsum("tcsc->ts", matrices)[..., : site + 2] / 4
        torch.testing.assert_close(means, own)


@pytest.mark.parametrize(
    "residual", ["hc", "mhc", "frac", "laurel", "postnorm", "highway", "altup"]
)
def test_bfloat16_rounds_streams_and_nothing_else(residual: str) -> None:
    """A state is in the model's type, and a read is few roundings of streams from float32."""
    path = built(residual, 3, drawn=False).float()
    outputs = [output.bfloat16() for output in written(64)]
    exact = hiddens(path, [output.float() for output in outputs])
    for found, truth in zip(hiddens(path, outputs), exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found - truth).norm() < 0.01 * truth.norm()


def kept_for_backward(iterations: int) -> int:
    """Tensors that a pass of mHC keeps."""
    path, outputs = built("mhc", drawn=True, iterations=iterations), written()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        hiddens(path, outputs)
    return len(kept)


def test_sinkhorn_keeps_none_of_its_iterates() -> None:
    assert kept_for_backward(iterations=2) == kept_for_backward(iterations=40)


def test_sinkhorn_is_made_again_inside_a_step_that_is_made_again() -> None:
    """Checkpoints inside checkpoints, in one compiled graph."""
    config = config_of("mhc", layers=1, rank=None, path={"n": 2, "iterations": 3})
    tokens = torch.tensor([[3, 1, 4, 1]])

    def gradients(model: Transformer) -> list[Tensor]:
        logits = model(tokens, model.mask(None, 1, 4))
        return list(torch.autograd.grad(logits.square().sum(), list(model.parameters())))

    models = [Transformer(config) for _ in range(2)]
    for model in models:
        initialize(model, seed=0)
    torch._dynamo.reset()
    AC_MODES[AC.full](models[1])
    models[1].compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(models[1]), gradients(models[0]), rtol=1e-4, atol=1e-6)


REFUSED = [
    ("frac", None, {"m": 3}, "write model.path.m=2"),
    ("laurel", None, {"parts": "lr+rw"}, "write one of rw, lr, pa, rw+lr, rw+pa"),
    ("laurel", None, {"parts": "pa", "back": 7}, "write 1 to 2*model.layers=6"),
    ("laurel", 9, {}, "must be between 1 and model.dim=8"),
    ("hc", None, {"norm": "batch"}, "must be one of layer, rms"),
    ("mhc", None, {"head": "mean"}, "must be one of learned, sum"),
    ("highway", None, {"gate": "matrix"}, "must be one of scalar, vector"),
]


@pytest.mark.parametrize(("residual", "rank", "options", "words"), REFUSED)
def test_what_cannot_be_is_refused(
    residual: str, rank: int | None, options: dict, words: str
) -> None:
    config = config_of(residual, layers=LAYERS, rank=rank, path=options)
    (error,) = path_of(config).errors(config)
    name, value = next(iter(reversed(options.items())), ("rank", rank))
    assert f"{name}={value}" in error and words in error


NO_MEANING = [
    ("hc", None, {"dynamic": False, "norm": "rms", "tanh": False}, ["norm", "tanh"]),
    ("frac", None, {"dynamic": False, "tanh": False}, ["tanh"]),
    ("laurel", 4, {"parts": "rw"}, ["model.rank"]),
    ("laurel", 4, {"parts": "lr", "back": 2}, ["back"]),
    ("laurel", None, {"parts": "lr"}, ["model.rank=null: recorded as 32"]),
]


@pytest.mark.parametrize(("residual", "rank", "options", "said"), NO_MEANING)
def test_settings_that_another_leaves_without_a_meaning(residual, rank, options, said) -> None:
    config = config_of(residual, dim=32, rank=rank, path=options)
    settled, notes = path_of(config).settled(config)
    assert len(notes) == len(said)
    assert all(words in note for words, note in zip(said, notes, strict=True))
    assert path_of(settled).settled(settled) == (settled, [])
