"""From tokens to text while it grows: only what can no longer change is given out."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class Spelled(Protocol):
    """Of `lrattnres.evaluation.words.Words` what is needed here."""

    @property
    def strips(self) -> bool: ...
    def spell(self, tokens: Iterable[int]) -> bytes: ...


class TextStream:
    """The text of one continuation, up to the first of the `stop` texts.

    Held back are the bytes of a character that is not complete, and characters that may be the
    beginning of a stop text. Where several stop texts are in the text, the one counts that is
    complete first (of two that are complete at once, the longer one): so how a text is cut into
    tokens does not matter. All pieces together are the text of the tokens, up to the stop.
    """

    def __init__(self, words: Spelled, stop: Sequence[str] = (), *, first: bool = False):
        """
        Args:
            words: Spells tokens as UTF-8.
            stop: Texts of which each ends the continuation.
            first: Whether no text stands before it, so that a space that encodings of the
                SentencePiece family put in front of a whole text is left out.
        """
        self._words, self._stop = words, stop
        self._space = " " if first and words.strips else ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; after a stop, nothing."""
        return self._advance(self._words.spell([token]))

    def close(self) -> str:
        """What was held back, now that no token follows."""
        rest = self._advance(b"", final=True) + self._held
        self._held = ""
        return rest

    def _advance(self, spelled: bytes, final: bool = False) -> str:
        if self.stopped:
            return ""
        text = self._utf8.decode(spelled, final)
        if text:
            text, self._space = text.removeprefix(self._space), ""
        self._held += text
        found = [
            (start + len(stop), start)
            for stop in self._stop
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            self.stopped = True
            kept, self._held = self._held[: min(found)[1]], ""
            return kept
        keep = len(self._held) - self._unsure()
        certain, self._held = self._held[:keep], self._held[keep:]
        return certain

    def _unsure(self) -> int:
        """How many characters at the end may be the beginning of a stop text."""
        longest = min(len(self._held), max(map(len, self._stop), default=1) - 1)
        ends = (
            size
            for size in range(longest, 0, -1)
            if any(stop.startswith(self._held[-size:]) for stop in self._stop)
        )
        return next(ends, 0)
