"""Held-out loss: nats a token, perplexity and bits a byte over a fixed budget of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import SumMetric

from lrattnres.data.packing import IGNORE
from lrattnres.data.tokenizers import Tokenizer
from lrattnres.evaluation.loss import window_losses
from lrattnres.model.transformer import Transformer


@dataclass(frozen=True)
class HeldOut:
    """loss: nats a token; tokens: how many were predicted; bytes: of text they stand for (a separator stands for none)."""

    loss: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """All nats, those of the separators too, over the bytes of the text."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else math.nan

    def record(self) -> dict[str, Any]:
        """Plain names for metrics.jsonl."""
        values = asdict(self) | {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {f"val_{name}": value for name, value in values.items()}


@torch.no_grad()
def evaluate(model: Transformer, windows: Iterable[Tensor], tokenizer: Tokenizer, *, documents: bool) -> HeldOut:
    """Cross-entropy alone, without z-loss, over windows [B, T+1] whose padding is IGNORE. Sums are float64."""
    nats, tokens, size = (SumMetric(nan_strategy="disable").set_dtype(torch.float64) for _ in range(3))
    bytes_of = torch.from_numpy(tokenizer.token_bytes)
    for batch in windows:
        sums = window_losses(model, batch, tokenizer.separator, documents=documents).sums()
        targets = batch[:, 1:]
        nats.update(sums.cross_entropy.cpu())
        tokens.update(sums.tokens.cpu())
        size.update(bytes_of[targets[targets != IGNORE]].sum().double())
    count = int(tokens.compute())
    return HeldOut(loss=nats.compute().item() / count, tokens=count, bytes=int(size.compute()))
