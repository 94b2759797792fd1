"""Files of texts: one reader for each ending, all errors named by file and place."""

from __future__ import annotations

import glob
import io
import json
import os
import warnings
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from lrattnres.data.columns import check_text
from lrattnres.data.errors import DataError
from lrattnres.data.listing import first, hidden, warn_hidden


class Row(NamedTuple):
    """One value of the text column and where it stands: "line 3", or "row 3", both
    counted from 1.
    """

    place: str
    value: Any


Reader = Callable[[Path, str], Iterator[Row]]


def read_file(path: Path, column: str) -> Iterator[str | None]:
    """The texts of one file in order; None for a null or empty one.

    Args:
        path: the file.
        column: the key or column that holds the text.

    Raises:
        DataError: the file cannot be read to its end, lacks the column, or has something other than
            text there; with the line or row.
    """
    read = reader_of(path)
    if read is None:
        raise DataError(f"{path}: unknown ending; it must be one of {', '.join(READERS)}")
    try:
        for row in read(path, column):
            if row.value is not None and not isinstance(row.value, str):
                kind = type(row.value).__name__
                raise DataError(
                    f"{path}, {row.place}: {column} holds {kind}, not text; name a text column: "
                    "data.column=…"
                )
            yield row.value or None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 ({error}); convert it, or take it out of data.root"
        ) from error
    except (OSError, EOFError, pa.ArrowException) as error:
        raise DataError(
            f"{path}: cannot be read to its end, so it may be cut short or damaged ({error})"
        ) from error


def reader_of(path: Path) -> Reader | None:
    """The reader of READERS for the ending of `path`."""
    return next(
        (read for ending, read in READERS.items() if path.name.lower().endswith(ending)), None
    )


def find_files(root: str) -> list[Path]:
    """The readable files of `data.root`, by relative path.

    One warning names what has another ending, and linked folders, which are not entered; another
    one says how many files were left out since a part of their path begins with a dot or an
    underscore. A file, and a glob that spells such a part out, mean what they say.

    Args:
        root: a file, a folder with everything below it, or a glob.

    Raises:
        DataError: nothing there can be read.
    """
    place, endings = Path(root).expanduser(), ", ".join(READERS)
    if place.is_file():
        if reader_of(place) is None:
            raise DataError(
                f"data.root={root}: unknown ending; write a file that ends with one of {endings}"
            )
        return [place]
    if place.is_dir():
        base, found, asked = place, _below(place), ""
    else:
        parts = place.parts
        fixed = next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        base, asked = Path(*parts[:fixed]), "/".join(parts[fixed:])
        # Path.glob takes no absolute pattern.
        found = [Path(name) for name in glob.glob(str(place), recursive=True)]  # noqa: PTH207
    if not found and not place.is_dir():
        raise DataError(
            f"data.root={root}: no such file or folder, and no file matches it as a glob"
        )
    names = {path.relative_to(base).as_posix(): path for path in found}
    files, others, secret = list[Path](), list[str](), list[str]()
    for name, path in sorted(names.items()):
        readable, apart = path.is_file() and reader_of(path), hidden(name) and not hidden(asked)
        if readable and not apart:
            files.append(path)
        elif readable:
            secret.append(str(path))
        elif not apart and (path.is_file() or path.is_symlink()):
            others.append(str(path))
    if others:
        warnings.warn(
            f"data.root={root}: skipped, no ending of {endings}: {', '.join(first(others))}",
            stacklevel=2,
        )
    warn_hidden(root, secret)
    if not files:
        raise DataError(f"data.root={root}: holds no file that ends with one of {endings}")
    return files


def _below(folder: Path) -> list[Path]:
    """Files and links at any depth."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be listed ({error.strerror}); let it be read")

    return [
        Path(place, name)
        for place, folders, files in os.walk(folder, onerror=refuse)
        for name in [*files, *(name for name in folders if Path(place, name).is_symlink())]
    ]


def _text(path: Path, column: str) -> Iterator[Row]:
    # Bytes, since reading as text would turn CRLF into LF.
    yield Row("line 1", path.read_bytes().removeprefix(BOM_UTF8).decode("utf-8"))


def _json_lines(path: Path, column: str, compression: str | None) -> Iterator[Row]:
    if compression and path.stat().st_size == 0:
        raise EOFError("an empty file is no compressed one")
    # Arrow's streams, unlike those of zstandard, tell a frame that was cut short. Lines are split
    # at b"\n" alone: JSON may hold the other line breaks of Unicode.
    with io.BufferedReader(pa.input_stream(str(path), compression=compression), 1 << 20) as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if line.strip():
                yield Row(f"line {number}", _json_text(path, number, line, column))


def _json_text(path: Path, number: int, line: bytes, column: str) -> Any:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also not UTF-8, a number of 5,000 digits
        raise DataError(f"{path}, line {number}: not a line of JSON in UTF-8 ({error})") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise DataError(
            f"{path}, line {number}: a JSON {kind}, where an object with a text is needed"
        )
    if column not in record:
        keys = ", ".join(record) or "(none)"
        raise DataError(f"{path}, line {number}: no key {column}; write data.column= one of {keys}")
    return record[column]


def _parquet(path: Path, column: str) -> Iterator[Row]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        check_text(file.schema_arrow, column, path)
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            for value in batch.column(column):
                number += 1
                yield Row(f"row {number}", value.as_py())


READERS: dict[str, Reader] = {
    ".txt": _text,
    ".jsonl": partial(_json_lines, compression=None),
    ".jsonl.gz": partial(_json_lines, compression="gzip"),
    ".jsonl.zst": partial(_json_lines, compression="zstd"),
    ".parquet": _parquet,
}
