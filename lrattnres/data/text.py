"""What counts as the text of a document, and the hash that stands for it."""

from __future__ import annotations

import hashlib
import re

_SURROGATE = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """`text` with every lone surrogate replaced by U+FFFD, so that UTF-8 can hold it; nothing else
    is touched.

    JSON escapes and string literals of Python can name half a surrogate pair. Neither UTF-8 nor
    Arrow has a place for it.
    """
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def content_hash(text: str) -> int:
    """The first 64 bits of the BLAKE2b hash of the clean text in UTF-8: the same number on every
    machine.
    """
    return bytes_hash(text.encode("utf-8"))


def bytes_hash(content: bytes | memoryview) -> int:
    """`content_hash` of a text that is there as UTF-8."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
