"""Tokens on disk: shards of documents that are memory-mapped, and the index that makes a corpus of them.

    DIRECTORY/
        index.json            tokenizer, source, and of every shard its name, size, tokens and checksum of its tables
        shard_00000.tokens    MAGIC, length of the header (8 bytes), header (JSON), then arrays at multiples of 64 bytes:
                              tokens (uint16 or uint32), offsets (int64 [rows + 1]), hashes (uint64 [rows]),
                              checks (uint32 [rows]: CRC-32 of the row's tokens), groups (int64: rows of each group)

All numbers are little-endian. A document's tokens begin with the separator; a row without tokens is no document. The
groups are those of the corpus that was tokenized, so both give the same order of training.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lrattnres.data.documents import first_copies
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.tokenizers import Tokenizer

MAGIC, FORMAT, ALIGNMENT = b"LRTOKENS", 1, 64
INDEX = "index.json"


@dataclass(frozen=True)
class Entry:
    """One shard in the index. `tables` is the CRC-32 of everything in the file but the tokens, which have their own."""

    name: str
    bytes: int
    rows: int
    tokens: int
    tables: int


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest of the two that holds every token."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def write_shard(
    path: Path,
    groups: Iterable[Iterable[tuple[int, np.ndarray]]],
    header: Mapping[str, Any],
    vocabulary: int,
) -> Entry:
    """Writes (content hash, tokens) of every row of every group; no tokens where the row is no document.

    The file gets its name when it is whole and on the disk.
    """
    dtype, rows_of, hashes, parts = (
        token_dtype(vocabulary),
        list[int](),
        list[int](),
        list[np.ndarray](),
    )
    for group in groups:
        before = len(parts)
        for content, tokens in group:
            hashes.append(content)
            parts.append(np.asarray(tokens).astype(dtype, copy=False))
        rows_of.append(len(parts) - before)
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    arrays = {
        "tokens": np.concatenate([np.empty(0, dtype), *parts]),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype("<i8"),
        "hashes": np.array(hashes, dtype="<u8"),
        "checks": np.array([zlib.crc32(part.data) for part in parts], dtype="<u4"),
        "groups": np.array(rows_of, dtype="<i8"),
    }
    description = dict(header) | {
        "format": FORMAT,
        "arrays": {name: [a.dtype.str, len(a)] for name, a in arrays.items()},
    }
    head = json.dumps(description).encode()
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    tables = zlib.crc32(head)
    with partial.open("wb") as file:
        file.write(MAGIC + len(head).to_bytes(8, "little") + head)
        for name, array in arrays.items():
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            file.write(array.data)
            tables = zlib.crc32(array.data, tables) if name != "tokens" else tables
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return Entry(path.name, size, len(parts), int(lengths.sum()), tables)


class Shard:
    """A file of `write_shard`, mapped into memory. Raises DataError for any other, or a damaged one.

    Tokens are checked a document at a time, when they are read.
    """

    def __init__(self, path: Path, entry: Entry | None = None):
        """`entry`: what the index says of the file."""
        self.path = path
        try:
            content = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
            self.header, arrays, tables = _parse(content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: no shard of tokens, or cut short ({error}); tokenize again"
            ) from error
        self.tokens, self.offsets, self.hashes = (
            arrays["tokens"],
            arrays["offsets"],
            arrays["hashes"],
        )
        self.checks, self.groups = arrays["checks"], arrays["groups"]
        found = Entry(path.name, len(content), len(self.hashes), len(self.tokens), tables)
        if entry is not None and found != entry:
            names = [name for name, value in asdict(entry).items() if asdict(found)[name] != value]
            raise DataError(
                f"{path}: damaged: other {', '.join(names)} than {INDEX} says; delete it and tokenize again"
            )
        self.entry = found

    def row(self, row: int) -> np.ndarray:
        """The tokens of one document."""
        tokens = self.tokens[self.offsets[row] : self.offsets[row + 1]]
        if zlib.crc32(tokens.data) != self.checks[row]:
            raise UnreadableError(
                f"{self.path}: row {row} is damaged; delete the file and tokenize again"
            )
        return tokens


def _parse(content: np.ndarray) -> tuple[dict[str, Any], dict[str, np.ndarray], int]:
    """Header, arrays, and the checksum of all but the tokens."""
    if content[:8].tobytes() != MAGIC:
        raise ValueError(f"it does not begin with {MAGIC.decode()}")
    head = content[16 : 16 + int.from_bytes(content[8:16].tobytes(), "little")].tobytes()
    header, tables = json.loads(head), zlib.crc32(head)
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}; this version reads {FORMAT}")
    position, arrays = 16 + len(head), dict[str, np.ndarray]()
    for name, (kind, length) in header["arrays"].items():
        position += -position % ALIGNMENT
        size = np.dtype(kind).itemsize * length
        arrays[name] = content[position : position + size].view(kind)
        tables = zlib.crc32(arrays[name].data, tables) if name != "tokens" else tables
        position += size
    if position != len(content):
        raise ValueError(f"{len(content):,} bytes, where {position:,} belong")
    return header, arrays, tables


class TokenShards:
    """The shards of one folder as Documents."""

    streamed = False
    listing = None

    def __init__(
        self,
        root: Path,
        tokenizer: Tokenizer,
        *,
        max_tokens: int | None = None,
        deduplicate: bool = False,
    ):
        """Raises DataError for shards of another tokenizer, and for damaged ones."""
        index = read_index(root)
        if index["tokenizer"] != tokenizer.fingerprint:
            raise DataError(
                f"{root / INDEX}: tokenized with {index['tokenizer_name']} ({index['tokenizer']}), and this run uses "
                f"{tokenizer.name} ({tokenizer.fingerprint}); write tokenizer={index['tokenizer_name']}, or tokenize again"
            )
        self._shards = [Shard(root / entry["name"], Entry(**entry)) for entry in index["shards"]]
        self.rows = np.concatenate([shard.groups for shard in self._shards])
        self.hashes = np.concatenate([shard.hashes for shard in self._shards])
        lengths = np.concatenate([np.diff(shard.offsets) for shard in self._shards])
        self.present = lengths > 0
        ends = np.cumsum(self.rows)
        tokens = np.diff(np.concatenate([[0], np.cumsum(lengths)])[np.concatenate([[0], ends])])
        if max_tokens is not None:
            self.rows = self.rows[: int(np.searchsorted(np.cumsum(tokens), max_tokens)) + 1]
            tokens = tokens[: len(self.rows)]
            self.hashes, self.present = (
                array[: ends[len(self.rows) - 1]] for array in (self.hashes, self.present)
            )
        if deduplicate:
            self.present = first_copies(self.hashes, self.present)
        self.sizes = tokens * token_dtype(tokenizer.vocabulary).itemsize
        self._firsts = np.cumsum(self.rows) - self.rows
        self._limits = np.cumsum([shard.entry.rows for shard in self._shards])
        parts = (
            index["source"],
            tokenizer.fingerprint,
            [asdict(shard.entry) for shard in self._shards],
            max_tokens,
            deduplicate,
        )
        self.fingerprint = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
        self.description = (
            f"tokens: {self.present.sum():,} documents, {tokens.sum():,} tokens of {index['description']}"
            + (", without later copies" if deduplicate else "")
        )  # fmt: skip

    def group(self, number: int) -> _ShardGroup:
        first = int(self._firsts[number])
        index = int(np.searchsorted(self._limits, first, side="right"))
        shard = self._shards[index]
        rows = slice(first, first + int(self.rows[number]))
        return _ShardGroup(
            shard,
            first - int(self._limits[index] - shard.entry.rows),
            self.hashes[rows],
            self.present[rows],
        )


class _ShardGroup:
    def __init__(self, shard: Shard, first: int, hashes: np.ndarray, present: np.ndarray):
        self._shard, self._first, self.hashes, self.present = shard, first, hashes, present

    def tokens(self, row: int) -> np.ndarray:
        return self._shard.row(self._first + row)


def read_index(root: Path) -> dict[str, Any]:
    """The index of a folder of shards. Raises DataError."""
    try:
        index = json.loads((root / INDEX).read_bytes())
        if not index["shards"] or index["format"] != FORMAT:
            raise ValueError(f"no shards, or format {index['format']}; this version reads {FORMAT}")
        return index
    except FileNotFoundError as error:
        raise DataError(
            f"data.root={root}: no {INDEX}; the corpus is not tokenized, or not to its end"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{root / INDEX}: damaged ({error}); tokenize again") from error
