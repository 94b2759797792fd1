"""Files that are either the old ones or the new ones, whenever the machine stops; and JSON that any
reader takes.
"""

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
    """Waits until a file's bytes, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces `path` as a whole: a hidden sibling is written, brought to the disk and renamed into
    place.

    Raises:
        OSError: It cannot be written; `path` is then what it was before.
    """
    partial = path.with_name(
        f".{path.name}.{uuid.uuid4().hex}.partial"
    )  # several processes may write it at once
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON as RFC 8259 has it, which knows no NaN: such numbers become the texts "nan", "inf" and
    "-inf".

    `float` of the text gives the number back in most languages, and `from_json` does so here.

    Raises:
        TypeError: The value holds what JSON has no form for (a tensor, for one).
    """
    return json.dumps(_words(value), indent=indent, ensure_ascii=False, allow_nan=False)


def from_json(text: str | bytes, *, foreign: bool = False) -> Any:
    """The inverse of `to_json`.

    Args:
        text: The whole of a JSON document.
        foreign: Take other programs' spellings of numbers that are not finite too, such as NaN.

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
