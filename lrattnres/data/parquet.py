"""A corpus that is read while it is trained on: parquet files in a store, a row group at a time."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet
from tqdm import tqdm

from lrattnres.data.columns import SCORE, check_score, check_text, large_strings
from lrattnres.data.documents import Counts
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.listing import File, Listing
from lrattnres.data.stores import LISTING_THREADS, Patient, RangeFile, ReadingPool
from lrattnres.data.text import bytes_hash

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
        """Reads nothing yet.

        Args:
            name: for people.
            store: where the files lie.
            listing: every file with its row groups, as `list_corpus` reads them.
            column: the column of the text.
            min_score: the least score of a document; None: any.
        """
        self._store, self._listing = store, listing
        self._column, self._min_score = column, min_score
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
        self._found: dict[int, Counts] = {}  # of the groups that were read so far
        self.description = (
            f"{name}: {self.rows.sum():,} rows in {len(self.rows):,} row groups of "
            f"{len(listing.files):,} files, {self.sizes.sum() / 1e6:,.1f} MB"
            + (f", score from {min_score:g}" if min_score is not None else "")
        )

    @property
    def skipped(self) -> str:
        found = Counts.sum(list(self._found.values()))
        low = f" and {found.low:,} below data.min_score" if self._min_score is not None else ""
        return f"{found.empty:,} empty{low} of the {found.rows:,} rows read so far"

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
        """Those who read the same group at the same time share one copy.

        Raises:
            UnreadableError: it cannot be read, or is not what was listed.
        """
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
                # Read in this thread, a column at a time: Arrow's own threads would not know when
                # the pool is stopped.
                options = {"pre_buffer": False, "page_checksum_verification": True}
                opened = parquet.ParquetFile(source, metadata=self._footer(file), **options)
                table = opened.read_row_group(index, columns=columns, use_threads=False)
            place = self.place(number, 0).rpartition(",")[0]
            texts = ParquetTexts(place, table, self._column, self._min_score)
            self._found[number] = Counts.of(texts, 0.0)
            return texts
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
                f"{file.path}: is not the file any more that was listed when the run started; "
                "restore it"
            )
        with self._lock:
            self._footers[file.path] = metadata
            while len(self._footers) > FOOTERS_KEPT:
                self._footers.popitem(last=False)
        return metadata


class ParquetTexts:
    """The texts of one row group in Arrow's memory, and their content hashes."""

    def __init__(self, place: str, table: pa.Table, column: str, min_score: float | None):
        self._place, self._texts = place, large_strings(table[column])
        lengths = compute.fill_null(compute.binary_length(self._texts), 0).to_numpy(
            zero_copy_only=False
        )
        self.present, self.low = lengths > 0, 0
        if min_score is not None:
            scores = table[SCORE].cast(pa.float64()).to_numpy()  # null becomes nan
            below = self.present & ~(np.nan_to_num(scores, nan=-np.inf) >= min_score)
            self.present, self.low = self.present & ~below, int(below.sum())
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
    store: Patient, *, column: str, scored: bool, max_files: int | None = None
) -> Listing:
    """Every file with its row groups; the footers are read by some threads at once.

    Args:
        store: where the files lie.
        column: the column of the text.
        scored: whether the column `score` is needed, too.
        max_files: only the first ones.

    Raises:
        DataError: a file cannot be used as asked, or no file has a row.
        UnreadableError: a file, or the list of them, cannot be read.
    """
    files = store.files()
    foreign = [file.path for file in files if "ultrafineweb_zh/" in f"{store.root}/{file.path}"]
    if foreign:
        raise DataError(
            f"data.root={store.root}: {foreign[0]} is not of the English part; write its folder: "
            "data.root=…_en"
        )
    pool = ReadingPool(LISTING_THREADS)
    try:
        read = pool.map(lambda file: _described(store, file, column, scored), files[:max_files])
        described = tuple(
            tqdm(read, "listing", len(files[:max_files]), unit=" files", leave=False, disable=None)
        )
    finally:
        pool.stop()
    if not any(sum(file.rows) for file in described):
        raise DataError(
            f"data.root={store.root}: {len(described):,} files and not one row in them; write the "
            "place of a corpus"
        )
    return Listing(store.root, store.revision, described)


def _described(store: Patient, file: File, column: str, scored: bool) -> File:
    content, metadata = _read_footer(store, file)
    schema = metadata.schema.to_arrow_schema()
    check_text(schema, column, file.path)
    if scored:
        check_score(schema, file.path)
    leaves = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    sizes = [group.column(leaves.index(column)).total_uncompressed_size for group in groups]
    rows = tuple(group.num_rows for group in groups)
    return File(file.path, file.bytes, rows, tuple(sizes), _digest(content))


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
                f"{file.path}: damaged: its footer claims {wanted:,} of {file.bytes:,} bytes; "
                "restore it"
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
