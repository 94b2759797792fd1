"""Texts that grow token by token, several at once, each with its own length, dice and end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lrattnres.model.decoder import Decoder
from lrattnres.model.sampling import Dice, Sampling, choose, probabilities


class Generation:
    """Continuations of prompts, all read in one pass, then one token of each at a time.

    Which other rows there are changes a text by the rounding of its logits at most.

    Attributes:
        rows: The rows that still grow, by their place in `prompts`. A row whose last token was
            drawn leaves by itself; one that shall end earlier is dropped.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        tokens: int | None = None,
        seed: int = 0,
        samples: Sequence[int] | None = None,
        allowed: Tensor | None = None,
    ):
        """Reads the prompts.

        Args:
            decoder: The model.
            prompts: Tokens of each, at least one, beginning with what opens a text.
            sampling: How a token is chosen.
            tokens: How many more at most; None: as many as the context allows.
            seed: The seed of all random numbers.
            samples: Which of several texts of one prompt each row is; None: 0 for all.
            allowed: bool [vocabulary], the tokens that may be chosen; None: all of them. A model
                may have more rows than its tokenizer has tokens.

        Raises:
            ValueError: A prompt is empty, or the context has no room for it and all its tokens.
        """
        self.decoder, self.sampling = decoder, sampling
        self.left = [room(len(prompt), tokens, decoder.context) for prompt in prompts]
        self.rows = list(range(len(prompts)))
        self.dice = [Dice(seed, sample) for sample in samples or [0] * len(prompts)]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        padded = torch.full((len(prompts), int(lengths.max())), decoder.separator)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.as_tensor(prompt)
        size = max(len(prompt) + more - 1 for prompt, more in zip(prompts, self.left, strict=True))
        self.cache = decoder.cache(len(prompts), max(size, padded.shape[1]))
        hidden = decoder.feed(self.cache, padded, lengths)
        # [rows, d]: what the head takes next
        self.hidden = hidden[torch.arange(len(prompts)), lengths - 1]
        self._allowed = None if allowed is None else allowed.to(self.hidden.device)
        self._kept = list(self.rows)  # what the cache and `hidden` hold
        self._fresh: Tensor | None = None  # tokens drawn, but not read yet

    def step(self) -> dict[int, int]:
        """The next token of every row that grows, by the row.

        Raises:
            FloatingPointError: The model's logits are not finite.
        """
        if self._fresh is not None:
            places = [place for place, row in enumerate(self._kept) if row in self.rows]
            if len(places) < len(self._kept):
                self.cache, self._fresh, self._kept = (
                    self.cache.select(places),
                    self._fresh[places],
                    list(self.rows),
                )
            self.hidden = self.decoder.feed(self.cache, self._fresh.unsqueeze(1))[:, 0]
        logits = self.decoder.head(self.hidden)
        chances = probabilities(logits, self.sampling, self._allowed)
        self._fresh = choose(chances, [self.dice[row] for row in self.rows])
        drawn = dict(zip(self.rows, self._fresh.tolist(), strict=True))
        for row in drawn:
            self.left[row] -= 1
        self.drop([row for row in drawn if self.left[row] == 0])
        return drawn

    def drop(self, rows: Collection[int]) -> None:
        """These rows grow no further."""
        self.rows = [row for row in self.rows if row not in rows]


def room(prompt: int, tokens: int | None, context: int) -> int:
    """How many tokens may follow `prompt` tokens: `tokens`, or all that the context allows.

    The last one need not be read any more, so a window of `context` tokens leads to one more.

    Raises:
        ValueError: The prompt is empty, or there is no room for so many.
    """
    most = context + 1 - prompt
    if prompt < 1:
        raise ValueError("an empty prompt: begin with what opens a document")
    if most < 1:
        raise ValueError(
            f"a prompt of {prompt} tokens, its opening included, in a context of {context}: "
            "shorten it"
        )
    if tokens is not None and tokens > most:
        raise ValueError(
            f"tokens={tokens} after a prompt of {prompt} (its opening included) is more than the "
            f"context of {context} allows; write tokens={most}, or a shorter prompt"
        )
    return most if tokens is None else tokens
