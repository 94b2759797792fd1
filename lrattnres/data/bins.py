"""Headerless token files, as the released code of the papers writes them: uint32 tokens and nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lrattnres.data.errors import DataError
from lrattnres.data.text import bytes_hash
from lrattnres.data.tokenizers import Tokenizer

ENDING, DTYPE = ".bin", np.dtype("<u4")
CHUNK = 1 << 22  # tokens


class BinTokens:
    """The .bin files of one folder as Documents, a file a group. A separator opens each document.

    Such files say neither which tokenizer wrote them nor what the texts were. So tokens outside the vocabulary are
    refused, content hashes are those of the tokens (which documents are held out differs from streaming the texts), and
    what stands before the first separator of a file is a document of its own.
    """

    streamed = False
    listing = None

    def __init__(self, root: Path, tokenizer: Tokenizer):
        """Reads every file once, to count its documents. Raises DataError that names the file."""
        self._separator = tokenizer.separator
        self._paths = sorted(root.glob("*" + ENDING))
        counted = [
            _count(path, tokenizer)
            for path in tqdm(self._paths, "counting documents", leave=False, disable=None)
        ]
        self.rows = np.array([rows for rows, _ in counted], dtype=np.int64)
        self.sizes = np.array([path.stat().st_size for path in self._paths], dtype=np.int64)
        parts = [
            (path.name, size, *count)
            for path, size, count in zip(self._paths, self.sizes.tolist(), counted, strict=True)
        ]
        self.fingerprint = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
        self.description = (
            f"tokens: {self.rows.sum():,} documents, {self.sizes.sum() // DTYPE.itemsize:,} tokens in {len(self._paths):,} "
            "headerless files"
        )

    def group(self, number: int) -> _File:
        return _File(self._paths[number], self._separator)


class _File:
    def __init__(self, path: Path, separator: int):
        self._tokens = np.memmap(path, dtype=DTYPE, mode="r").view(np.ndarray)
        starts = np.flatnonzero(self._tokens == separator)
        self._torn = not len(starts) or starts[0] != 0
        self._offsets = np.concatenate(
            [[0] if self._torn else [], starts, [len(self._tokens)]]
        ).astype(np.int64)
        self._opening = np.array([separator], dtype=DTYPE)
        self.present = np.ones(len(self._offsets) - 1, dtype=bool)
        content = (
            self._tokens[begin:end].tobytes()
            for begin, end in zip(self._offsets, self._offsets[1:], strict=False)
        )
        self.hashes = np.fromiter(
            map(bytes_hash, content), dtype=np.uint64, count=len(self.present)
        )

    def tokens(self, row: int) -> np.ndarray:
        tokens = self._tokens[self._offsets[row] : self._offsets[row + 1]]
        return np.concatenate([self._opening, tokens]) if row == 0 and self._torn else tokens


def _count(path: Path, tokenizer: Tokenizer) -> tuple[int, int]:
    """Documents in a file, and a checksum of where they begin."""
    size = path.stat().st_size
    if size == 0 or size % DTYPE.itemsize:
        raise DataError(
            f"{path}: {size:,} bytes are no headerless uint32 tokens, or it is cut short"
        )
    tokens = np.memmap(path, dtype=DTYPE, mode="r").view(np.ndarray)
    rows, places = int(tokens[0] != tokenizer.separator), 0
    for begin in range(0, len(tokens), CHUNK):
        part = tokens[begin : begin + CHUNK]
        if int(part.max()) >= tokenizer.vocabulary:
            at = begin + int(np.argmax(part >= tokenizer.vocabulary))
            raise DataError(
                f"{path}: token {tokens[at]} at position {at:,}, and {tokenizer.name} has {tokenizer.vocabulary:,}; the file is "
                "of another tokenizer, has a header, or is damaged"
            )
        starts = np.flatnonzero(part == tokenizer.separator)
        rows, places = (
            rows + len(starts),
            (places + int(starts.sum()) + begin * len(starts)) % 2**63,
        )
    return rows, places
