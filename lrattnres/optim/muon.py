"""Muon: the momentum of a matrix, made orthogonal, is its update.

After K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). All
functions work on stacks of equal matrices [n, rows, cols], so one batched product serves every
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lrattnres.config import Orthogonalizer

Quintic = tuple[float, float, float]

SMALLEST_NORM = 1e-7
"""A matrix of a smaller Frobenius norm is divided by this instead: its update is small, not NaN."""


@dataclass(frozen=True)
class Iteration:
    """X <- a X + b (X X^T) X + c (X X^T)^2 X, with one row (a, b, c) for each step.

    X starts as the matrix over `margin` times its Frobenius norm.

    Args:
        rows: a single row serves any number of steps. A longer table is made as a whole: a part of
            it would leave the singular values away from one.
        margin: at least 1.
    """

    rows: tuple[Quintic, ...]
    margin: float

    def take(self, steps: int) -> tuple[Quintic, ...]:
        """The rows of `steps` steps.

        Raises:
            ValueError: the table is not made for so many steps.
        """
        if len(self.rows) == 1 and steps >= 1:
            return self.rows * steps
        if len(self.rows) != steps:
            wanted = (
                "at least 1"
                if len(self.rows) == 1
                else f"{len(self.rows)}, the length of this orthogonalizer's table"
            )
            raise ValueError(f"optimizer.iterations={steps}: must be {wanted}")
        return self.rows


ITERATIONS = {
    # Jordan's quintic: steep at zero; the singular values that it leaves are 0.68 to 1.20.
    Orthogonalizer.newton_schulz: Iteration(rows=((3.4445, -4.7750, 2.0315),), margin=1.0),
    # Amsel et al., "The Polar Express" (2025), arXiv:2505.16932: each row is the best odd quintic
    # on the interval that the rows before it leave of [0.001, 1]; the result is 0.86 to 1.14. This
    # is the table of five steps that the public Muon training scripts share: cushion 0.02, and
    # every row but the last divides its argument by 1.02, which like the margin leaves room for
    # rounding.
    Orthogonalizer.polar_express: Iteration(
        rows=(
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        margin=1.02,
    ),
}


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Arithmetic of the iteration: bfloat16 on CUDA, where it is exact enough, else float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalize(matrices: Tensor, orthogonalizer: Orthogonalizer, steps: int) -> Tensor:
    """The orthogonal polar factor U V^T of each matrix U S V^T, nearly: S comes out near one.

    Args:
        matrices: [n, rows, cols]. Norms are taken in its dtype; the iteration runs in
            `iteration_dtype`. A zero matrix gives zero.
        orthogonalizer: which coefficients.
        steps: of the iteration.

    Returns:
        The factors, of the shape and dtype of `matrices`.

    Raises:
        ValueError: the orthogonalizer has no coefficients for so many steps.
    """
    iteration = ITERATIONS[orthogonalizer]
    norms = torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=SMALLEST_NORM)
    x = (matrices / (norms * iteration.margin)).to(iteration_dtype(matrices.device))
    tall = matrices.size(-2) > matrices.size(-1)
    x = x.mT if tall else x  # X X^T is then the smaller of the two Gram matrices
    for a, b, c in iteration.take(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT.contiguous() if tall else x).to(matrices.dtype)


def flops(rows: int, cols: int, steps: int) -> int:
    """Floating-point operations of `orthogonalize` on one matrix, two for a multiply-add."""
    small, large = sorted((rows, cols))
    return steps * (4 * small * small * large + 2 * small**3)


def update_scale(rows: int, cols: int) -> float:
    """sqrt(max(1, rows / cols)): the orthogonal factor of a tall matrix has smaller entries."""
    return max(1.0, rows / cols) ** 0.5


def nesterov(gradients: list[Tensor], buffers: list[Tensor], momentum: float) -> Tensor:
    """Nesterov momentum: B <- m B + (1 - m) G, then m B + (1 - m) G once more.

    This is the averaging convention of Jordan's code and of torch.optim.Muon. At constant m the
    other one, B <- m B + G, differs by a factor, which the orthogonalisation removes.

    Args:
        gradients: n matrices G [rows, cols].
        buffers: n matrices B like them, advanced in place.
        momentum: m.

    Returns:
        The second expression for each matrix, [n, rows, cols].
    """
    torch._foreach_lerp_(buffers, gradients, 1.0 - momentum)
    return torch.stack(torch._foreach_lerp(gradients, buffers, momentum))


def apply_updates(
    weights: Sequence[Tensor],
    updates: Tensor,
    *,
    scale: float,
    lr: float,
    weight_decay: float,
    cautious: bool,
) -> None:
    """Decays and moves every weight in place: W <- W - lr wd W - lr scale O.

    Args:
        weights: n matrices W [rows, cols], or the same rows of each.
        updates: O, [n, rows, cols].
        scale: see `update_scale`.
        lr: the learning rate.
        weight_decay: wd.
        cautious: an entry decays only where it and its update have the same sign. So the decay
            never works against the update, and a zero update decays nothing.
    """
    each, decayed = list(updates.unbind()), list(weights)
    if cautious:
        agree = torch._foreach_mul(decayed, each)
        decayed = list(torch._foreach_mul(decayed, [product > 0 for product in agree]))
    torch._foreach_sub_(list(weights), decayed, alpha=lr * weight_decay)
    torch._foreach_sub_(list(weights), each, alpha=lr * scale)
