"""A corpus that is read while it is trained on: parquet files in a store, a row group at a time."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet
from tqdm import tqdm

from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.listing import File, Listing
from lrattnres.data.stores import LISTING_THREADS, Patient, RangeFile, ReadingPool
from lrattnres.data.text import bytes_hash

SCORE = "score"
TAIL = 1 << 16  # bytes; most footers are shorter
FOOTERS_KEPT, LOCKS = 64, 256
MAGIC = b"PAR1"


class ParquetCorpus:
    """Row groups as groups; a Corpus.

    A row is no document where its text is null or empty, or its score is below `min_score`, null or not a number.
    """

    streamed = True

    def __init__(
        self, name: str, store: Patient, listing: Listing, *, column: str, min_score: float | None
    ):
        """`listing` has the row groups of every file, as `list_corpus` reads them."""
        self._store, self._listing, self._column, self._min_score = (
            store,
            listing,
            column,
            min_score,
        )
        self._places = [
            (file, number) for file in listing.files for number in range(len(file.rows))
        ]
        self.rows = np.array([rows for file in listing.files for rows in file.rows], dtype=np.int64)
        self.sizes = np.array(
            [size for file in listing.files for size in file.sizes], dtype=np.int64
        )
        self._footers: OrderedDict[str, parquet.FileMetaData] = OrderedDict()
        self._shared: WeakValueDictionary[int, ParquetTexts] = WeakValueDictionary()
        self._locks = [threading.Lock() for _ in range(LOCKS)]
        self._lock = threading.Lock()
        self.description = (
            f"{name}: {self.rows.sum():,} rows in {len(self.rows):,} row groups of {len(listing.files):,} files, "
            f"{self.sizes.sum() / 1e6:,.1f} MB"
            + (f", score from {min_score:g}" if min_score is not None else "")
        )

    @property
    def fingerprint(self) -> str:
        content = repr((self._listing.fingerprint, self._column, self._min_score))
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def listing(self) -> dict[str, Any]:
        return self._listing.plain()

    def place(self, group: int, row: int) -> str:
        file, number = self._places[group]
        return f"{file.path}, row group {number}, row {row}"

    def group(self, number: int) -> ParquetTexts:
        """Streams that read the same group at the same time share one copy, which goes with the last of them."""
        with self._locks[number % LOCKS]:
            texts = self._shared.get(number)
            if texts is None:
                texts = self._shared[number] = self._read(number)
            return texts

    def _read(self, number: int) -> ParquetTexts:
        file, index = self._places[number]
        columns = [self._column] if self._min_score is None else [self._column, SCORE]
        try:
            with RangeFile(self._store, file.path, file.bytes) as source:
                # Read in this thread, a column at a time: Arrow's own threads would not know when the pool is stopped.
                options = {"pre_buffer": False, "page_checksum_verification": True}
                opened = parquet.ParquetFile(source, metadata=self._footer(file), **options)
                table = opened.read_row_group(index, columns=columns, use_threads=False)
            return ParquetTexts(
                self.place(number, 0).rpartition(",")[0], table, self._column, self._min_score
            )
        except (pa.ArrowException, OSError) as error:
            raise UnreadableError(
                f"{self.place(number, 0)}: damaged, or not the file that was listed ({error})"
            ) from error

    def _footer(self, file: File) -> parquet.FileMetaData:
        with self._lock:
            if file.path in self._footers:
                self._footers.move_to_end(file.path)
                return self._footers[file.path]
        content, metadata = _read_footer(self._store, file)
        if _digest(content) != file.footer:
            raise UnreadableError(
                f"{file.path}: is not the file any more that was listed when the run started; restore it"
            )
        with self._lock:
            self._footers[file.path] = metadata
            while len(self._footers) > FOOTERS_KEPT:
                self._footers.popitem(last=False)
        return metadata


class ParquetTexts:
    """The texts of one row group in Arrow's memory, and their content hashes."""

    def __init__(self, place: str, table: pa.Table, column: str, min_score: float | None):
        self._place = place
        self._texts = table[column].cast(pa.large_string()).combine_chunks()
        if isinstance(self._texts, pa.ChunkedArray):
            self._texts = pa.concat_arrays(self._texts.chunks)
        lengths = compute.fill_null(compute.binary_length(self._texts), 0).to_numpy(
            zero_copy_only=False
        )
        self.present = lengths > 0
        if min_score is not None:
            scores = table[SCORE].cast(pa.float64()).to_numpy()  # null becomes nan
            self.present &= np.nan_to_num(scores, nan=-np.inf) >= min_score
        _, ends, content = self._texts.buffers()
        self._offsets = (
            np.frombuffer(ends, dtype=np.int64)[self._texts.offset :]
            if len(lengths)
            else np.zeros(1, np.int64)
        )
        self._content = memoryview(content if content is not None else b"")
        self.hashes = np.zeros(len(lengths), dtype=np.uint64)
        rows = np.flatnonzero(self.present)
        self.hashes[rows] = np.fromiter(
            (bytes_hash(self._bytes(row)) for row in rows.tolist()),
            dtype=np.uint64,
            count=len(rows),
        )

    def text(self, row: int) -> str:
        """Raises DataError for bytes that are not UTF-8."""
        try:
            return str(self._bytes(row), "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._place}, row {row}: not UTF-8 ({error}); take it out of the corpus"
            ) from error

    def _bytes(self, row: int) -> memoryview:
        return self._content[self._offsets[row] : self._offsets[row + 1]]


def list_corpus(
    store: Patient,
    *,
    column: str,
    scored: bool,
    max_files: int | None,
    pinned: Mapping[str, Any] | None,
    skip_unreadable: bool,
) -> Listing:
    """Every file with its row groups; the footers are read by some threads at once.

    What a run has pinned is taken as it is where it is of a revision of the hub, which cannot change, and where a run
    goes on without what it cannot read: a file that is gone or changed is found out, and counted, when its turn comes.
    """
    known = Listing.read(pinned) if pinned else None
    if (
        known is not None
        and known.root == store.root
        and (known.revision is not None or skip_unreadable)
    ):
        return known
    files = store.files()
    foreign = [file.path for file in files if "ultrafineweb_zh/" in f"{store.root}/{file.path}"]
    if foreign:
        raise DataError(
            f"data.root={store.root}: {foreign[0]} is not of the English part; write its folder: data.root=…_en"
        )
    pool = ReadingPool(LISTING_THREADS)
    try:
        read = pool.map(lambda file: _described(store, file, column, scored), files[:max_files])
        described = tuple(
            tqdm(read, "listing", len(files[:max_files]), unit=" files", leave=False, disable=None)
        )
    finally:
        pool.stop()
    return Listing(store.root, store.revision, described)


def _described(store: Patient, file: File, column: str, scored: bool) -> File:
    content, metadata = _read_footer(store, file)
    names = metadata.schema.names
    for name in [column, SCORE] if scored else [column]:
        if name not in names:
            raise DataError(
                f"{file.path}: no column {name}; there are {', '.join(names)}; write data.column=…"
            )
    kind = metadata.schema.to_arrow_schema().field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(
            f"{file.path}: column {column} holds {kind}, not text; name a text column: data.column=…"
        )
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    sizes = tuple(group.column(names.index(column)).total_uncompressed_size for group in groups)
    return File(
        file.path, file.bytes, tuple(group.num_rows for group in groups), sizes, _digest(content)
    )


def _read_footer(store: Patient, file: File) -> tuple[bytes, parquet.FileMetaData]:
    """The bytes of a footer, and what they say. Its length stands in the 8 bytes behind it."""
    length = min(file.bytes, TAIL)
    tail = store.read(file.path, file.bytes - length, length) if length else b""
    if tail[-4:] != MAGIC:
        raise UnreadableError(
            f"{file.path}: no parquet file, or cut short; restore it, or take it out of data.root"
        )
    wanted = int.from_bytes(tail[-8:-4], "little") + 8
    if wanted > length:
        if wanted > file.bytes:
            raise UnreadableError(
                f"{file.path}: damaged: its footer claims {wanted:,} of {file.bytes:,} bytes; restore it"
            )
        tail = store.read(file.path, file.bytes - wanted, wanted)
    try:
        return tail[-wanted:], parquet.read_metadata(pa.BufferReader(MAGIC + tail[-wanted:]))
    except (pa.ArrowException, OSError) as error:
        raise UnreadableError(
            f"{file.path}: damaged footer ({error}); restore it, or take it out of data.root"
        ) from error


def _digest(footer: bytes) -> str:
    return hashlib.blake2b(footer, digest_size=16).hexdigest()
