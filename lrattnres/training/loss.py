"""What training minimises."""

from __future__ import annotations

import torch
from torch import Tensor

from lrattnres.model.loss import Losses


def objective(losses: Losses, z_loss: float, tokens: int) -> Tensor:
    """The share of some tokens in Σ cross-entropy / N + z · Σ logsumexp² / N.

    Sums are divided by the global number of targets, not averaged. So the shares of all
    micro-batches and ranks add up to the loss of the whole batch, also where they differ in size.

    Args:
        losses: Of the tokens of one micro-batch.
        z_loss: z, the weight of the mean squared logsumexp.
        tokens: N, the number of targets of the global batch.

    Returns:
        The two summands, float64 [2]. The gradient wanted is that of their sum.
    """
    sums = losses.sums()
    return torch.stack([sums.cross_entropy, z_loss * sums.squared_logsumexp]) / tokens
