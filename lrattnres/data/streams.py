"""The order of training and evaluation: which tokens stand in which window.

The global batch is a fixed number of streams. Each packs its own documents end to end and is a pure function of (seed,
stream, position): the batch of a step depends neither on the number of ranks nor on where a run was stopped.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from lrattnres.data.corpora import Corpus
from lrattnres.data.errors import DataError
from lrattnres.data.packing import IGNORE
from lrattnres.data.tokenizers import Tokenizer


def document_tokens(corpus: Corpus, tokenizer: Tokenizer, index: int) -> np.ndarray:
    """int32 [1 + tokens]: the separator, then the text of a document."""
    text = corpus.text(index)
    try:
        return np.concatenate([np.array([tokenizer.separator], dtype=np.int32), tokenizer.encode(text)])
    except Exception as error:
        raise DataError(
            f"document {index} of {corpus.description}: {tokenizer.name} cannot encode its {len(text):,} characters, "
            f"which begin {text[:60]!r} ({error}); take it out of the corpus"
        ) from error


@lru_cache(maxsize=4)  # streams reach the end of an epoch at different times
def epoch_order(documents: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation (int64) of 0..documents-1, keyed on (seed, epoch).

    It sorts the raw output of Philox, which NumPy promises never to change, unlike `Generator.permutation`.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(documents)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


class _Stream:
    """One sequence of documents without end, and the place where its next window begins.

    `documents_of(epoch)` lists the documents of an epoch, `tokens_of(document)` reads one. The offset always lies
    inside the document.
    """

    def __init__(self, documents_of: Callable[[int], np.ndarray], tokens_of: Callable[[int], np.ndarray]):
        self._documents_of, self._tokens_of = documents_of, tokens_of
        self.move_to(0, 0, 0)

    def move_to(self, epoch: int, document: int, offset: int) -> None:
        """Raises IndexError where the stream has no such place."""
        if epoch < 0 or document < 0 or offset < 0:
            raise IndexError
        self._documents = self._documents_of(epoch)
        self._tokens = self._tokens_of(int(self._documents[document]))
        self._tokens[offset]
        self.place = (epoch, document, offset)

    def next_window(self, context: int) -> np.ndarray:
        """int64 [context + 1]; the last token is also the first of the next window."""
        window = np.empty(context + 1, dtype=np.int64)
        filled = 0
        while filled < context:
            epoch, document, offset = self.place
            part = self._tokens[offset : offset + context - filled]
            window[filled : filled + len(part)] = part
            filled += len(part)
            if offset + len(part) < len(self._tokens):
                self.place = (epoch, document, offset + len(part))
            elif document + 1 < len(self._documents):
                self.move_to(epoch, document + 1, 0)
            else:
                self.move_to(epoch + 1, 0, 0)
        window[context] = self._tokens[self.place[2]]
        return window


class TrainStreams:
    """The training windows of one rank: one from each stream it owns, every step.

    In epoch e the training documents are permuted by (seed, e), and stream s takes every `streams`-th of them from
    number s on. So every document is read exactly once an epoch, and one epoch follows the other without a gap.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: np.ndarray,
        tokenizer: Tokenizer,
        *,
        context: int,
        streams: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ):
        if len(documents) < streams:
            raise DataError(
                f"global_batch={streams}: as many streams share {len(documents)} training documents, so some would be "
                f"empty; write global_batch={len(documents) or 1} or less, or give more documents"
            )
        if streams % world or not 0 <= rank < world:
            raise DataError(f"global_batch={streams}: must be a multiple of the {world} processes (this one is {rank})")
        self._context, self.owned = context, list(range(rank, streams, world))

        def documents_of(stream: int, epoch: int) -> np.ndarray:
            return documents[epoch_order(len(documents), seed, epoch)[stream::streams]]

        tokens_of = partial(document_tokens, corpus, tokenizer)
        self._streams = [_Stream(partial(documents_of, stream), tokens_of) for stream in self.owned]

    def next_batch(self) -> torch.Tensor:
        """int64 [len(owned), context + 1]."""
        return torch.from_numpy(np.stack([stream.next_window(self._context) for stream in self._streams]))

    def state(self) -> torch.Tensor:
        """int64 [len(owned), 3]: where each owned stream's next window begins.

        That is its epoch, the index in its own list of documents of that epoch, and the offset in tokens.
        """
        return torch.tensor([stream.place for stream in self._streams], dtype=torch.int64)

    def load_state(self, state: torch.Tensor) -> None:
        """Continues from `state`; a rank of another world size takes the rows of its own streams. Raises DataError."""
        if state.shape != (len(self.owned), 3) or state.dtype != torch.int64:
            raise DataError(
                f"state of the data streams: {state.dtype} {list(state.shape)} was saved, this run needs int64 "
                f"{[len(self.owned), 3]}; continue with the global_batch the run was started with"
            )
        for number, stream, place in zip(self.owned, self._streams, state.tolist(), strict=True):
            try:
                stream.move_to(*place)
            except IndexError:
                raise DataError(
                    f"state of data stream {number}: there is no (epoch, document, offset) {tuple(place)}; continue "
                    "with the corpus, tokenizer, seed and global_batch the run was started with"
                ) from None


def held_out_windows(
    corpus: Corpus, documents: np.ndarray, tokenizer: Tokenizer, *, context: int, tokens: int, batch: int
) -> Iterator[torch.Tensor]:
    """The held-out documents packed in the given order: int64 [<= batch, context + 1], with stride `context`.

    There are exactly min(tokens, available) targets in all, for any `batch`; unused positions at the end of the last
    window hold IGNORE. Warns if there are fewer than `tokens`. Raises DataError if no document is held out.
    """
    if len(documents) == 0:
        raise DataError("data.holdout: no document is held out; write a larger share, or give more documents")
    windows = _pack((document_tokens(corpus, tokenizer, int(index)) for index in documents), context, tokens)
    return _batched(windows, batch)


def _pack(parts: Iterator[np.ndarray], context: int, tokens: int) -> Iterator[np.ndarray]:
    """Windows [context + 1] of the concatenated parts, until they hold `tokens` targets."""
    packed, left = np.empty(0, dtype=np.int64), tokens
    for part in parts:
        packed = np.concatenate([packed, part])
        while left > 0 and len(packed) > min(context, left):
            yield _window(packed[: min(context, left) + 1], context)
            left -= min(context, left)
            packed = packed[context:]
        if left == 0:
            return
    if len(packed) > 1:
        yield _window(packed, context)
        left -= len(packed) - 1
    warnings.warn(
        f"evaluation.tokens={tokens}: only {tokens - left} held-out tokens are available, all of them are used; "
        "a larger data.holdout gives more",
        stacklevel=2,
    )


def _window(tokens: np.ndarray, context: int) -> np.ndarray:
    return np.pad(tokens, (0, context + 1 - len(tokens)), constant_values=IGNORE)


def _batched(windows: Iterator[np.ndarray], batch: int) -> Iterator[torch.Tensor]:
    waiting: list[np.ndarray] = []
    for window in windows:
        waiting.append(window)
        if len(waiting) == batch:
            yield torch.from_numpy(np.stack(waiting))
            waiting = []
    if waiting:
        yield torch.from_numpy(np.stack(waiting))


def batch_hash(step: int, streams: Sequence[int], tokens: torch.Tensor) -> int:
    """The sum over streams, mod 2**64, of a 64-bit hash of (step, stream, its row of `tokens` [len(streams), T]).

    A sum of parts: the hashes of ranks and micro-batches add up (mod 2**64) to that of the whole batch.
    """
    rows = tokens.cpu().numpy().astype("<i8")
    total = 0
    for stream, row in zip(streams, rows, strict=True):
        content = np.array([step, stream], dtype="<i8").tobytes() + row.tobytes()
        total += int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    return total % 2**64
