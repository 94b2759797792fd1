"""From logits to the next token: what may be chosen, how likely it is, and the choice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Sampling(NamedTuple):
    """How a token is chosen.

    The filters follow one another in the order below; each works on what the one before has left,
    rescaled to sum to 1. None: no filter. Of equally likely tokens the smaller number counts as
    the likelier.

    Attributes:
        temperature: Logits are divided by it; 0 takes the most likely token.
        top_k: Leaves the k most likely tokens.
        top_p: Leaves the fewest of the most likely ones that together have this probability.
        min_p: Leaves those at least this many times as likely as the most likely one.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def probabilities(logits: Tensor, sampling: Sampling, allowed: Tensor | None = None) -> Tensor:
    """The distribution over tokens that `sampling` makes of logits.

    Args:
        logits: [B, V], of any floating-point type.
        sampling: How a token is chosen.
        allowed: bool [V], the tokens that may be chosen; None: all of them.

    Returns:
        float64 [B, V]; zero for what is out.

    Raises:
        FloatingPointError: A logit is not finite, so nothing can be drawn.
    """
    logits = logits.double()
    if not torch.isfinite(logits).all():
        raise FloatingPointError("the model's logits are not finite")
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    chances = torch.softmax((logits - logits.amax(-1, keepdim=True)) / sampling.temperature, dim=-1)
    if (sampling.top_k, sampling.top_p, sampling.min_p) == (None, None, None):
        return chances
    ordered, tokens = chances.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[:, sampling.top_k :] = 0
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered = ordered / ordered.sum(-1, keepdim=True)
        before = ordered.cumsum(-1) - ordered
        before[:, 0] = 0
        ordered = ordered.masked_fill(before >= sampling.top_p, 0)
    if sampling.min_p is not None:
        ordered = ordered.masked_fill(ordered < sampling.min_p * ordered[:, :1], 0)
    return torch.zeros_like(chances).scatter_(-1, tokens, ordered / ordered.sum(-1, keepdim=True))


class Dice:
    """Random numbers of one text, which depend on seed, sample and how many were drawn before."""

    def __init__(self, seed: int, sample: int):
        digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def draw(self) -> Tensor:
        """float64 scalar, uniform in [0, 1)."""
        return torch.rand((), dtype=torch.float64, generator=self._generator)


def choose(chances: Tensor, dice: Sequence[Dice]) -> Tensor:
    """One token for each row, by inversion of the row's distribution function.

    Args:
        chances: float64 [B, V]; rows need not sum to 1.
        dice: The random numbers of each row.

    Returns:
        int64 [B].
    """
    heights = chances.cumsum(-1)
    total = heights[:, -1:]
    drawn = torch.stack([die.draw() for die in dice]).unsqueeze(1).to(chances.device) * total
    # A product that was rounded up to the total would lie behind the last token.
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(heights, torch.minimum(drawn, below), right=True).squeeze(1)
