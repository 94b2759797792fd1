"""Training windows: streams of packed documents, read ahead in the background.

The global batch is a fixed number of streams. Each packs its own documents end to end and is a pure function of (seed,
stream, position): the batch of a step depends neither on the number of ranks or threads nor on where a run was stopped.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from lrattnres.data.documents import Documents, held_out
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.order import Order
from lrattnres.data.stores import ReadingPool

A = TypeVar("A")
T = TypeVar("T")
MOST_EMPTY_EPOCHS = 1000


class Place(NamedTuple):
    """Where a stream's next window begins.

    `row` counts the rows of the stream's stretch of the epoch, `offset` the tokens of the document there, and `skipped`
    the groups passed over so far because they could not be read.
    """

    epoch: int = 0
    row: int = 0
    offset: int = 0
    skipped: int = 0


class _Stream:
    """One sequence of documents without end. The offset always lies inside a training document."""

    def __init__(
        self, number: int, documents: Documents, order: Order, holdout: float, skip_unreadable: bool
    ):
        self._number, self._documents, self._order = number, documents, order
        self._holdout, self._skip = holdout, skip_unreadable
        self._rows: list[
            int
        ] = []  # the training documents of the group at hand, in the order they are read,
        self._positions: list[int] = []  # and which row of the stretch each one is
        self._tokens = np.empty(0, dtype=np.int32)

    def begin(self, place: Place) -> Place:
        """Moves to the first training document from `place` on. Raises IndexError where the stream has no such place."""
        epoch, row, offset, skipped = place
        if min(place) < 0 or row >= self._order.length(self._number):
            raise IndexError
        self._skipped = skipped
        self._enter(epoch, row)
        anywhere = row == offset == 0 or self._skipped > skipped
        if not anywhere and (self._epoch, self._positions[0]) != (epoch, row):
            raise IndexError
        self._offset = 0 if self._skipped > skipped else offset
        self._tokens[self._offset]
        return self.place

    @property
    def place(self) -> Place:
        return Place(self._epoch, self._positions[self._next], self._offset, self._skipped)

    def next_window(self, context: int) -> tuple[np.ndarray, Place]:
        """int64 [context + 1], and where the next one begins: the last token of this is the first of that."""
        window, filled = np.empty(context + 1, dtype=np.int64), 0
        while filled < context:
            tokens, offset = self._tokens, self._offset
            taken = min(len(tokens) - offset, context - filled)
            window[filled : filled + taken] = tokens[offset : offset + taken]
            filled += taken
            if offset + taken < len(tokens):
                self._offset = offset + taken
            else:
                self._advance()
        window[context] = self._tokens[self._offset]
        return window, self.place

    def _advance(self) -> None:
        self._offset = 0
        if self._next + 1 < len(self._rows):
            self._next += 1
            self._tokens = self._group.tokens(self._rows[self._next])
        else:
            self._enter(self._epoch, self._end)

    def _enter(self, epoch: int, row: int) -> None:
        """Moves to the first training document at or after `row` of `epoch`, over groups that have none."""
        last = epoch + MOST_EMPTY_EPOCHS
        while True:
            if row == self._order.length(self._number):
                epoch, row = epoch + 1, 0
            if epoch == last:
                raise DataError(
                    f"data stream {self._number}: no training document in {MOST_EMPTY_EPOCHS} epochs; write a smaller "
                    "data.holdout or global_batch, or give more documents"
                )
            piece = self._order.piece(epoch, self._number, row)
            try:
                group = self._documents.group(piece.group)
                wanted = (group.present & ~held_out(group.hashes, self._holdout))[
                    piece.rows
                ].nonzero()[0]
            except UnreadableError:
                if not self._skip:
                    raise
                self._skipped += 1
                wanted = np.empty(0, dtype=np.int64)
            if wanted.size:
                break
            row += len(piece.rows)
        self._group, self._epoch, self._end, self._next, self._offset = (
            group,
            epoch,
            row + len(piece.rows),
            0,
            0,
        )
        self._rows, self._positions = piece.rows[wanted].tolist(), (wanted + row).tolist()
        self._tokens = group.tokens(self._rows[0])


class TrainStreams:
    """The training windows of one rank: one from each stream it owns, every step.

    `waited`: seconds that `next_batch` took so far.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        context: int,
        streams: int,
        seed: int,
        holdout: float = 0.0,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        ahead: int = 1,
        skip_unreadable: bool = False,
    ):
        """`workers` threads keep `ahead` batches ready; with 0 each batch is made when it is asked for.

        Raises DataError where there are too few documents, or the first ones cannot be read.
        """
        if streams % world or not 0 <= rank < world:
            raise DataError(
                f"global_batch={streams}: must be a multiple of the {world} processes (this one is {rank})"
            )
        order = Order(documents.rows, seed=seed, streams=streams)
        self._context, self.owned, self.waited = context, list(range(rank, streams, world)), 0.0
        self._new = lambda number: _Stream(number, documents, order, holdout, skip_unreadable)
        self._workers, self._ahead = workers, ahead if workers else 1
        self._streams: list[_Stream] = []
        self._pools: list[ReadingPool] = []
        self._batches: deque[list[Callable[[], tuple[np.ndarray, Place]]]] = deque()
        self._places: list[Place] = []
        self._begin([Place()] * len(self.owned))

    def next_batch(self) -> torch.Tensor:
        """int64 [len(owned), context + 1]. Raises DataError; the streams are then where they were."""
        begin = time.perf_counter()
        try:
            if not self._streams:
                self._begin(self._places)
            self._fill(self._ahead)
            parts = [result() for result in self._batches.popleft()]
        except BaseException:
            self.close()
            raise
        self._places = [place for _, place in parts]
        if self._workers:
            self._fill(self._ahead)  # the threads work while the caller does
        self.waited += time.perf_counter() - begin
        return torch.from_numpy(np.stack([window for window, _ in parts]))

    @property
    def skipped(self) -> int:
        """Groups that the owned streams passed over because they could not be read."""
        return sum(place.skipped for place in self._places)

    def state(self) -> torch.Tensor:
        """int64 [len(owned), 4]: the Place of each owned stream's next window. What was read ahead does not count."""
        return torch.tensor([list(place) for place in self._places], dtype=torch.int64)

    def load_state(self, state: torch.Tensor) -> None:
        """Continues from `state`; a rank of another world size takes the rows of its own streams. Raises DataError."""
        shape = (len(self.owned), len(Place._fields))
        if state.shape != shape or state.dtype != torch.int64:
            raise DataError(
                f"state of the data streams: {state.dtype} {list(state.shape)} was saved, this run needs int64 "
                f"{list(shape)}; continue with the global_batch the run was started with"
            )
        self._begin([Place(*row) for row in state.tolist()])

    def go_back(self, state: torch.Tensor) -> None:
        """To an earlier `state` of its own. Nothing is read before the next batch: it may be that nothing can be."""
        self.close()
        self._places = [Place(*row) for row in state.tolist()]

    def close(self) -> None:
        """Stops reading ahead. The state stays, and the next batch goes on from it."""
        for pool in self._pools:
            pool.stop()
        self._streams, self._pools = [], []
        self._batches.clear()

    def _begin(self, places: list[Place]) -> None:
        """Builds the streams anew: a thread that still reads for the old ones disturbs nobody."""
        self.close()
        self._pools = [ReadingPool(1) for _ in range(min(self._workers, len(self.owned)))]
        self._streams = [self._new(number) for number in self.owned]
        started = self._each(_Stream.begin, places)
        try:
            self._places = list(self._named(started, places))
        except BaseException:
            self.close()
            raise

    def _fill(self, ahead: int) -> None:
        while len(self._batches) < ahead:
            self._batches.append(
                self._each(_Stream.next_window, [self._context] * len(self._streams))
            )

    def _each(
        self, job: Callable[[_Stream, A], T], arguments: Sequence[A]
    ) -> list[Callable[[], T]]:
        """Results of `job(stream, argument)` for every stream, to be called for.

        A stream belongs to one thread, which does its jobs in the order they are given.
        """
        if not self._pools:
            return [
                partial(job, stream, argument)
                for stream, argument in zip(self._streams, arguments, strict=True)
            ]
        return [
            self._pools[index % len(self._pools)].submit(job, stream, argument).result
            for index, (stream, argument) in enumerate(zip(self._streams, arguments, strict=True))
        ]

    def _named(self, results: list[Callable[[], Place]], places: list[Place]) -> Iterator[Place]:
        for number, result, place in zip(self.owned, results, places, strict=True):
            try:
                yield result()
            except IndexError:
                raise DataError(
                    f"state of data stream {number}: there is no (epoch, row, offset) {tuple(place[:3])}; continue "
                    "with the corpus, tokenizer, seed and global_batch the run was started with"
                ) from None


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
