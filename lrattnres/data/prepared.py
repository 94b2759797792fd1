"""A corpus prepared once: an Arrow file of texts and content hashes, for random access."""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import compute
from tqdm import tqdm

from lrattnres.data.documents import first_copies
from lrattnres.data.errors import DataError
from lrattnres.data.pieces import Pieces
from lrattnres.data.text import bytes_hash, clean, content_hash

FORMAT = 1
BATCH_CHARACTERS = 16 << 20
SCHEMA = pa.schema([("text", pa.large_string()), ("hash", pa.uint64())])


@dataclass(frozen=True)
class Source:
    """What a corpus is made from.

    Attributes:
        name: for people, and the beginning of the file's name.
        identity: changes whenever the documents might.
        documents: yields the texts in order, and None for a row without any.
        empty: the message where there is no text at all.
    """

    name: str
    identity: list[str]
    documents: Callable[[], Iterator[str | None]]
    empty: str


class PreparedCorpus:
    """Random access to the documents of an Arrow file; a Corpus whose groups are single documents.

    Attributes:
        hashes: uint64 [documents].
        fingerprint: a hash of them in order, so equal documents have the same one wherever they
            came from.
    """

    listing = None
    streamed = False
    skipped = ""

    def __init__(self, name: str, path: Path):
        """Opens a file that `write` has finished.

        Raises:
            OSError, KeyError, ValueError, ArrowException: it is none, or a damaged one.
        """
        with pa.memory_map(str(path)) as file:
            base = file.read_buffer(1).address
            file.seek(0)
            reader = pa.ipc.open_file(file)
            table, last = reader.read_all(), reader.num_record_batches - 1
            counts = json.loads(reader.get_batch_with_custom_metadata(last)[1]["counts"])
            if table.schema != SCHEMA:
                raise ValueError(f"unknown columns {table.schema.names}")
            table.validate()
            self.hashes: np.ndarray = table["hash"].to_numpy().copy()
            self.sizes = compute.binary_length(table["text"]).to_numpy().astype(np.int64)
            self._starts = np.concatenate(
                [np.empty(0, np.int64), *(_places(chunk, base) for chunk in table["text"].chunks)]
            )
        self._pieces = Pieces(path, "delete the file, it will be prepared again")
        self.hashes.flags.writeable = False
        self.fingerprint = hashlib.blake2b(
            self.hashes.astype("<u8").tobytes(), digest_size=16
        ).hexdigest()
        if self.fingerprint != counts["fingerprint"]:
            raise ValueError("its content hashes are not those that were written")
        self.present = np.ones(len(self), dtype=bool)
        self.rows = np.ones(len(self), dtype=np.int64)
        self.description = f"{name}: {len(self):,} documents, {counts['bytes'] / 1e6:.1f} MB" + (
            f", {counts['skipped']:,} empty rows skipped" if counts["skipped"] else ""
        )

    def __len__(self) -> int:
        return len(self.hashes)

    def deduplicate(self) -> None:
        """Keeps the first document of each text; a copy becomes a row that is no document."""
        self.present = first_copies(self.hashes, self.present)
        copies = len(self) - int(self.present.sum())
        self.description += f", {copies:,} copies left out"
        self.fingerprint += "-deduplicated"

    def group(self, number: int) -> _Single:
        return _Single(self, number)

    def place(self, group: int, row: int) -> str:
        return f"document {group} of {self.description}"

    def text(self, index: int) -> str:
        """One document.

        Raises:
            UnreadableError: the file became shorter.
            DataError: the text is not the one that was prepared.
        """
        content = self._pieces.read(int(self._starts[index]), int(self.sizes[index]))
        if bytes_hash(content) != self.hashes[index]:
            raise DataError(
                f"{self._pieces.path}: document {index} is damaged; delete the file, it will be "
                "prepared again"
            )
        return content.decode("utf-8")


def _places(chunk: pa.LargeStringArray, base: int) -> np.ndarray:
    """int64 [texts]: the byte of the file, mapped to the address `base`, at which each begins."""
    _, ends, content = chunk.buffers()
    if not len(chunk):
        return np.empty(0, np.int64)
    ends = np.frombuffer(ends, np.int64)[chunk.offset : chunk.offset + len(chunk)]
    return ends + (content.address - base)


class _Single:
    """One document as a group."""

    low = 0

    def __init__(self, corpus: PreparedCorpus, number: int):
        self.hashes = corpus.hashes[number : number + 1]
        self.present = corpus.present[number : number + 1]
        self._corpus, self._number = corpus, number

    def text(self, row: int) -> str:
        return self._corpus.text(self._number + row)


def open_prepared(source: Source, folder: Path) -> PreparedCorpus:
    """The corpus of `source` from the cache `folder`, prepared first if it is not there.

    Processes that prepare the same corpus at once each write a file of their own and rename it into
    place.

    Raises:
        DataError: there is no text, or the folder cannot be written.
    """
    key = json.dumps([FORMAT, source.name, source.identity])
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    path = folder / f"{source.name}-{digest}.arrow"
    if path.exists():
        try:
            return PreparedCorpus(source.name, path)
        except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
            warnings.warn(f"{path}: damaged ({error}); prepared again", stacklevel=3)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(unfinished, source)
        unfinished.replace(path)
        return PreparedCorpus(source.name, path)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error}); write data.cache=FOLDER with room for the corpus"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # renamed, or never begun
            unfinished.unlink()


def write(path: Path, source: Source) -> None:
    """Cleans and hashes the documents into an Arrow file, never much more than a batch in memory.

    The last batch is empty and carries the counts, which are known only then.

    Raises:
        DataError: there is no text.
    """
    texts: list[str] = []
    waiting = size = skipped = 0
    digest = hashlib.blake2b(digest_size=16)

    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:

        def flush(**metadata: str) -> None:
            nonlocal waiting
            hashes = np.fromiter(map(content_hash, texts), dtype="<u8", count=len(texts))
            digest.update(hashes.tobytes())
            writer.write_batch(
                pa.record_batch(
                    [pa.array(texts, pa.large_string()), pa.array(hashes)], schema=SCHEMA
                ),
                metadata,
            )
            texts.clear()
            waiting = 0

        for text in tqdm(
            source.documents(),
            f"preparing {source.name}",
            unit=" documents",
            leave=False,
            disable=None,
        ):
            if not text:
                skipped += 1
                continue
            texts.append(clean(text))
            size += len(texts[-1].encode())
            waiting += len(text)
            if waiting >= BATCH_CHARACTERS:
                flush()
        if not size:
            raise DataError(source.empty)
        flush()
        flush(
            counts=json.dumps(
                {"bytes": size, "skipped": skipped, "fingerprint": digest.hexdigest()}
            )
        )
