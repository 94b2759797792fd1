"""The tokenizer of a pretrained model, as transformers reads it from several files."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lrattnres.exchange.folder import TOKENIZER, FolderError, read_json

SETTINGS = "tokenizer_config.json"


class GivenTokenizer(NamedTuple):
    """What a folder says of its tokenizer.

    Attributes:
        largest: Its largest token; -1 where there is no tokenizer.
        first: The token that begins a text; None if it has none.
        ends: The tokens that end one.
        write: Puts its files into a folder, where tokenizer.json alone says how text is encoded.
    """

    largest: int
    first: int | None
    ends: frozenset[int]
    write: Callable[[Path], None]


def read_tokenizer(folder: Path, notes: list[str]) -> GivenTokenizer:
    """The tokenizer in `folder`.

    tokenizer_config.json may change what tokenizer.json says: the class of the tokenizer and
    settings such as add_bos_token decide about the template, added tokens and the cutting into
    words. Where that file is there, transformers reads both, and what it made of them is written
    as one tokenizer.json; where it is not, tokenizer.json is taken as it stands.

    Args:
        folder: The folder of a pretrained model.
        notes: Gets a line where the files disagree.

    Raises:
        FolderError: The tokenizer cannot be read, or transformers is not installed.
    """
    there = [name for name in TOKENIZER if (folder / name).exists()]
    if SETTINGS not in there:
        known = _numbers(read_json(folder / "tokenizer.json"))
        return GivenTokenizer(
            max(known, default=-1), None, frozenset(), partial(_copy, folder, there)
        )
    if importlib.util.find_spec("transformers") is None:
        raise FolderError(
            f"{folder / SETTINGS}: needs the package transformers; "
            "`pip install lrattnres[transformers]`"
        )
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        file = folder / "tokenizer.json"
        alone = Tokenizer.from_file(str(file)) if file.exists() else made.backend_tokenizer
    except Exception as error:  # of any class: it reads whatever lies there
        reason = str(error).partition("\n")[0]
        raise FolderError(
            f"{folder}: its tokenizer cannot be read by transformers: {reason}"
        ) from error
    if not _alike(made.backend_tokenizer, alone):
        notes.append(
            f"{folder}: {SETTINGS} changes what tokenizer.json says; "
            "the tokenizer is written as transformers reads the two"
        )
    ends = frozenset() if made.eos_token_id is None else frozenset({made.eos_token_id})
    largest = max(made.get_vocab().values(), default=-1)
    return GivenTokenizer(largest, made.bos_token_id, ends, partial(_save, made))


def _alike(one: Any, other: Any) -> bool:
    """Whether two tokenizers are the same, however their templates are written."""
    trees = [
        json.loads(tokenizer.to_str()) | {"post_processor": None} for tokenizer in (one, other)
    ]
    return trees[0] == trees[1] and one.encode("a").ids == other.encode("a").ids


def _save(made: Any, path: Path) -> None:
    made.save_pretrained(path)


def _copy(folder: Path, names: list[str], path: Path) -> None:
    for name in names:
        shutil.copyfile(folder / name, path / name)


def _numbers(tree: dict[str, Any]) -> list[int]:
    """Every token of a tokenizer.json; none where it is not there."""
    try:
        words = tree["model"]["vocab"] if tree else {}
        numbers = list(words.values()) if isinstance(words, dict) else list(range(len(words)))
        return numbers + [token["id"] for token in tree.get("added_tokens", ())]
    except (KeyError, TypeError) as error:
        raise FolderError(f"tokenizer.json: not a tokenizer: {error!r}") from error
