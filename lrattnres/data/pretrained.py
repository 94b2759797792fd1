"""The tokenizer that came with a pretrained model: its tokenizer.json, read by the package tokenizers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from lrattnres.data.errors import DataError

FILE = "tokenizer.json"


def spelling_and_fingerprint(folder: Path) -> tuple[list[bytes | None], frozenset[int], str]:
    """The bytes of every token of a byte-level encoding, its special tokens, and a hash of the file.

    Raises DataError for a file that cannot be read, and for an encoding that is not byte-level: its tokens stand for no
    exact number of bytes.
    """
    file = folder / FILE
    try:
        data = file.read_bytes()
        tree: dict[str, Any] = json.loads(data)
        known: dict[str, int] = tree["model"]["vocab"]
        added: list[dict[str, Any]] = tree["added_tokens"]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise DataError(
            f"{file}: cannot be read as a tokenizer ({fault!r}); copy the pretrained model's own there"
        ) from fault
    if tree["model"].get("type") != "BPE" or "ByteLevel" not in _kinds(tree.get("decoder")):
        raise DataError(
            f"{file}: not a byte-level encoding (Llama 3 and Qwen have one), and no other can be trained on"
        )
    spelling: list[bytes | None] = [None] * (
        1 + max(*known.values(), *(token["id"] for token in added))
    )
    letters = _byte_of_letter()
    for word, number in known.items():
        spelling[number] = (
            bytes(letters[letter] for letter in word)
            if letters.keys() >= set(word)
            else word.encode()
        )
    for token in added:  # these are spelled as they are
        spelling[token["id"]] = token["content"].encode()
    special = frozenset(token["id"] for token in added if token["special"])
    return spelling, special, hashlib.blake2b(data, digest_size=16).hexdigest()


class Encoder:
    """Text to int32 numbers. The spelling of a special token inside a text is plain text; nothing is added to it.

    Made anew from its folder in another process.
    """

    def __init__(self, folder: Path):
        try:
            from tokenizers import Tokenizer
        except ImportError as fault:
            raise DataError(
                f"{folder / FILE}: needs the package tokenizers; `pip install lrattnres[transformers]`"
            ) from fault
        self.folder, self._fast = folder, Tokenizer.from_file(str(folder / FILE))
        self._fast.no_truncation()
        self._fast.no_padding()
        self._fast.encode_special_tokens = True

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return Encoder, (self.folder,)

    def __call__(self, text: str) -> np.ndarray:
        return np.array(self._fast.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def _kinds(part: dict[str, Any] | None) -> set[str]:
    """The types of a decoder, which may be a sequence of others."""
    if part is None:
        return set()
    return {part["type"]}.union(*(_kinds(member) for member in part.get("decoders", [])))


def _byte_of_letter() -> dict[str, int]:
    """The letters by which GPT-2's vocabulary, and those after it, write bytes: printable ones stand for themselves, and the
    others, in order, for the characters from 256 on.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
