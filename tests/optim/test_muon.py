"""Muon against a float64 SVD, the published derivation, and torch.optim.Muon."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lrattnres.config import Orthogonalizer
from lrattnres.optim import muon

SHAPES = [(48, 16), (16, 48), (2, 40), (30, 8)]
NEWTON_SCHULZ, POLAR_EXPRESS = Orthogonalizer.newton_schulz, Orthogonalizer.polar_express
RANGES = {NEWTON_SCHULZ: (0.65, 1.25), POLAR_EXPRESS: (0.84, 1.15)}
MARGINS = {NEWTON_SCHULZ: 1.0, POLAR_EXPRESS: 1.02}
# The polynomials are steep: a rounding error of 0.4% in bfloat16 can grow to 10% of the result.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.15}


def stack(shape: tuple[int, int], n: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def naive(matrix: Tensor, rows: Any, margin: float) -> Tensor:
    """The iteration on the singular values alone, in float64: the matrix never enters it."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (s.norm() * margin)
    for a, b, c in rows:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vh


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("orthogonalizer", Orthogonalizer)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_come_near_one_and_vectors_stay(
    shape: tuple[int, int],
    orthogonalizer: Orthogonalizer,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(muon, "iteration_dtype", lambda device: dtype)
    matrices = stack(shape) * torch.tensor([1e-4, 1.0, 1e4])[:, None, None]
    result = muon.orthogonalize(matrices, orthogonalizer, 5)
    assert result.dtype == torch.float32
    low, high = RANGES[orthogonalizer]
    rows = muon.ITERATIONS[orthogonalizer].take(5)
    for matrix, near in zip(matrices, result, strict=True):
        s = torch.linalg.svdvals(near.double())
        assert low < s.min()
        assert s.max() < high
        exact = naive(matrix, rows, MARGINS[orthogonalizer])
        assert (near - exact).norm() < TOLERANCES[dtype] * exact.norm()


def test_polar_express_is_nearer_to_the_polar_factor() -> None:
    matrices = stack((40, 24))
    u, _, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    newton, polar = (
        (muon.orthogonalize(matrices, kind, 5).double() - u @ vh).norm() for kind in RANGES
    )
    assert polar < 0.6 * newton


def best_quintic(low: float, high: float) -> tuple[float, float, float]:
    """Remez: the odd quintic whose error from 1 on [low, high] alternates four times alike."""
    inner = np.array([3 * low + high, low + 3 * high]) / 4
    for _ in range(50):
        x = np.array([low, *inner, high])
        a, b, c, _ = np.linalg.solve(np.stack([x, x**3, x**5, [1, -1, 1, -1]], axis=1), np.ones(4))
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = np.sqrt((-3 * b + np.array([-root, root])) / (10 * c))
    return a, b, c


def test_the_polar_express_table_follows_from_its_derivation() -> None:
    table: list[np.ndarray] = []
    low, high = 1e-3, 1.0
    for step in range(5):
        quintic = np.array(best_quintic(max(low, 0.02 * high), high))
        ends = [quintic @ [x, x**3, x**5] for x in (low, high)]
        if 0.02 * high > low:
            quintic *= 2 / sum(ends)  # centre the image of [low, high] on one
        if step < 4:
            quintic /= [1.02, 1.02**3, 1.02**5]
        low = float(quintic @ [low, low**3, low**5])
        high = 2 - low
        table.append(quintic)
    np.testing.assert_allclose(muon.ITERATIONS[POLAR_EXPRESS].rows, np.array(table), rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("orthogonalizer", Orthogonalizer)
def test_a_stack_equals_its_matrices_one_at_a_time(
    shape: tuple[int, int], orthogonalizer: Orthogonalizer
) -> None:
    matrices = stack(shape, 5)
    together = muon.orthogonalize(matrices, orthogonalizer, 5)
    alone = torch.cat([muon.orthogonalize(matrix[None], orthogonalizer, 5) for matrix in matrices])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    turned = muon.orthogonalize(matrices.mT, orthogonalizer, 5).mT
    torch.testing.assert_close(together, turned, rtol=0, atol=1e-6)


@pytest.mark.parametrize("orthogonalizer", Orthogonalizer)
def test_a_zero_matrix_gives_zero_and_leaves_its_neighbours_alone(
    orthogonalizer: Orthogonalizer,
) -> None:
    matrices = stack((6, 4), 2)
    matrices[1] = 0.0
    result = muon.orthogonalize(matrices, orthogonalizer, 5)
    assert torch.equal(result[1], torch.zeros(6, 4))
    assert torch.equal(result[0], muon.orthogonalize(matrices[:1], orthogonalizer, 5)[0])


def test_steps_without_coefficients_raise() -> None:
    for steps in (4, 6):
        with pytest.raises(ValueError, match=rf"optimizer.iterations={steps}: must be 5"):
            muon.orthogonalize(stack((4, 4)), POLAR_EXPRESS, steps)
    with pytest.raises(ValueError, match=r"optimizer.iterations=0: must be at least 1"):
        muon.orthogonalize(stack((4, 4)), NEWTON_SCHULZ, 0)
    assert len(muon.ITERATIONS[NEWTON_SCHULZ].take(7)) == 7


def test_nesterov_looks_ahead_of_the_average() -> None:
    gradients, buffer = [torch.tensor([[1.0]]), torch.tensor([[3.0]])], [torch.zeros(1, 1)]
    # B: 0 -> 0.25 -> 0.75 * 0.25 + 0.25 * 3 = 0.9375; look-ahead 0.75 B + 0.25 G.
    assert muon.nesterov(gradients[:1], buffer, 0.75).item() == 0.75 * 0.25 + 0.25 * 1.0
    assert muon.nesterov(gradients[1:], buffer, 0.75).item() == 0.75 * 0.9375 + 0.25 * 3.0
    assert buffer[0].item() == 0.9375


def test_cautious_decay_entry_by_entry() -> None:
    weight = torch.tensor([[2.0, 2.0, 2.0], [-2.0, -2.0, -2.0], [0.0, 0.0, 0.0]])
    update = torch.tensor([[1.0, -1.0, 0.0], [1.0, -1.0, 0.0], [1.0, -1.0, 0.0]])
    decays = [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    for cautious in (True, False):
        expected = [
            [
                w - 0.5 * 0.25 * w * (d if cautious else 1) - 0.5 * u
                for w, u, d in zip(*rows, strict=True)
            ]
            for rows in zip(weight.tolist(), update.tolist(), decays, strict=True)
        ]
        moved = weight.clone()
        muon.apply_updates(
            [moved], update[None], scale=1.0, lr=0.5, weight_decay=0.25, cautious=cautious
        )
        assert moved.tolist() == expected


@pytest.mark.parametrize(("shape", "scale"), [((16, 4), 2.0), ((4, 16), 1.0), ((9, 9), 1.0)])
def test_the_update_is_scaled_by_the_aspect_and_the_decay_is_not(
    shape: tuple[int, int], scale: float
) -> None:
    weight = torch.ones(shape)
    muon.apply_updates(
        [weight],
        torch.ones(1, *shape),
        scale=muon.update_scale(*shape),
        lr=0.5,
        weight_decay=0.25,
        cautious=False,
    )
    assert torch.equal(weight, torch.full(shape, 1.0 - 0.125 - 0.5 * scale))


@pytest.mark.gpu
def test_cuda_iterates_in_bfloat16_and_agrees_with_float64() -> None:
    matrices = stack((48, 16)).cuda()
    assert muon.iteration_dtype(matrices.device) == torch.bfloat16
    for orthogonalizer, iteration in muon.ITERATIONS.items():
        rows, margin = iteration.take(5), MARGINS[orthogonalizer]
        result = muon.orthogonalize(matrices, orthogonalizer, 5)
        exact = torch.stack([naive(matrix, rows, margin) for matrix in matrices.cpu()])
        assert (result.cpu() - exact).norm() < TOLERANCES[torch.bfloat16] * exact.norm()
