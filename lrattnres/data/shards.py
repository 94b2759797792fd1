"""Tokens on disk: shards of documents, and the index that makes a corpus of them.

    DIRECTORY/
        index.json          tokenizer, source, and of every shard its name, size, tokens and
                            checksum of its tables
        shard_00000.tokens  MAGIC, length of the header (8 bytes), header (JSON), then arrays at
                            multiples of 64 bytes:
                            tokens (uint16 or uint32), offsets (int64 [rows + 1]),
                            hashes (uint64 [rows]),
                            checks (uint32 [rows]: CRC-32 of the row's tokens),
                            groups (int64: rows of each group)

All numbers are little-endian. A document's tokens begin with the separator; a row without tokens is
no document. The groups are those of the corpus that was tokenized, so both give the same order of
training.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lrattnres.data.documents import first_copies
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.pieces import Pieces
from lrattnres.data.tokenizers import Tokenizer

MAGIC, FORMAT, ALIGNMENT = b"LRTOKENS", 1, 64
INDEX = "index.json"
REMEDY = "delete it and tokenize again"


@dataclass(frozen=True)
class Entry:
    """One shard in the index.

    Attributes:
        name: of the file.
        bytes: its size.
        rows: in all its groups.
        tokens: in all its rows.
        tables: CRC-32 of everything in the file but the tokens, which have their own.
    """

    name: str
    bytes: int
    rows: int
    tokens: int
    tables: int


def token_dtype(vocabulary: int) -> np.dtype:
    """uint16 or uint32: the smallest of the two that holds every token."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def write_shard(
    path: Path,
    groups: Iterable[Iterable[tuple[int, np.ndarray]]],
    header: Mapping[str, Any],
    vocabulary: int,
) -> Entry:
    """Writes a shard, which gets its name when it is whole and on the disk.

    Args:
        path: the file.
        groups: (content hash, tokens) of every row of every group; no tokens where the row is no
            document.
        header: what else the file says of itself.
        vocabulary: of the tokenizer; it decides the type of the tokens.
    """
    dtype = token_dtype(vocabulary)
    rows_of, hashes, parts = list[int](), list[int](), list[np.ndarray]()
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
    """A file of `write_shard`. Its tokens are checked a document at a time, when they are read.

    Attributes:
        header: what the file says of itself.
        offsets: int64 [rows + 1], the first token of each row.
        hashes: uint64 [rows].
        checks: uint32 [rows].
        groups: int64, the rows of each group.
        dtype: of the tokens.
        entry: what the index has to say of it.
    """

    def __init__(self, path: Path, entry: Entry | None = None):
        """Reads and checks all but the tokens.

        Args:
            path: the file.
            entry: what the index says of it.

        Raises:
            DataError: it is no shard, a damaged one, or not that of the index.
        """
        self.path = path
        try:
            pieces = Pieces(path, REMEDY)
            self._parse(pieces)
        except (OSError, ValueError, KeyError, TypeError, UnreadableError) as error:
            raise DataError(
                f"{path}: no shard of tokens, or cut short ({error}); {REMEDY}"
            ) from error
        if entry is not None and self.entry != entry:
            found = asdict(self.entry)
            names = [name for name, value in asdict(entry).items() if found[name] != value]
            raise DataError(
                f"{path}: damaged: other {', '.join(names)} than {INDEX} says; {REMEDY}"
            )

    def open(self) -> Callable[[int], np.ndarray]:
        """What gives the tokens of a row; it keeps the file open.

        Raises:
            UnreadableError: the file is gone, cut short or damaged; so does what it returns.
        """
        try:
            pieces = Pieces(self.path, REMEDY)
        except OSError as error:
            raise UnreadableError(f"{self.path}: {error}; {REMEDY}") from error

        def tokens(row: int) -> np.ndarray:
            begin, end = self.offsets[row : row + 2].tolist()
            start = self._first + begin * self.dtype.itemsize
            found = pieces.array(start, end - begin, self.dtype)
            if zlib.crc32(found.data) != self.checks[row]:
                raise UnreadableError(f"{self.path}: row {row} is damaged; {REMEDY}")
            return found

        return tokens

    def _parse(self, pieces: Pieces) -> None:
        if pieces.read(0, 8) != MAGIC:
            raise ValueError(f"it does not begin with {MAGIC.decode()}")
        length = int.from_bytes(pieces.read(8, 8), "little")
        head = pieces.read(16, min(length, pieces.size))
        self.header, tables = json.loads(head), zlib.crc32(head)
        if self.header["format"] != FORMAT:
            raise ValueError(f"format {self.header['format']}; this version reads {FORMAT}")
        position, arrays = 16 + len(head), dict[str, np.ndarray]()
        for name, (kind, count) in self.header["arrays"].items():
            position += -position % ALIGNMENT
            dtype = np.dtype(kind)
            if name == "tokens":
                self._first, self.dtype, tokens = position, dtype, count
            else:
                arrays[name] = pieces.array(position, count, dtype)
                tables = zlib.crc32(arrays[name].data, tables)
            position += count * dtype.itemsize
        if position != pieces.size:
            raise ValueError(f"{pieces.size:,} bytes, where {position:,} belong")
        self.offsets, self.hashes = arrays["offsets"], arrays["hashes"]
        self.checks, self.groups = arrays["checks"], arrays["groups"]
        self.entry = Entry(self.path.name, pieces.size, len(self.hashes), tokens, tables)


class TokenShards:
    """The shards of one folder as Documents."""

    streamed = False
    listing = None
    skipped = ""

    def __init__(
        self,
        root: Path,
        tokenizer: Tokenizer,
        *,
        max_tokens: int | None = None,
        deduplicate: bool = False,
    ):
        """Opens every shard.

        Args:
            root: the folder.
            tokenizer: of the run.
            max_tokens: only the first groups, until they hold this many.
            deduplicate: whether later copies of a text are no documents.

        Raises:
            DataError: the shards are of another tokenizer, damaged, or without a document.
        """
        index = read_index(root)
        if index["tokenizer"] != tokenizer.fingerprint:
            name = index["tokenizer_name"]
            raise DataError(
                f"{root / INDEX}: tokenized with {name} ({index['tokenizer']}), and this run uses "
                f"{tokenizer.name} ({tokenizer.fingerprint}); write tokenizer={name}, or tokenize "
                "again"
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
        empty = len(self.present) - int(self.present.sum())
        if not self.present.any():
            raise DataError(
                f"data.root={root}: {len(self.present):,} rows and not one document in them; "
                "tokenize another corpus"
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
            f"tokens: {self.present.sum():,} documents, {tokens.sum():,} tokens of "
            f"{index['description']}, {empty:,} rows skipped"
            + (", without later copies" if deduplicate else "")
        )

    def group(self, number: int) -> _ShardGroup:
        first = int(self._firsts[number])
        index = int(np.searchsorted(self._limits, first, side="right"))
        shard = self._shards[index]
        rows = slice(first, first + int(self.rows[number]))
        begin = first - int(self._limits[index] - shard.entry.rows)
        return _ShardGroup(shard, begin, self.hashes[rows], self.present[rows])


class _ShardGroup:
    low = 0

    def __init__(self, shard: Shard, first: int, hashes: np.ndarray, present: np.ndarray):
        self._tokens, self._first = shard.open(), first
        self.hashes, self.present = hashes, present

    def tokens(self, row: int) -> np.ndarray:
        return self._tokens(self._first + row)


def read_index(root: Path) -> dict[str, Any]:
    """The index of a folder of shards.

    Raises:
        DataError: there is none, or a damaged one.
    """
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
