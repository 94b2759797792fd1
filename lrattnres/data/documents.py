"""What the order of training stands on: documents in groups, and which of them are held out.

A corpus tells how many rows each of its groups has without reading one. A row is a document, or it
is skipped: an empty or null text, a score below the threshold, a later copy. Skipped rows keep
their place, so that the order does not depend on what is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from lrattnres.data.errors import DataError
from lrattnres.data.tokenizers import Tokenizer


class Texts(Protocol):
    """The texts of one group.

    Attributes:
        hashes: uint64 [rows], `content_hash` of each text; anything where there is none.
        present: bool [rows], whether the row is a document.
        low: how many rows are no document since their score is below `data.min_score`.
    """

    hashes: np.ndarray
    present: np.ndarray
    low: int

    def text(self, row: int) -> str: ...


class Corpus(Protocol):
    """Texts in groups. Corpora of the same `fingerprint` hold the same groups in the same order.

    Attributes:
        rows: int64 [groups], the rows of each group.
        sizes: int64 [groups], bytes of text in each group.
        streamed: whether reading a group takes time and memory: it is then read by few, and what
            was
            searched for in it is kept.
    """

    rows: np.ndarray
    sizes: np.ndarray
    streamed: bool

    @property
    def fingerprint(self) -> str: ...
    @property
    def description(self) -> str:
        """One line for people: documents or rows, megabytes, what was left out."""

    @property
    def skipped(self) -> str:
        """The same of rows that were skipped so far, where `description` cannot know it; or ''."""

    @property
    def listing(self) -> dict[str, Any] | None:
        """The files as plain values, for the run folder; None where the fingerprint says it all."""

    def group(self, number: int) -> Texts:
        """Raises UnreadableError where it cannot be had now, DataError where it never can."""

    def place(self, group: int, row: int) -> str:
        """Where a row stands, for people."""


class Group(Protocol):
    """The documents of one group as tokens; the attributes are those of Texts."""

    hashes: np.ndarray
    present: np.ndarray
    low: int

    def tokens(self, row: int) -> np.ndarray:
        """Integers [1 + tokens]: the separator, then the text."""


class Documents(Protocol):
    """What streams read: a corpus whose groups come as tokens."""

    rows: np.ndarray
    sizes: np.ndarray
    streamed: bool

    @property
    def fingerprint(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def skipped(self) -> str: ...
    @property
    def listing(self) -> dict[str, Any] | None: ...
    def group(self, number: int) -> Group: ...


class EncodedCorpus:
    """The documents of `corpus`, tokenized when they are read."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer):
        self.corpus, self.tokenizer = corpus, tokenizer
        self.opening = np.array([tokenizer.separator], dtype=np.int32)
        self.rows, self.sizes, self.streamed = corpus.rows, corpus.sizes, corpus.streamed
        self.fingerprint, self.description, self.listing = (
            corpus.fingerprint,
            corpus.description,
            corpus.listing,
        )

    @property
    def skipped(self) -> str:
        return self.corpus.skipped

    def group(self, number: int) -> Group:
        return _EncodedGroup(self, number, self.corpus.group(number))


class _EncodedGroup:
    def __init__(self, documents: EncodedCorpus, number: int, texts: Texts):
        self._documents, self._number, self._texts = documents, number, texts
        self.hashes, self.present, self.low = texts.hashes, texts.present, texts.low

    def tokens(self, row: int) -> np.ndarray:
        text, tokenizer = self._texts.text(row), self._documents.tokenizer
        try:
            return np.concatenate([self._documents.opening, tokenizer.encode(text)])
        except Exception as error:
            place = self._documents.corpus.place(self._number, row)
            raise DataError(
                f"{place}: {tokenizer.name} cannot encode its {len(text):,} characters, which "
                f"begin {text[:60]!r} ({error}); take it out of the corpus"
            ) from error


def held_out(hashes: np.ndarray, holdout: float) -> np.ndarray:
    """Which documents are held out: those whose content hash is below holdout * 2**64.

    This depends on a text alone, so copies of it fall on the same side, and no seed, epoch or order
    moves one across.

    Args:
        hashes: uint64 [documents].
        holdout: a share between 0 and 1.

    Returns:
        bool [documents].
    """
    if not 0 <= holdout <= 1:
        raise DataError(f"data.holdout={holdout}: must be a share between 0 and 1, such as 0.05")
    threshold = int(holdout * 2**64)
    return hashes <= np.uint64(threshold - 1) if threshold else np.zeros(len(hashes), dtype=bool)


def first_copies(hashes: np.ndarray, present: np.ndarray) -> np.ndarray:
    """`present` (bool [rows]) without rows whose content hash (uint64 [rows]) came before."""
    candidates = np.flatnonzero(present)
    _, first = np.unique(hashes[candidates], return_index=True)
    kept = np.zeros(len(present), dtype=bool)
    kept[candidates[first]] = True
    return kept


class Counts(NamedTuple):
    """The rows of one group or more: how many there are, and why the others are not trained on."""

    rows: int = 0
    empty: int = 0  # or null, or a later copy
    low: int = 0
    held_out: int = 0

    @staticmethod
    def of(group: Group | Texts, holdout: float) -> Counts:
        """Of one group."""
        apart = int((group.present & held_out(group.hashes, holdout)).sum())
        missing = len(group.present) - int(group.present.sum())
        return Counts(len(group.present), missing - group.low, group.low, apart)

    @staticmethod
    def sum(parts: Iterable[Counts]) -> Counts:
        """Of several."""
        return Counts(*map(sum, zip(Counts(), *parts, strict=True)))

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows, {self.empty:,} of them empty, {self.low:,} below data.min_score, "
            f"{self.held_out:,} held out"
        )
