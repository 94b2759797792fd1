"""The order of training: which rows of which groups a stream reads in an epoch, without reading
any.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lrattnres.data.errors import DataError

# Last words of the keys, so that no two permutations share one. Philox takes a missing word for 0.
_ROWS, _HELD_OUT = 1, 2


def permutation(length: int, *key: int) -> np.ndarray:
    """A permutation (int64) of 0..length-1, keyed on whole numbers >= 0.

    It sorts the raw output of Philox, which NumPy promises never to change, unlike
    `Generator.permutation`.
    """
    keys = np.random.Philox(np.random.SeedSequence(key)).random_raw(length)
    return np.argsort(keys, kind="stable")


def held_out_order(groups: int) -> np.ndarray:
    """The order (int64) in which groups are searched for held-out documents: one for all seeds,
    ranks and epochs.

    Permuted, so that the first held-out tokens come from all over the corpus and not from its first
    file.
    """
    return permutation(groups, 0, 0, 0, _HELD_OUT)


class Piece(NamedTuple):
    """Rows of one group in the order they are read."""

    group: int
    rows: np.ndarray


class Order:
    """Every row once an epoch, dealt to `streams` streams.

    In epoch e the groups are permuted by (seed, e), and the rows of each by (seed, e, group). Laid
    end to end they are cut into `streams` stretches that differ by one row at most: stream s reads
    stretch s. A group may lie across a cut; then neighbours read different rows of it. So there may
    be fewer groups than streams, and their sizes may differ.
    """

    def __init__(self, rows: np.ndarray, *, seed: int, streams: int):
        """`rows`: int64 [groups]. Raises DataError where there are fewer rows than streams."""
        self._sizes, self._seed, self._streams, self._total = rows, seed, streams, int(rows.sum())
        if self._total < streams:
            raise DataError(
                f"global_batch={streams}: as many streams share {self._total} training documents, "
                f"so some would be empty; write global_batch={self._total or 1} or less, "
                "or give more documents"
            )
        self._groups = lru_cache(maxsize=4)(
            self._groups_of
        )  # streams reach the end of an epoch at different times

    def length(self, stream: int) -> int:
        """Rows of a stream's stretch: the same in every epoch."""
        return self._begin(stream + 1) - self._begin(stream)

    def piece(self, epoch: int, stream: int, row: int) -> Piece:
        """What `stream` reads from number `row` of its stretch on, until its next group begins."""
        order, starts = self._groups(epoch)
        first = self._begin(stream) + row
        index = int(np.searchsorted(starts, first, side="right")) - 1
        group, begin = int(order[index]), int(starts[index])
        stop = min(int(self._sizes[group]), self._begin(stream + 1) - begin)
        return Piece(group, self._rows_of(epoch, group)[first - begin : stop])

    def _begin(self, stream: int) -> int:
        return self._total * stream // self._streams

    def _groups_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = permutation(len(self._sizes), self._seed, epoch)
        sizes = self._sizes[order]
        return order, np.cumsum(sizes) - sizes

    def _rows_of(self, epoch: int, group: int) -> np.ndarray:
        size = int(self._sizes[group])
        return (
            permutation(size, self._seed, epoch, group, _ROWS)
            if size > 1
            else np.zeros(size, dtype=np.int64)
        )
