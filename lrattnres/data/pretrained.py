"""The tokenizer that came with a pretrained model: its tokenizer.json, read by `tokenizers`."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lrattnres.data.errors import DataError

FILE = "tokenizer.json"
SPACE = "\u2581"  # how encodings of the SentencePiece family write a space
# The parts of a decoder of that family, as the package names them.
PIECES = {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Spelling(NamedTuple):
    """How the tokens of an encoding are spelled.

    Attributes:
        words: UTF-8 of every token, by its number; None where no token has the number.
        special: The special tokens.
        exact: Whether text and tokens hold the same bytes (a byte-level encoding).
        strips: Whether a space in front of the whole text is none of the text.
        fingerprint: A hash of the file.
    """

    words: list[bytes | None]
    special: frozenset[int]
    exact: bool
    strips: bool
    fingerprint: str


def spelling_of(file: Path) -> Spelling:
    """How the tokens of a tokenizer.json are spelled.

    Raises:
        DataError: The file cannot be read, or its encoding is neither byte-level nor one of the
            SentencePiece family.
    """
    try:
        data = file.read_bytes()
        tree: dict[str, Any] = json.loads(data)
        vocabulary = tree["model"]["vocab"]
        known: dict[str, int] = (
            vocabulary
            if isinstance(vocabulary, dict)
            else {word: number for number, (word, _) in enumerate(vocabulary)}
        )
        added: list[dict[str, Any]] = tree["added_tokens"]
        last = max(*known.values(), *(token["id"] for token in added))
        kinds = _kinds(tree.get("decoder"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file}: cannot be read as a tokenizer ({error!r}); "
            "copy the pretrained model's own there"
        ) from error
    exact = tree["model"].get("type") == "BPE" and "ByteLevel" in kinds
    if not exact and not (kinds and kinds <= PIECES):
        raise DataError(
            f"{file}: neither a byte-level encoding nor one of the SentencePiece family "
            "(Llama and Qwen have these), so its tokens cannot be spelled"
        )
    words: list[bytes | None] = [None] * (1 + last)
    letters = _byte_of_letter()
    for word, number in known.items():
        if exact and letters.keys() >= set(word):
            words[number] = bytes(letters[letter] for letter in word)
        elif "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-Fa-f]{2}>", word):
            words[number] = bytes.fromhex(word[3:5])
        else:
            words[number] = (word if exact else word.replace(SPACE, " ")).encode()
    for token in added:  # these are spelled as they are
        words[token["id"]] = token["content"].encode()
    return Spelling(
        words,
        frozenset(token["id"] for token in added if token["special"]),
        exact,
        bool(kinds & {"Strip", "Metaspace"}),
        hashlib.blake2b(data, digest_size=16).hexdigest(),
    )


def spelling_and_fingerprint(folder: Path) -> tuple[list[bytes | None], frozenset[int], str]:
    """The same for an encoding that can be trained on, whose tokens are in `folder`.

    Returns:
        The bytes of every token, the special tokens, and the hash of the file.

    Raises:
        DataError: The file cannot be read, or the encoding is not byte-level: its tokens stand for
            no exact number of bytes.
    """
    file = folder / FILE
    try:
        spelling = spelling_of(file)
        byte_level = spelling.exact
    except DataError as error:
        if "cannot be read" in str(error):
            raise
        byte_level = False
    if not byte_level:
        raise DataError(
            f"{file}: not a byte-level encoding (Llama 3 and Qwen have one), and no other can be "
            "trained on"
        )
    return spelling.words, spelling.special, spelling.fingerprint


class Encoder:
    """Text to tokens, int32. Nothing is added, and the spelling of a special token is plain text.

    Made anew from its folder in another process.
    """

    def __init__(self, folder: Path):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise DataError(
                f"{folder / FILE}: needs the package tokenizers; "
                "`pip install lrattnres[transformers]`"
            ) from error
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
    """The letters by which GPT-2's vocabulary, and those after it, write bytes.

    Printable ones stand for themselves, the others, in order, for the characters from 256 on.
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
