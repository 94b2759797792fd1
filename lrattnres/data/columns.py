"""Which column of a parquet file holds the text: one rule for reading, streaming and tokenizing."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from lrattnres.data.errors import DataError

SCORE = "score"
LONGEST = 60  # characters of a type in a message


def check_text(schema: pa.Schema, column: str, place: str | Path) -> None:
    """Refuses a schema in which `column` is not one column of text, or of nothing but nulls.

    Args:
        schema: of a file; only the columns at its top count, not the parts of a struct.
        column: `data.column`.
        place: the file, for the message.

    Raises:
        DataError: with the columns that there are, and their types.
    """
    kind = _kind(schema, column, place, "data.column")
    if not _is_text(kind):
        raise DataError(
            f"{place}: column {column} holds {_short(kind)}, not text; {_remedy(schema)}"
        )


def check_score(schema: pa.Schema, place: str | Path) -> None:
    """Refuses a schema in which the column `score` does not hold numbers; see `check_text`."""
    kind = _kind(schema, SCORE, place, "data.min_score")
    types = pa.types
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)):
        raise DataError(
            f"{place}: column {SCORE} holds {_short(kind)}, not numbers; write data.min_score=null"
        )


def large_strings(column: pa.ChunkedArray) -> pa.LargeStringArray:
    """A column that `check_text` lets pass, as one array; Arrow's errors for what
    cannot be read.
    """
    if isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array(
            [chunk.storage for chunk in column.chunks], column.type.storage_type
        )
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    chunks = column.cast(pa.large_string()).combine_chunks()
    return pa.concat_arrays(chunks.chunks) if isinstance(chunks, pa.ChunkedArray) else chunks


def _kind(schema: pa.Schema, column: str, place: str | Path, key: str) -> pa.DataType:
    found = schema.names.count(column)
    if found != 1:
        there = ", ".join(f"{field.name} ({_short(field.type)})" for field in schema) or "none"
        number = f"{found} columns of the name" if found else "no column"
        remedy = _remedy(schema) if key == "data.column" else "write data.min_score=null"
        raise DataError(f"{place}: {number} {column}; the columns are {there}; {remedy}")
    return schema.field(column).type


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _is_text(kind.storage_type)
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    views = getattr(types, "is_string_view", lambda kind: False)
    return (
        types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind) or views(kind)
    )


def _remedy(schema: pa.Schema) -> str:
    texts = [field.name for field in schema if _is_text(field.type)]
    return (
        f"write data.column= one of {', '.join(texts)}" if texts
        else "a text must stand in a column of its own"
    )  # fmt: skip


def _short(kind: pa.DataType) -> str:
    text = str(kind)
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"
