"""How a trained model reads and writes text: its tokenizer, and what stands around a text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from lrattnres.data.errors import DataError
from lrattnres.data.pretrained import FILE, Spelling, spelling_of
from lrattnres.data.tokenizers import Tokenizer
from lrattnres.exchange.folder import CONFIG, Exported, FolderError, ends_of, read_json

PROBES = ("a", "b", "1", "?")  # some tokenizers have no token for some of them


class Words(Protocol):
    """What a model's text begins with, ends with, and is made of; all tokens are plain integers.

    Attributes:
        name: Of the tokenizer, for people.
        opening: What every text begins with; may be empty.
        prefix: The token that stands before a text where nothing else does.
        ends: The tokens that end a generated text.
    """

    @property
    def name(self) -> str: ...
    @property
    def opening(self) -> list[int]: ...
    @property
    def prefix(self) -> int: ...
    @property
    def ends(self) -> frozenset[int]: ...
    @property
    def strips(self) -> bool:
        """Whether a space in front of a whole text is none of the text."""

    def allowed(self, vocabulary: int) -> Tensor:
        """bool [vocabulary]: the rows of a model that are tokens. The others are never written."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without the opening; nothing in it is special."""

    def encode_for_task(self, text: str) -> list[int]:
        """The same as lm-evaluation-harness has it: a text may spell a special token."""

    def opens_itself(self, text: str) -> bool:
        """Whether a task's text already spells what it would be opened with."""

    def decode(self, tokens: list[int], *, special: bool = True) -> str:
        """The text of tokens; `special`: with the spelling of special tokens."""

    def spell(self, tokens: Iterable[int]) -> bytes:
        """The UTF-8 of tokens, of which each may hold a part of a character."""


@dataclass(frozen=True)
class TrainedWords:
    """The tokenizer that a model was trained with here: the separator opens and ends every text.

    Attributes:
        tokenizer: The tokenizer.
        further: Tokens that end a text besides the separator.
    """

    tokenizer: Tokenizer
    further: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        return self.tokenizer.name

    @property
    def opening(self) -> list[int]:
        return [self.tokenizer.separator]

    @property
    def prefix(self) -> int:
        return self.tokenizer.separator

    @property
    def ends(self) -> frozenset[int]:
        return self.further | {self.tokenizer.separator}

    def allowed(self, vocabulary: int) -> Tensor:
        return _mask(self.tokenizer.tokens, vocabulary)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()

    encode_for_task = encode

    def opens_itself(self, text: str) -> bool:
        return False

    @property
    def strips(self) -> bool:
        return False

    def decode(self, tokens: list[int], *, special: bool = True) -> str:
        return self.tokenizer.decode(tokens)

    def spell(self, tokens: Iterable[int]) -> bytes:
        return self.tokenizer.spell(tokens)


class PretrainedWords:
    """The tokenizer.json of a converted model; a text opens with what that tokenizer puts there."""

    def __init__(self, exported: Exported):
        """Reads the files of a converted folder.

        Raises:
            FolderError: The folder has no tokenizer, or none that can be read; or no token of it
                begins a text.
        """
        file, settings = exported.path / FILE, exported.path / "tokenizer_config.json"
        if not file.exists():
            raise FolderError(
                f"{file}: not there; copy the tokenizer of the pretrained model into the folder"
            )
        try:
            from tokenizers import Tokenizer as Fast
        except ImportError as error:
            raise FolderError(
                f"{file}: needs the package tokenizers; `pip install lrattnres[transformers]`"
            ) from error
        try:
            self._fast = Fast.from_file(str(file))
        except Exception as error:  # the package knows no other class
            raise FolderError(f"{file}: cannot be read: {error}") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self.name, self._file = str(file), file
        said = read_json(settings)
        first, last = (self._number(said.get(key)) for key in ("bos_token", "eos_token"))
        self.ends = ends_of(exported.path) | (frozenset() if last is None else {last})
        # As the harness has it: bos_token, else eos_token.
        known = [token for token in (first, last, exported.separator) if token is not None]
        if not known:
            raise FolderError(
                f"{exported.path / CONFIG}: bos_token_id and eos_token_id are null, and texts need "
                "a beginning"
            )
        self.prefix = known[0]
        self.opening = self._before()

    def _number(self, token: Any) -> int | None:
        content = token.get("content") if isinstance(token, dict) else token
        return self._fast.token_to_id(content) if isinstance(content, str) else None

    def _before(self) -> list[int]:
        """What the tokenizer puts before a text: of what it puts around it, the part in front."""
        fronts = []
        for text in PROBES:
            whole = self._fast.encode(text).ids
            bare = self._fast.encode(text, add_special_tokens=False).ids
            ends = range(len(bare), len(whole) + 1)
            if bare:
                fronts.append(
                    [whole[: e - len(bare)] for e in ends if whole[e - len(bare) : e] == bare]
                )
        shared = (
            [front for front in fronts[0] if all(front in other for other in fronts)]
            if fronts
            else []
        )
        if not shared:
            raise FolderError(f"{self.name}: what it puts before a text cannot be told")
        return shared[0]

    def allowed(self, vocabulary: int) -> Tensor:
        return _mask(self._fast.get_vocab(with_added_tokens=True).values(), vocabulary)

    def encode(self, text: str) -> list[int]:
        self._fast.encode_special_tokens = True
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def encode_for_task(self, text: str) -> list[int]:
        self._fast.encode_special_tokens = False
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def opens_itself(self, text: str) -> bool:
        return text.startswith(self._fast.decode([self.prefix], skip_special_tokens=False))

    def decode(self, tokens: list[int], *, special: bool = True) -> str:
        return str(self._fast.decode(tokens, skip_special_tokens=not special))

    def spell(self, tokens: Iterable[int]) -> bytes:
        parts = (self._spelling.words[token] for token in tokens)
        return b"".join("\ufffd".encode() if part is None else part for part in parts)

    @property
    def strips(self) -> bool:
        return self._spelling.strips

    @cached_property
    def _spelling(self) -> Spelling:
        try:
            return spelling_of(self._file)
        except DataError as error:
            raise FolderError(str(error)) from error


def _mask(tokens: Iterable[int], vocabulary: int) -> Tensor:
    rows = torch.tensor([token for token in tokens if token < vocabulary])
    return torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, rows, True)
