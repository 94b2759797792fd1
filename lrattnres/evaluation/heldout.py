"""Held-out loss: nats a token, perplexity and bits a byte over a fixed budget of tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lrattnres.data.packing import IGNORE
from lrattnres.data.tokenizers import Tokenizer
from lrattnres.distributed.ranks import Ranks
from lrattnres.model.loss import window_losses
from lrattnres.model.transformer import Transformer


@dataclass(frozen=True)
class HeldOut:
    """What was measured over held-out tokens.

    Attributes:
        loss: Nats a token.
        tokens: How many were predicted.
        bytes: Of text that they stand for; a separator stands for none.
    """

    loss: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.inf if self.loss >= 700 else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """All nats, those of the separators too, over the bytes of the text."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else math.nan

    def record(self) -> dict[str, Any]:
        """Plain names for metrics.jsonl."""
        values = asdict(self) | {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {f"val_{name}": value for name, value in values.items()}


@torch.no_grad()
def evaluate(
    model: Transformer,
    windows: Iterable[Tensor],
    tokenizer: Tokenizer,
    *,
    documents: bool,
    ranks: Ranks | None = None,
    pause: Callable[[], None] = lambda: None,
) -> HeldOut:
    """Cross-entropy alone, without z-loss; sums are float64.

    Rank r of W takes batches r, r + W, …; all their sums are then added in the order of the
    batches, so the result is the same for any number of ranks. All ranks take part in every pass,
    with padding where the batches run out: the weights of a sharded model are gathered by all.

    Args:
        model: The model.
        windows: Batches of windows, int64 [B, T+1], whose padding is IGNORE.
        tokenizer: Knows the separator, and the bytes of each token.
        documents: Whether attention stays inside a document.
        ranks: Those that share the windows; None: this process alone.
        pause: Is called before every pass by all ranks, and may end the evaluation by raising.
    """
    ranks = ranks or Ranks()
    bytes_of = torch.from_numpy(tokenizer.token_bytes)
    sums = []
    for batch in shares(windows, ranks):
        pause()
        losses = window_losses(model, batch, tokenizer.separator, documents=documents).sums()
        targets = batch[:, 1:]
        text = bytes_of[targets[targets != IGNORE]].sum()
        sums.append(torch.stack([losses.cross_entropy.cpu(), losses.tokens.cpu(), text.double()]))
    in_order = ranks.gather(torch.stack(sums)).transpose(0, 1).flatten(0, 1)
    nats, tokens, size = (_total(column) for column in in_order.unbind(1))
    return HeldOut(loss=nats / tokens, tokens=int(tokens), bytes=int(size))


def _total(values: Tensor) -> float:
    """The sum, added one after the other: padding at the end changes no digit."""
    from torchmetrics import SumMetric  # takes seconds, which a refusal need not wait for

    metric = SumMetric(nan_strategy="disable", sync_on_compute=False).set_dtype(torch.float64)
    for value in values:
        metric.update(value)
    return metric.compute().item()


def shares(windows: Iterable[Tensor], ranks: Ranks) -> Iterator[Tensor]:
    """This rank's batches r, r + W, …, as many on every rank; padding where they run out."""
    batches = iter(windows)
    while round_ := list(itertools.islice(batches, ranks.world)):
        yield round_[ranks.rank] if ranks.rank < len(round_) else torch.full_like(round_[0], IGNORE)
