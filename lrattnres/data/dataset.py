"""What a run reads, opened once: tokenizer, corpus, and the split into training and held-out documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lrattnres.config import TrainConfig
from lrattnres.data.corpora import Corpus, open_corpus, split
from lrattnres.data.streams import TrainStreams, held_out_windows
from lrattnres.data.tokenizers import Tokenizer, build_tokenizer


class Dataset(NamedTuple):
    """training, held_out: indices of documents in the corpus."""

    tokenizer: Tokenizer
    corpus: Corpus
    training: np.ndarray
    held_out: np.ndarray
    config: TrainConfig

    @property
    def identity(self) -> dict[str, str]:
        """What must not change between two starts of a run."""
        return {"corpus": self.corpus.fingerprint, "tokenizer": self.tokenizer.fingerprint}

    def streams(self, rank: int = 0, world: int = 1) -> TrainStreams:
        """The training windows of one rank of `world`, from the beginning."""
        config = self.config
        return TrainStreams(
            self.corpus,
            self.training,
            self.tokenizer,
            context=config.model.context,
            streams=config.global_batch,
            seed=config.seed,
            rank=rank,
            world=world,
        )

    def held_out_windows(self, tokens: int, batch: int) -> Iterator[Tensor]:
        """The first `tokens` held-out targets, in windows [<= batch, context + 1]: the same tokens for any batch."""
        context = self.config.model.context
        return held_out_windows(self.corpus, self.held_out, self.tokenizer, context=context, tokens=tokens, batch=batch)


def open_dataset(config: TrainConfig) -> Dataset:
    """Raises DataError where the tokenizer or the corpus cannot be had."""
    tokenizer = build_tokenizer(config.tokenizer.name)
    corpus = open_corpus(config.data)
    training, held_out = split(corpus, config.data.holdout)
    return Dataset(tokenizer, corpus, training, held_out, config)
