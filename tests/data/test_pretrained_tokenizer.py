"""A pretrained model's own tokenizer: the numbers are those of its library, the bytes those of the text."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from lrattnres.config import TokenizerConfig, TokenizerName
from lrattnres.data.errors import DataError
from lrattnres.data.tokenizers import build_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="it reads tokenizer.json")

TEXT = "The router reads œuvres, 漢字 and\n\ttabs  twice; <|end|> is no end. \U0001f600"


def byte_level_tokenizer(texts: list[str], folder: Path):
    """Trained on `texts` as GPT-2's was on the web, and saved in `folder`."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=letters
    )
    made.train_from_iterator(texts, trainer)
    made.add_tokens(["<think>"])  # not special
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return made


@pytest.fixture
def made(tmp_path: Path):
    return byte_level_tokenizer(
        ["the router reads what every layer wrote before it"] * 9, tmp_path / "words"
    )


def opened(folder: Path, separator: int):
    return build_tokenizer(TokenizerConfig(TokenizerName.pretrained, str(folder), separator))


def test_numbers_are_the_librarys_and_bytes_are_the_texts(made, tmp_path: Path) -> None:
    end = made.token_to_id("<|end|>")
    tokenizer = opened(tmp_path / "words", end)
    plain = "the router reads œuvres, 漢字 and\n\ttabs  twice <think> it \U0001f600"
    numbers = tokenizer.encode(plain)
    assert numbers.tolist() == made.encode(plain).ids and numbers.dtype == np.int32
    assert tokenizer.spell(numbers) == plain.encode() and tokenizer.token_bytes[
        numbers
    ].sum() == len(plain.encode())
    assert tokenizer.vocabulary == 1 + max(made.get_vocab().values())
    inside = tokenizer.encode(TEXT)
    assert (
        end not in inside and tokenizer.decode(inside) == TEXT and tokenizer.token_bytes[end] == 0
    )
    assert pickle.loads(pickle.dumps(tokenizer)).encode(TEXT).tolist() == inside.tolist()
    assert opened(tmp_path / "words", end).fingerprint == tokenizer.fingerprint


def test_what_is_no_such_tokenizer_is_refused(made, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.separator=7: must be a special token"):
        opened(tmp_path / "words", 7)
    with pytest.raises(DataError, match="copy the pretrained model's own there"):
        opened(tmp_path, 0)
    file = tmp_path / "words" / "tokenizer.json"
    tree = json.loads(file.read_text())
    file.write_text(json.dumps(tree | {"decoder": {"type": "Metaspace"}}))
    with pytest.raises(DataError, match="not a byte-level encoding"):
        opened(tmp_path / "words", made.token_to_id("<|end|>"))
