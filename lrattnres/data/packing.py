"""From windows of packed documents to what a model takes."""

from __future__ import annotations

import torch

IGNORE = -100


def segments(tokens: torch.Tensor, separator: int) -> torch.Tensor:
    """int32 [B, T]: the number of the document at each position of `tokens` [B, T], from 0 in every
    window.

    A separator opens its document. A window that starts inside a document starts with the rest of
    that one.
    """
    opened = (tokens == separator).cumsum(dim=1, dtype=torch.int32)
    return opened - opened[:, :1]


def split_windows(
    windows: torch.Tensor, separator: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """inputs (int64), targets (int64) and document numbers (int32), each [B, T], of int64 windows
    [B, T+1].

    Unused positions hold IGNORE in `windows`. They stay IGNORE in the targets; the inputs have
    separators there.
    """
    inputs = windows[:, :-1].masked_fill(windows[:, :-1] == IGNORE, separator)
    return inputs, windows[:, 1:], segments(inputs, separator)
