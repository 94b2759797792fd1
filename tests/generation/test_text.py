"""Text that grows: pieces add up to the whole, no broken character, and stop texts however the
tokens are cut.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrattnres.config import TokenizerName
from lrattnres.data.tokenizers import build_tokenizer
from lrattnres.evaluation.words import TrainedWords
from lrattnres.generation.text import TextStream

BYTES = build_tokenizer(TokenizerName.bytes)


def grown(text: bytes, stop: list[str], tokenizer=BYTES) -> tuple[str, list[str], bool]:
    stream = TextStream(TrainedWords(tokenizer), stop)
    pieces = [stream.push(token) for token in text]
    pieces.append(stream.close())
    return "".join(pieces), pieces, stream.stopped


def first_stop(text: str, stop: list[str]) -> str:
    """Up to the stop text that is complete first: tried out character by character."""
    for end in range(len(text) + 1):
        complete = [text[:end].removesuffix(one) for one in stop if text[:end].endswith(one)]
        if complete:
            return min(complete, key=len)
    return text


@given(st.binary(max_size=60))
def test_pieces_add_up_to_what_the_tokenizer_decodes(raw: bytes) -> None:
    assert grown(raw, [])[0] == BYTES.decode(list(raw))


@given(st.text(max_size=20))
def test_no_piece_holds_half_a_character(text: str) -> None:
    whole, pieces, _ = grown(text.encode(), [])
    assert whole == text and [piece for piece in pieces if piece] == list(text)


@given(st.text("abc", max_size=25), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_texts_against_every_prefix(text: str, stop: list[str]) -> None:
    whole, _, stopped = grown(text.encode(), stop)
    assert whole == first_stop(text, stop)
    assert stopped == any(one in text for one in stop)


class Cut:
    """A tokenizer whose tokens are these pieces."""

    strips = False

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces

    def spell(self, tokens) -> bytes:
        return b"".join(self.pieces[token] for token in tokens)


@given(
    st.text("abä€", max_size=25),
    st.lists(st.text("abä€", min_size=1, max_size=4), max_size=3),
    st.integers(0, 10**6),
)
def test_the_cuts_between_tokens_do_not_matter(text: str, stop: list[str], seed: int) -> None:
    raw, choose = text.encode(), random.Random(seed)
    cuts = sorted(choose.sample(range(len(raw) + 1), min(4, len(raw) + 1)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    stream = TextStream(Cut(pieces), stop)
    assert "".join(
        [stream.push(token) for token in range(len(pieces))] + [stream.close()]
    ) == first_stop(text, stop)


def test_of_two_stop_texts_in_one_token_the_first_complete_one_counts() -> None:
    for pieces in ([b"xabcy"], [b"xab", b"cy"], [b"x", b"abcy"]):
        stream = TextStream(Cut(pieces), ["xabc", "ab"])
        assert "".join(map(stream.push, range(len(pieces)))) == "x" and stream.stopped


def test_a_space_in_front_of_a_whole_text_is_left_out_where_an_encoding_puts_one() -> None:
    for strips, first, expected in ((True, True, " a"), (True, False, "  a"), (False, True, "  a")):
        words = Cut([b"", b" ", b" a"])
        words.strips = strips
        stream = TextStream(words, ["z"], first=first)
        assert "".join(map(stream.push, range(3))) + stream.close() == expected


def test_the_tokens_of_a_vocabulary_with_holes() -> None:
    words = TrainedWords(build_tokenizer(TokenizerName.cl100k_base))
    allowed = words.allowed(100_352)
    missing = (~allowed[:100_277]).nonzero().flatten().tolist()
    assert missing == [100_256, *range(100_261, 100_276)] and not allowed[100_277:].any()
    assert allowed[5_809] and words.decode([5_809]) == "\ufffd"  # a token that is spelled so


def test_what_may_become_a_stop_text_is_held_back_and_given_out_when_it_does_not() -> None:
    stream = TextStream(TrainedWords(BYTES), ["END"])
    assert [stream.push(token) for token in b"aENENxE"] == ["a", "", "", "EN", "", "ENx", ""]
    assert stream.close() == "E"
    assert [stream.push(token) for token in b"END."] == ["", "", "", ""] and stream.stopped


@pytest.mark.parametrize("name", [TokenizerName.bytes, TokenizerName.cl100k_base])
def test_bytes_of_tokens_are_what_is_decoded(name: TokenizerName) -> None:
    tokenizer = build_tokenizer(name)
    assert (
        TextStream(TrainedWords(tokenizer)).push(tokenizer.vocabulary) == "\ufffd"
    )  # of a model with more rows
    text = "naïve 🙂 <|endoftext|> \n\t 漢字"
    tokens = tokenizer.encode(text)
    assert tokenizer.separator not in tokens and tokenizer.spell(tokens) == text.encode()
    stream = TextStream(TrainedWords(tokenizer))
    assert "".join([stream.push(int(token)) for token in tokens] + [stream.close()]) == text
