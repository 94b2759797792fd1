"""Head and losses: both forms against torch's own cross-entropy in float64."""

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters

from lrattnres.model import head
from lrattnres.model.attention import BACKENDS
from lrattnres.model.head import LOSSES, choose_loss
from lrattnres.model.loss import window_objective
from lrattnres.model.transformer import build_model
from lrattnres.training.memory import Alive, estimate_memory
from tests.config.test_config import composed
from tests.training.test_memory import settings as estimated

CPU = torch.device("cpu")


def drawn(tokens: int, vocabulary: int, dim: int, ignored: float = 0.3) -> tuple[Tensor, ...]:
    """hidden, weight (float64) and targets."""
    generator = torch.Generator().manual_seed(tokens + 100 * vocabulary + 10_000 * dim)
    hidden, weight = (
        torch.randn(size, dim, dtype=torch.float64, generator=generator)
        for size in (tokens, vocabulary)
    )
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = -100
    return hidden, weight, targets


def truth(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float) -> list[Tensor]:
    """The total, and its gradients."""
    leaves = [part.double().clone().requires_grad_() for part in (hidden, weight)]
    logits = leaves[0] @ leaves[1].T
    entropy = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    squares = torch.log(torch.exp(logits).sum(-1)).square()
    total = entropy + z_loss * squares[targets != -100].sum()
    return [total.detach(), *torch.autograd.grad(total, leaves)]


def found(name: str, hidden: Tensor, weight: Tensor, targets: Tensor, z: float) -> list[Tensor]:
    leaves = [part.clone().requires_grad_() for part in (hidden, weight)]
    objective = LOSSES[name].compute(*leaves, targets, z)
    assert not any(part.requires_grad for part in objective.losses)
    torch.testing.assert_close(objective.losses.total(z), objective.total.detach())
    assert objective.losses.tokens.equal(targets >= 0)
    return [objective.total.detach(), *torch.autograd.grad(objective.total, leaves)]


@pytest.mark.parametrize("name", list(LOSSES))
@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 40),
    vocabulary=st.integers(1, 19),
    dim=st.integers(1, 4),  # chunks of 4 to 16 tokens
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-5, 0.3]),
)
def test_float64(
    name: str, tokens: int, vocabulary: int, dim: int, ignored: float, z_loss: float
) -> None:
    parts = drawn(tokens, vocabulary, dim, ignored)
    for ours, exact in zip(found(name, *parts, z_loss), truth(*parts, z_loss), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", list(LOSSES))
def test_only_the_padding_of_a_batch_gives_nothing(name: str) -> None:
    total, *gradients = found(name, *drawn(9, 5, 2, ignored=1.0), 0.1)
    assert total == 0 and not any(gradient.any() for gradient in gradients)


def test_lower_precisions_lose_no_more_than_with_whole_logits() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, targets = drawn(300, 257, 16)
        low = hidden.to(dtype), weight.float(), targets
        exact = truth(
            low[0], weight.to(dtype) if dtype is torch.bfloat16 else low[1], targets, 0.01
        )
        errors = [
            [
                (part.double() - right).norm() / right.norm()
                for part, right in zip(parts, exact, strict=True)
            ]
            for parts in (found(name, *low, 0.01) for name in ("whole", "chunked"))
        ]
        for whole, chunked in zip(*errors, strict=True):
            assert chunked < 1.5 * whole + 1e-7, (dtype, errors)


@pytest.mark.parametrize("name", list(LOSSES))
def test_rows_that_pad_the_head_are_seen_by_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = drawn(50, 300, 8)
    plain = found(name, *parts, 0.1)
    monkeypatch.setattr(head, "_pads", lambda weight, dtype: True)
    assert head.padded(parts[1], torch.float64).shape == (384, 8)
    for padded, exact in zip(found(name, *parts, 0.1), plain, strict=True):
        torch.testing.assert_close(padded, exact, rtol=1e-12, atol=1e-12)


def test_no_more_logits_exist_than_those_of_a_chunk() -> None:
    tokens, vocabulary, dim = 4096, 1000, 16
    parts = [part.float() if part.is_floating_point() else part for part in drawn(4096, 1000, 16)]
    peaks = {}
    for name in LOSSES:
        leaves = [part.clone().requires_grad_() for part in parts[:2]]
        with Alive() as alive:
            LOSSES[name].compute(*leaves, parts[2], 1e-5).total.backward()
        peaks[name] = alive.peak
    chunk, weight = 4 * 4 * dim * vocabulary, 4 * vocabulary * dim
    assert peaks["whole"] > 2 * 4 * tokens * vocabulary
    assert peaks["chunked"] < 3 * chunk + 3 * weight + 2 * 4 * tokens * dim + 200 * tokens


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_is_compiled_has_one_operator_for_all_chunks(compiled: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    hidden, weight, targets = drawn(40, 11, 4)
    exact = truth(hidden, weight, targets, 0.1)
    leaves = [part.clone().requires_grad_() for part in (hidden, weight)]
    compute = torch.compile(LOSSES["chunked"].compute, fullgraph=True)
    objective = compute(*leaves, targets, 0.1, compiled=compiled)
    ours = [objective.total.detach(), *torch.autograd.grad(objective.total, leaves)]
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    # The second graph is that of a chunk, a third that of the last one, which is shorter.
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 1 if not compiled else 2 <= graphs <= 3


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_of_a_model_is_the_same_in_both_forms(tied: bool) -> None:
    config = composed("experiment=demo", "name=x", f"model.tied={str(tied).lower()}").model
    config.layers, config.dim, config.mlp_width, config.vocabulary = 2, 32, 48, 257
    windows = torch.randint(257, (2, 200))
    windows[1, 150:] = -100
    results = []
    for name in LOSSES:
        model = build_model(
            config, seed=0, device=CPU, attention=BACKENDS["sdpa"], dtype=torch.float32,
            loss=LOSSES[name],
        )  # fmt: skip
        objective = window_objective(model, windows, 256, documents=True, z_loss=1e-3)
        objective.total.backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        results.append((objective, gradients))
    (one, gradients), (other, others) = results
    torch.testing.assert_close(one, other)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[key], rtol=1e-4, atol=1e-5, msg=key)


def test_auto() -> None:
    def chosen(name: str, tokens: int, compiled: bool) -> tuple[str, str]:
        form = choose_loss(name, CPU, tokens, 1000, compiled=compiled)
        assert form.compiled is compiled
        return form.name, form.reason

    assert chosen("whole", 10**9, False) == ("whole", "as asked for")
    assert chosen("chunked", 1, True) == ("chunked", "as asked for")
    assert chosen("auto", 1, False)[0] == "chunked"
    assert chosen("auto", 64_000, True)[0] == "whole"
    name, reason = chosen("auto", 64_001, True)
    assert name == "chunked" and re.search("compiled.* 256 MB", reason)


def test_the_estimate_knows_the_form() -> None:
    """Whole logits of 8 windows of 96 tokens, with what their gradient needs, against chunks."""
    large = [f"loss={name}" for name in LOSSES]
    whole, chunked = (
        estimate_memory(estimated("model.vocabulary=20000", name), 1) for name in large
    )
    logits = 4 * 8 * 96 * 20_000
    assert 1.5 * logits < whole.activations - chunked.activations
    assert whole.weights == chunked.weights


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, targets = drawn(9, 5, 2)
    hidden.requires_grad_()
    total = LOSSES["chunked"].compute(hidden, weight, targets, 0.1).total
    with pytest.raises(RuntimeError, match="no second derivative; write loss=whole"):
        torch.autograd.grad(total, hidden, create_graph=True)
