"""Headerless token files, as the released code of the papers writes them: uint32 tokens and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.pieces import Pieces
from lrattnres.data.text import bytes_hash
from lrattnres.data.tokenizers import Tokenizer

ENDING, DTYPE = ".bin", np.dtype("<u4")
CHUNK = 1 << 22  # tokens
REMEDY = "restore it"


class BinTokens:
    """The .bin files of one folder as Documents, a file a group. A separator opens each document.

    Such files say neither which tokenizer wrote them nor what the texts were. So tokens outside the
    vocabulary are refused, content hashes are those of the tokens (which documents are held out
    differs from streaming the texts), and what stands before the first separator of a file is a
    document of its own.
    """

    streamed = False
    listing = None
    skipped = ""

    def __init__(self, root: Path, tokenizer: Tokenizer):
        """Reads every file once, to count its documents.

        Raises:
            DataError: a file is none of this tokenizer's.
        """
        self._separator = tokenizer.separator
        self._paths = sorted(root.glob("*" + ENDING))
        self._sizes = [path.stat().st_size for path in self._paths]
        counted = [
            _count(path, tokenizer)
            for path in tqdm(self._paths, "counting documents", leave=False, disable=None)
        ]
        self.rows = np.array([rows for rows, _ in counted], dtype=np.int64)
        self.sizes = np.array(self._sizes, dtype=np.int64)
        parts = [
            (path.name, size, *count)
            for path, size, count in zip(self._paths, self._sizes, counted, strict=True)
        ]
        self.fingerprint = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
        self.description = (
            f"tokens: {self.rows.sum():,} documents, {self.sizes.sum() // DTYPE.itemsize:,} tokens "
            f"in {len(self._paths):,} headerless files"
        )

    def group(self, number: int) -> _File:
        return _File(self._paths[number], self._sizes[number], self._separator)


class _File:
    low = 0

    def __init__(self, path: Path, size: int, separator: int):
        try:
            self._pieces = Pieces(path, REMEDY)
        except OSError as error:
            raise UnreadableError(f"{path}: {error}; {REMEDY}") from error
        if self._pieces.size != size:
            raise UnreadableError(
                f"{path}: {self._pieces.size:,} bytes, and {size:,} when the run started; {REMEDY}"
            )
        starts = np.concatenate(
            [begin + np.flatnonzero(part == separator) for begin, part in _parts(self._pieces)]
        )
        self._torn = not len(starts) or starts[0] != 0
        self._offsets = np.concatenate(
            [[0] if self._torn else [], starts, [size // DTYPE.itemsize]]
        ).astype(np.int64)
        self._opening = np.array([separator], dtype=DTYPE)
        self.present = np.ones(len(self._offsets) - 1, dtype=bool)
        content = (self._document(row).tobytes() for row in range(len(self.present)))
        self.hashes = np.fromiter(
            map(bytes_hash, content), dtype=np.uint64, count=len(self.present)
        )

    def tokens(self, row: int) -> np.ndarray:
        tokens = self._document(row)
        return np.concatenate([self._opening, tokens]) if row == 0 and self._torn else tokens

    def _document(self, row: int) -> np.ndarray:
        begin, end = self._offsets[row : row + 2].tolist()
        return self._pieces.array(begin * DTYPE.itemsize, end - begin, DTYPE)


def _parts(pieces: Pieces) -> Iterator[tuple[int, np.ndarray]]:
    """The tokens of a file in parts, and the number of the first of each."""
    length = pieces.size // DTYPE.itemsize
    for begin in range(0, length, CHUNK):
        yield begin, pieces.array(begin * DTYPE.itemsize, min(CHUNK, length - begin), DTYPE)


def _count(path: Path, tokenizer: Tokenizer) -> tuple[int, int]:
    """Documents in a file, and a checksum of where they begin."""
    pieces = Pieces(path, REMEDY)
    if pieces.size == 0 or pieces.size % DTYPE.itemsize:
        raise DataError(
            f"{path}: {pieces.size:,} bytes are no headerless uint32 tokens, or it is cut short"
        )
    rows, places = 0, 0
    for begin, part in _parts(pieces):
        if int(part.max()) >= tokenizer.vocabulary:
            at = int(np.argmax(part >= tokenizer.vocabulary))
            raise DataError(
                f"{path}: token {part[at]} at position {begin + at:,}, and {tokenizer.name} has "
                f"{tokenizer.vocabulary:,}; the file is of another tokenizer, has a header, or is "
                "damaged"
            )
        starts = np.flatnonzero(part == tokenizer.separator)
        rows += len(starts) + int(begin == 0 and part[0] != tokenizer.separator)
        places = (places + int(starts.sum()) + begin * len(starts)) % 2**63
    return rows, places
