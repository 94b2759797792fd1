"""What a run reads, opened once: tokenizer, documents, and the windows that are made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lrattnres.config import TrainConfig
from lrattnres.data.corpora import cache_folder, open_documents
from lrattnres.data.documents import Documents
from lrattnres.data.errors import DataError
from lrattnres.data.heldout import held_out_documents, held_out_windows, kept_held_out
from lrattnres.data.streams import TrainStreams
from lrattnres.data.tokenizers import Tokenizer, build_tokenizer

GIB = 2**30


class Dataset(NamedTuple):
    """The corpus of a run, and how its settings read it."""

    tokenizer: Tokenizer
    documents: Documents
    config: TrainConfig

    @property
    def identity(self) -> dict[str, str]:
        """What must not change between two starts of a run."""
        return {"corpus": self.documents.fingerprint, "tokenizer": self.tokenizer.fingerprint}

    @property
    def description(self) -> str:
        """One line for people."""
        parts = [self.documents.description, self.documents.skipped]
        parts += [f"{self.config.data.holdout:.3g} of them held out"]
        return "; ".join(filter(None, parts))

    def streams(self, rank: int = 0, world: int = 1) -> TrainStreams:
        """The training windows of rank `rank` of `world`, from the beginning.

        Raises:
            DataError: there is nothing to train on, or its groups would take more than
                `data.memory`.
        """
        config, data = self.config, self.config.data
        self._check_memory(config.global_batch // world)
        return TrainStreams(
            self.documents,
            context=config.model.context,
            streams=config.global_batch,
            seed=config.seed,
            holdout=data.holdout,
            rank=rank,
            world=world,
            workers=data.workers,
            ahead=data.ahead,
            skip_unreadable=data.skip_unreadable,
        )

    def held_out_windows(self, tokens: int, batch: int) -> Iterator[Tensor]:
        """The first `tokens` held-out targets, in windows: int64 [<= batch, context + 1].

        They are the same tokens for any batch.
        """
        return held_out_windows(
            self._held_out(tokens), context=self.config.model.context, tokens=tokens, batch=batch
        )

    def prepare_held_out(self) -> None:
        """Reads all held-out tokens once: a run is not to find out at its end that there are fewer.

        Then a warning says so. A streamed corpus is searched for those of the diagnostics, too.

        Raises:
            DataError: there are none.
            UnreadableError: a group cannot be read, even where training passes over it: the
                held-out set has no gaps.
        """
        settings = self.config.evaluation
        diagnostics = settings.diagnostics_tokens
        if self.documents.streamed:
            self._held_out(max(settings.tokens, diagnostics))
        tokens = max(settings.tokens, diagnostics if settings.diagnostics_every else 0)
        for _ in self.held_out_windows(tokens, settings.batch):
            pass

    def _held_out(self, tokens: int) -> Iterator[np.ndarray]:
        data = self.config.data
        found = held_out_documents(
            self.documents, data.holdout, data.workers if self.documents.streamed else 0
        )
        if self.documents.streamed:
            key = (self.documents.fingerprint, self.tokenizer.fingerprint, data.holdout)
            return kept_held_out(cache_folder(data.cache), key, tokens, found, self.tokenizer)
        return (part for _, part in found)

    def _check_memory(self, owned: int) -> None:
        """Every stream holds the group it reads; streams that read the same group share it."""
        if not self.documents.streamed:
            return
        largest = np.sort(self.documents.sizes)[-owned:]
        limit = self.config.data.memory
        if largest.sum() > limit * GIB:
            raise DataError(
                f"data.memory={limit:g}: {owned} streams of this process hold a row group each, "
                f"together up to {largest.sum() / GIB:.1f} GiB of text; tokenize the corpus first "
                "(scripts/tokenize_corpus.py; data=tokens needs none of it), or write a larger "
                "data.memory"
            )


def open_dataset(
    config: TrainConfig, pinned: dict[str, Any] | None = None, *, fresh: bool = False
) -> Dataset:
    """The corpus and the tokenizer of a run.

    Args:
        config: its settings.
        pinned: the listing in the run's folder, where there is one.
        fresh: `pinned` is what another rank has listed just now, and nothing is listed again.

    Raises:
        DataError: something cannot be had.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    if tokenizer.vocabulary > (config.model.vocabulary or 0):
        raise DataError(
            f"model.vocabulary={config.model.vocabulary}: tokenizer {tokenizer.name} has "
            f"{tokenizer.vocabulary} tokens; write at least that"
        )
    return Dataset(tokenizer, open_documents(config.data, tokenizer, pinned, fresh=fresh), config)
