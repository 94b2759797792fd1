"""The whole optimizer against torch's own Muon and Adam; its state cut in half and continued."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lrattnres.config import OptimizerConfig, Orthogonalizer
from lrattnres.optim.muon_adam import MuonAdam
from lrattnres.optim.schedule import learning_rate_factor, momentum
from lrattnres.residual.base import Role

STEPS = 10
CONFIG = OptimizerConfig(muon_lr=0.02, adam_lr=0.01, warmup=3, momentum_rise=2, momentum_fall=2)
SHAPES = {
    "embedding.weight": (11, 8),
    "sublayers.0.input.weight": (24, 8),
    "sublayers.0.output.weight": (10, 8),
    "sublayers.1.input.weight": (24, 8),
    "sublayers.1.output.weight": (10, 12),
    "router.queries": (4, 2),
    "router.embedding_key.weight": (2, 8),
    "head.weight": (11, 8),
}
ADAM = ("embedding.weight", "router.queries", "head.weight")
ROLES = {
    "queries": Role("adam", False, 0.0),
    "embedding_key.weight": Role("muon", True, 0.0),
}

Parameters = dict[str, nn.Parameter]


def fresh() -> Parameters:
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(0.3 * torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


def give_gradients(parameters: Parameters, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = 0.1 * torch.randn(parameter.shape, generator=generator)


def train(optimizer: MuonAdam, parameters: Parameters, first: int, last: int) -> None:
    for step in range(first, last):
        give_gradients(parameters, step)
        optimizer.set_step(step)
        optimizer.step()


def build(parameters: Parameters, steps: int = STEPS, **changes: Any) -> MuonAdam:
    config = dataclasses.replace(CONFIG, **changes)
    return MuonAdam(parameters.items(), config, steps, roles=ROLES)


def test_adam_is_torchs_adam_to_the_bit() -> None:
    ours, theirs = fresh(), fresh()
    optimizer = build(ours)
    reference = torch.optim.Adam(
        [theirs[name] for name in ADAM], betas=(0.9, 0.95), eps=1e-8, fused=True
    )
    for step in range(STEPS):
        train(optimizer, ours, step, step + 1)
        give_gradients(theirs, step)
        reference.param_groups[0]["lr"] = 0.01 * learning_rate_factor(step, CONFIG, STEPS)
        reference.step()
        assert optimizer.rates()["lr_adam"] == reference.param_groups[0]["lr"]
    for name in ADAM:
        assert torch.equal(ours[name], theirs[name])
        assert not torch.equal(ours[name], fresh()[name])


def test_adam_agrees_with_torchs_plain_loop() -> None:
    ours, theirs = fresh(), fresh()
    optimizer = build(ours)
    reference = torch.optim.Adam(
        [theirs[name] for name in ADAM], betas=(0.9, 0.95), eps=1e-8, foreach=False
    )
    for step in range(STEPS):
        train(optimizer, ours, step, step + 1)
        give_gradients(theirs, step)
        reference.param_groups[0]["lr"] = 0.01 * learning_rate_factor(step, CONFIG, STEPS)
        reference.step()
    for name in ADAM:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


def exact_newton_schulz(
    grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """What torch.optim.Muon calls, on singular values in float64, in place of its bfloat16."""
    a, b, c = coefficients
    u, s, vh = torch.linalg.svd(grad.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return ((u * s) @ vh).to(grad.dtype)


@pytest.mark.parametrize("exact", [True, False])
def test_muon_is_torchs_muon(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if exact:
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", exact_newton_schulz)
    ours, theirs = fresh(), fresh()
    optimizer = build(ours, cautious=False, orthogonalizer=Orthogonalizer.newton_schulz)
    names = [name for name in SHAPES if name not in ADAM]
    reference = torch.optim.Muon([theirs[name] for name in names], weight_decay=0.1)
    for step in range(STEPS):
        train(optimizer, ours, step, step + 1)
        give_gradients(theirs, step)
        reference.param_groups[0]["lr"] = 0.02 * learning_rate_factor(step, CONFIG, STEPS)
        reference.param_groups[0]["momentum"] = momentum(step, CONFIG, STEPS)
        reference.step()
    for name in names:
        # bfloat16 is off by up to 1% of each update: ten of them, of at most 0.02 * sqrt(3).
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-6 if exact else 2e-3)


def test_all_state_is_there_at_once() -> None:
    tensors = build(fresh()).tensors()
    moments = {f"{name}.{moment}" for name in ADAM for moment in ("exp_avg", "exp_avg_sq", "step")}
    assert set(tensors) == moments | {
        f"{name}.momentum_buffer" for name in SHAPES if name not in ADAM
    }
    for key, tensor in tensors.items():
        name, moment = key.rsplit(".", 1)
        assert tensor.shape == (() if moment == "step" else SHAPES[name])
        assert not tensor.any()


@pytest.mark.parametrize("through", ["tensors", "state_dict"])
def test_a_run_cut_in_half_continues_to_the_bit(through: str, tmp_path: Path) -> None:
    whole = fresh()
    optimizer = build(whole)
    train(optimizer, whole, 0, 4)
    saved = {
        "parameters": whole,
        "state": optimizer.tensors() if through == "tensors" else optimizer.state_dict(),
    }
    torch.save(saved, tmp_path / "half.pt")
    train(optimizer, whole, 4, STEPS)

    loaded = torch.load(tmp_path / "half.pt", weights_only=True)
    half = loaded["parameters"]
    second = build(half)
    if through == "tensors":
        for key, tensor in second.tensors().items():
            tensor.copy_(loaded["state"][key])
    else:
        second.load_state_dict(loaded["state"])
    train(second, half, 4, STEPS)

    for name in SHAPES:
        assert torch.equal(whole[name], half[name])
    expected = optimizer.tensors()
    assert {
        key for key, tensor in second.tensors().items() if torch.equal(tensor, expected[key])
    } == set(expected)


def test_loaded_state_lands_where_the_parameters_are() -> None:
    elsewhere = {name: nn.Parameter(parameter.to("meta")) for name, parameter in fresh().items()}
    optimizer = build(elsewhere)
    optimizer.load_state_dict(build(fresh()).state_dict())
    assert {tensor.device.type for tensor in optimizer.tensors().values()} == {"meta"}


def test_a_zero_gradient_moves_nothing() -> None:
    parameters = fresh()
    optimizer = build(parameters)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.set_step(5)
    optimizer.step()
    for name, start in fresh().items():
        assert torch.equal(parameters[name], start)


def test_a_missing_gradient_is_named_and_changes_nothing() -> None:
    parameters = fresh()
    optimizer = build(parameters)
    give_gradients(parameters, 0)
    parameters["head.weight"].grad = parameters["sublayers.1.output.weight"].grad = None
    optimizer.set_step(0)
    with pytest.raises(
        RuntimeError, match=r"no gradient for sublayers.1.output.weight, head.weight;"
    ):
        optimizer.step()
    for name, start in fresh().items():
        assert torch.equal(parameters[name], start)
    assert not any(tensor.any() for tensor in optimizer.tensors().values())


def test_every_step_is_set() -> None:
    parameters = fresh()
    optimizer = build(parameters)
    give_gradients(parameters, 0)
    with pytest.raises(RuntimeError, match=r"call set_step\(step\) before each step"):
        optimizer.step()
    train(optimizer, parameters, 0, 1)
    with pytest.raises(RuntimeError, match=r"call set_step\(step\) before each step"):
        optimizer.step()


@pytest.mark.parametrize("routing_lr", [None, 0.04])
def test_the_rates_that_are_logged_are_a_pure_function_of_the_step(
    routing_lr: float | None,
) -> None:
    optimizer = build(fresh(), routing_lr=routing_lr)
    for step, factor, m in ((0, 1 / 3, 0.85), (9, 0.1, 0.85), (5, 1.0, 0.95), (9, 0.1, 0.85)):
        optimizer.set_step(step)
        expected = {"lr_muon": factor * 0.02, "lr_adam": factor * 0.01, "momentum": m}
        expected |= {"lr_routing": factor * 0.04} if routing_lr else {}
        assert optimizer.rates() == pytest.approx(expected)


def test_the_rate_of_the_residual_path_is_that_of_all_that_adam_owns_there() -> None:
    """Also of a key matrix of one row; the rest moves as it does without such a rate."""
    row = {"router.embedding_key.weight": (1, 8)}
    moved, before = [], {}
    for routing_lr in (None, 0.04):
        torch.manual_seed(0)
        parameters = {n: nn.Parameter(torch.randn(size)) for n, size in (SHAPES | row).items()}
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        optimizer = build(parameters, routing_lr=routing_lr)
        train(optimizer, parameters, 0, 1)
        moved.append({name: (parameters[name] - before[name]).abs() for name in SHAPES})
    lines = [line for line in optimizer.ownership().splitlines() if "routing_lr=0.04" in line]
    assert [line.split()[:2] for line in lines] == [
        ["adam", "router.queries"],
        ["adam", "router.embedding_key.weight"],
    ]
    for name in SHAPES:
        if name.startswith("router."):  # Adam's first step is its rate, here a third of the peak
            for steps, rate in zip(moved, (0.01, 0.04), strict=True):
                near = torch.full_like(steps[name], rate / 3)
                torch.testing.assert_close(steps[name], near, rtol=1e-3, atol=1e-6)
        else:
            assert torch.equal(moved[0][name], moved[1][name])


def test_a_rate_for_the_residual_path_that_nothing_takes_is_refused() -> None:
    parameters = {n: p for n, p in fresh().items() if n != "router.queries"}
    with pytest.raises(ValueError, match=r"optimizer.routing_lr=0.04: Adam owns no parameter"):
        build(parameters, routing_lr=0.04)


def test_a_model_without_a_matrix_is_adams() -> None:
    parameters = {name: fresh()[name] for name in ADAM}
    optimizer = build(parameters)
    train(optimizer, parameters, 0, STEPS)
    assert set(optimizer.rates()) == {"lr_adam", "momentum"}
    assert optimizer.work() == {"matrices": 0, "flops": 0, "bytes_sent": 0}
    assert not torch.equal(parameters["head.weight"], fresh()["head.weight"])


def test_iterations_without_coefficients_raise_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"optimizer.iterations=6: must be 5"):
        build(fresh(), iterations=6)


def test_it_learns() -> None:
    """Every parameter is pulled to a target, which a wrong sign or scale would not reach."""
    parameters = fresh()
    optimizer = build(parameters, 200, muon_lr=0.1, adam_lr=0.1)
    target = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(7))
        for name, shape in SHAPES.items()
    }
    errors = []
    for step in range(200):
        loss = torch.stack(
            [(parameters[name] - target[name]).square().mean() for name in SHAPES]
        ).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.set_step(step)
        optimizer.step()
        errors.append(loss.item())
    assert errors[-1] < 0.01 * errors[0]
