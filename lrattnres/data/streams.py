"""Training windows: streams of packed documents, read ahead in the background.

The global batch is a fixed number of streams. Each packs its own documents end to end and is a pure
function of (seed, stream, position): the batch of a step depends neither on the number of ranks or
threads nor on where a run was stopped.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from lrattnres.data.documents import Counts, Documents, Group, held_out
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.order import Order
from lrattnres.data.stores import ReadingPool

A = TypeVar("A")
T = TypeVar("T")
MOST_EMPTY_EPOCHS = 1000


class Place(NamedTuple):
    """Where a stream's next window begins, and what it passed over to come there.

    Attributes:
        epoch: from 0.
        row: of the stream's stretch of the epoch.
        offset: tokens into the document at that row.
        skipped: groups passed over, in all epochs, because they could not be read.
        skipped_rows: rows passed over, in all epochs, because they are no document; held-out ones
            do not count.
    """

    epoch: int = 0
    row: int = 0
    offset: int = 0
    skipped: int = 0
    skipped_rows: int = 0


class _Groups:
    """The groups of a corpus with the rows that are trained on, for all streams of a process.

    A group without such a row is read once, and remembered.
    """

    def __init__(self, documents: Documents, holdout: float, skip_unreadable: bool):
        self._documents, self._holdout, self.skip = documents, holdout, skip_unreadable
        self._counts, self._barren = dict[int, Counts](), dict[int, np.ndarray]()
        self._fertile, self._lock = False, threading.Lock()

    def open(self, number: int) -> tuple[Group | None, np.ndarray, np.ndarray]:
        """A group, and bool [rows]: which are documents, which are trained on; None without any."""
        if (present := self._barren.get(number)) is not None:
            return None, present, np.zeros(len(present), dtype=bool)
        group = self._documents.group(number)
        training = group.present & ~held_out(group.hashes, self._holdout)
        if number not in self._counts:
            self._counts[number] = Counts.of(group, self._holdout)
        if training.any():
            self._fertile = True
            return group, group.present, training
        self._barren[number] = group.present.copy()
        return None, group.present, training

    def refuse_if_barren(self) -> None:
        """Raises DataError if no group has a row to train on; reads on until one has."""
        if self._fertile:
            return
        with self._lock:
            numbers = range(len(self._documents.rows))
            for number in tqdm(numbers, "looking for a document", leave=False, disable=None):
                if bool(self._fertile):  # `open` may have found one
                    return
                try:
                    if number not in self._counts:
                        self.open(number)
                except UnreadableError:
                    if not self.skip:
                        raise
            if not self._fertile:
                unread = len(numbers) - len(self._counts)
                raise DataError(
                    f"no document to train on: {Counts.sum(self._counts.values())}"
                    + (f", {unread:,} row groups unreadable" if unread else "")
                    + "; write a smaller data.min_score or data.holdout, or give more documents"
                )


class _Stream:
    """One sequence of documents without end. The offset always lies inside a training document."""

    def __init__(self, number: int, groups: _Groups, order: Order):
        self._number, self._groups, self._order = number, groups, order
        # Of the piece of a group at hand, for each training document: which row of the group it is,
        # which of the stretch, and how many rows before it were skipped since `_passed`.
        self._rows: list[int] = []
        self._positions: list[int] = []
        self._missing: list[int] = []
        self._tokens = np.empty(0, dtype=np.int32)

    def begin(self, place: Place) -> Place:
        """Moves to the first training document from `place` on.

        Raises:
            IndexError: the stream has no such place.
        """
        epoch, row, offset, skipped, self._passed = place
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
        skipped_rows = self._passed + self._missing[self._next]
        row = self._positions[self._next]
        return Place(self._epoch, row, self._offset, self._skipped, skipped_rows)

    def next_window(self, context: int) -> tuple[np.ndarray, Place]:
        """int64 [context + 1], and where the next begins: the last token of this is its first."""
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
            self._passed += self._all_missing
            self._enter(self._epoch, self._end)

    def _enter(self, epoch: int, row: int) -> None:
        """Moves to the first training document at or after `row` of `epoch`, over other groups."""
        last = epoch + MOST_EMPTY_EPOCHS
        while True:
            if row == self._order.length(self._number):
                self._groups.refuse_if_barren()
                epoch, row = epoch + 1, 0
            if epoch == last:
                raise DataError(
                    f"data stream {self._number}: no training document in {MOST_EMPTY_EPOCHS} "
                    "epochs; write a smaller data.holdout or global_batch, or give more documents"
                )
            piece = self._order.piece(epoch, self._number, row)
            end = row + len(piece.rows)
            try:
                group, present, training = self._groups.open(piece.group)
            except UnreadableError:
                if not self._groups.skip:
                    raise
                self._skipped += 1
            else:
                missing = np.cumsum(~present[piece.rows])
                wanted = np.flatnonzero(training[piece.rows])
                if group is not None and wanted.size:
                    break
                self._passed += int(missing[-1]) if missing.size else 0
            row = end
        self._group, self._epoch, self._end, self._next, self._offset = group, epoch, end, 0, 0
        self._rows, self._positions = piece.rows[wanted].tolist(), (wanted + row).tolist()
        self._missing, self._all_missing = missing[wanted].tolist(), int(missing[-1])
        self._tokens = group.tokens(self._rows[0])


class TrainStreams:
    """The training windows of one rank: one from each stream it owns, every step.

    Attributes:
        owned: the numbers of its streams.
        waited: seconds that `next_batch` took so far.
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
        """Reads until every stream has its first document.

        Args:
            documents: the corpus, tokenized.
            context: tokens a window.
            streams: of all ranks together: the global batch.
            seed: of the order.
            holdout: the share of documents that is held out.
            rank: of this process.
            world: how many processes there are.
            workers: threads that keep batches ready; 0: each is made when it is asked for.
            ahead: how many batches they keep ready.
            skip_unreadable: pass over groups that cannot be read, and count them.

        Raises:
            DataError: there is no document to train on, or there are fewer rows than streams.
            UnreadableError: the first documents cannot be read.
        """
        if streams % world or not 0 <= rank < world:
            raise DataError(
                f"global_batch={streams}: must be a multiple of the {world} processes (this one is "
                f"{rank})"
            )
        order = Order(documents.rows, seed=seed, streams=streams)
        self._context, self.owned, self.waited = context, list(range(rank, streams, world)), 0.0
        groups = _Groups(documents, holdout, skip_unreadable)
        self._new = lambda number: _Stream(number, groups, order)
        self._workers, self._ahead = workers, ahead if workers else 1
        self._streams: list[_Stream] = []
        self._pools: list[ReadingPool] = []
        self._batches: deque[list[Callable[[], tuple[np.ndarray, Place]]]] = deque()
        self._places: list[Place] = []
        self._begin([Place()] * len(self.owned))

    def next_batch(self) -> torch.Tensor:
        """The next window of every owned stream: int64 [len(owned), context + 1].

        Raises:
            DataError: something cannot be read; the streams are then where they were.
        """
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

    @property
    def skipped_rows(self) -> int:
        """Rows that the owned streams passed over because they are no documents."""
        return sum(place.skipped_rows for place in self._places)

    def state(self) -> torch.Tensor:
        """int64 [len(owned), 5]: the Place of each owned stream's next window.

        What was read ahead does not count.
        """
        return torch.tensor([list(place) for place in self._places], dtype=torch.int64)

    def load_state(self, state: torch.Tensor) -> None:
        """Continues from a state, or from the rows of one that are those of the owned streams.

        Raises:
            DataError: it is none of this corpus, tokenizer, seed or number of streams.
        """
        shape = (len(self.owned), len(Place._fields))
        if state.shape != shape or state.dtype != torch.int64:
            raise DataError(
                f"state of the data streams: {state.dtype} {list(state.shape)} was saved, this run "
                f"needs int64 {list(shape)}; continue with the global_batch it was started with"
            )
        self._begin([Place(*row) for row in state.tolist()])

    def go_back(self, state: torch.Tensor) -> None:
        """To an earlier state of its own. Nothing is read before the next batch:
        perhaps none can.
        """
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
                    f"state of data stream {number}: there is no (epoch, row, offset) "
                    f"{tuple(place[:3])}; continue with the corpus, tokenizer, seed and "
                    "global_batch the run was started with"
                ) from None


def batch_hash(step: int, streams: Sequence[int], tokens: torch.Tensor) -> int:
    """The sum over streams, mod 2**64, of a 64-bit hash of (step, stream, its tokens).

    So the hashes of ranks and micro-batches add up, mod 2**64, to that of the whole batch.

    Args:
        step: of the run.
        streams: the number of the stream of each row.
        tokens: integers [len(streams), T].
    """
    rows = tokens.cpu().numpy().astype("<i8")
    total = 0
    for stream, row in zip(streams, rows, strict=True):
        content = np.array([step, stream], dtype="<i8").tobytes() + row.tobytes()
        total += int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    return total % 2**64
