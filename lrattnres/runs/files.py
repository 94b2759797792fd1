"""Files that are replaced as a whole, even if the machine stops; and JSON for every reader."""

from __future__ import annotations

import json
import math
import os
import uuid
from pathlib import Path
from typing import Any

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# As Python, JavaScript and W&B spell them, in quotes or without.
FOREIGN = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def sync(path: Path) -> None:
    """Waits until the bytes of a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces a file as a whole.

    A hidden file beside it is written, brought to the disk and renamed.

    Args:
        path: The file; its folder must be there.
        content: All of it; a text is written as UTF-8.

    Raises:
        OSError: It cannot be written; the file is then what it was before.
    """
    # Several processes may write the file at the same time.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON by RFC 8259. Numbers that are not finite become the texts "nan", "inf" and "-inf".

    `from_json` gives the numbers back; in most languages `float` of the text does.

    Args:
        value: Dictionaries, lists, tuples, texts, numbers, booleans and None.
        indent: Spaces of each level; None: all on one line.

    Raises:
        TypeError: JSON has no form for something in it, such as a tensor.
    """
    return json.dumps(_words(value), indent=indent, ensure_ascii=False, allow_nan=False)


def from_json(text: str | bytes, *, foreign: bool = False) -> Any:
    """The inverse of `to_json`.

    Args:
        text: The whole of a JSON document.
        foreign: Also take other programs' spellings of numbers that are not finite, such as NaN.

    Raises:
        ValueError: The text is not JSON.
    """
    tree = json.loads(text, parse_constant=FOREIGN.__getitem__ if foreign else _refuse)
    return _numbers(tree, NOT_FINITE | FOREIGN if foreign else NOT_FINITE)


def _words(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: _words(item) for key, item in value.items()}
    return [_words(item) for item in value] if isinstance(value, list | tuple) else value


def _numbers(value: Any, words: dict[str, float]) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item, words) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item, words) for item in value]
    return words.get(value, value) if isinstance(value, str) else value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
