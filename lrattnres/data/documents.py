"""What the order of training stands on: documents in groups that are read as a whole, and which of them are held out.

A corpus tells how many rows each of its groups has without reading one. A row is a document, or nothing: an empty or
null text, a score below the threshold, a later copy. Rows that are nothing keep their place, so that the order does not
depend on what is left out.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from lrattnres.data.errors import DataError
from lrattnres.data.tokenizers import Tokenizer


class Texts(Protocol):
    """The texts of one group."""

    hashes: np.ndarray
    """uint64 [rows]: `content_hash` of each text; anything where there is none."""
    present: np.ndarray
    """bool [rows]: whether the row is a document."""

    def text(self, row: int) -> str: ...


class Corpus(Protocol):
    """Texts in groups. Corpora with the same `fingerprint` hold the same groups in the same order."""

    rows: np.ndarray
    """int64 [groups]: the rows of each group."""
    sizes: np.ndarray
    """int64 [groups]: bytes of text in each group."""

    streamed: bool
    """Whether reading a group takes time and memory: it is then read by few, and what was searched for in it is kept."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def description(self) -> str:
        """One line for people: documents or rows, megabytes, what was left out."""

    @property
    def listing(self) -> dict[str, Any] | None:
        """The files behind the corpus as plain values, for the run folder; None where the fingerprint says it all."""

    def group(self, number: int) -> Texts:
        """Raises UnreadableError where it cannot be had now, DataError where it never can."""

    def place(self, group: int, row: int) -> str:
        """Where a row stands, for people."""


class Group(Protocol):
    """The documents of one group as tokens; `hashes` and `present` as in Texts."""

    hashes: np.ndarray
    present: np.ndarray

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

    def group(self, number: int) -> Group:
        return _EncodedGroup(self, number, self.corpus.group(number))


class _EncodedGroup:
    def __init__(self, documents: EncodedCorpus, number: int, texts: Texts):
        self._documents, self._number, self._texts = documents, number, texts
        self.hashes, self.present = texts.hashes, texts.present

    def tokens(self, row: int) -> np.ndarray:
        text, tokenizer = self._texts.text(row), self._documents.tokenizer
        try:
            return np.concatenate([self._documents.opening, tokenizer.encode(text)])
        except Exception as error:
            raise DataError(
                f"{self._documents.corpus.place(self._number, row)}: {tokenizer.name} cannot encode its {len(text):,} "
                f"characters, which begin {text[:60]!r} ({error}); take it out of the corpus"
            ) from error


def held_out(hashes: np.ndarray, holdout: float) -> np.ndarray:
    """bool: which documents are held out, by their content hashes (uint64).

    A document is held out iff its hash is below holdout * 2**64. This depends on its text alone, so copies of a text
    fall on the same side, and no seed, epoch or order moves one across.
    """
    if not 0 <= holdout <= 1:
        raise DataError(f"data.holdout={holdout}: must be a share between 0 and 1, such as 0.05")
    threshold = int(holdout * 2**64)
    return hashes <= np.uint64(threshold - 1) if threshold else np.zeros(len(hashes), dtype=bool)


def first_copies(hashes: np.ndarray, present: np.ndarray) -> np.ndarray:
    """bool [rows]: `present` without the rows whose content hash an earlier present row has."""
    candidates = np.flatnonzero(present)
    _, first = np.unique(hashes[candidates], return_index=True)
    kept = np.zeros(len(present), dtype=bool)
    kept[candidates[first]] = True
    return kept
