"""Held-out windows: the same tokens for any seed, number of ranks and batch size.

Groups are searched in one fixed order until there are tokens enough, so not the whole corpus is
read. Where reading a group is work, what was found is kept as a shard in the cache folder.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from lrattnres.data.documents import Documents, held_out
from lrattnres.data.errors import DataError
from lrattnres.data.order import held_out_order
from lrattnres.data.packing import IGNORE
from lrattnres.data.shards import Shard, token_dtype, write_shard
from lrattnres.data.stores import ReadingPool
from lrattnres.data.tokenizers import Tokenizer


def held_out_documents(
    documents: Documents, holdout: float, workers: int = 0
) -> Iterator[tuple[int, np.ndarray]]:
    """Content hash and tokens (integers [tokens]) of every held-out document, in a fixed order.

    Args:
        documents: the corpus, tokenized.
        holdout: the share of documents that is held out.
        workers: threads that read ahead; 0: groups are read when they are asked for.
    """
    groups = held_out_order(len(documents.rows)).tolist()

    def search(number: int) -> list[tuple[int, np.ndarray]]:
        group = documents.group(number)
        rows = np.flatnonzero(group.present & held_out(group.hashes, holdout)).tolist()
        return [(int(group.hashes[row]), group.tokens(row)) for row in rows]

    if not workers:
        for number in groups:
            yield from search(number)
        return
    pool = ReadingPool(workers)
    waiting: deque[Future[list[tuple[int, np.ndarray]]]] = deque()
    try:
        for number in groups:
            waiting.append(pool.submit(search, number))
            if len(waiting) > 2 * workers:
                yield from waiting.popleft().result()
        for future in waiting:
            yield from future.result()
    finally:
        pool.stop()


def held_out_windows(
    parts: Iterator[np.ndarray], *, context: int, tokens: int, batch: int
) -> Iterator[torch.Tensor]:
    """Documents packed in the given order, with stride `context`.

    There are exactly min(tokens, available) targets in all, for any `batch`; unused positions at
    the end of the last window hold IGNORE. Warns if there are fewer than `tokens`.

    Args:
        parts: the tokens of each document.
        context: targets a window.
        tokens: targets in all.
        batch: windows at a time.

    Returns:
        int64 [<= batch, context + 1] each.

    Raises:
        DataError: there is no document.
    """
    first = next(parts, None)
    if first is None:
        raise DataError(
            "data.holdout: no document is held out; write a larger share, or give more documents"
        )
    return _batched(_pack(first, parts, context, tokens), batch)


def kept_held_out(
    folder: Path,
    key: tuple[Any, ...],
    tokens: int,
    found: Iterator[tuple[int, np.ndarray]],
    tokenizer: Tokenizer,
) -> Iterator[np.ndarray]:
    """Documents until they hold more than `tokens` targets, kept as a shard in the cache.

    What an earlier call kept under the same `key` is used, if it is long enough.

    Args:
        folder: the cache.
        key: of the corpus, the tokenizer and the share.
        tokens: targets that are needed.
        found: content hash and tokens of every held-out document, in order.
        tokenizer: which made the tokens.

    Returns:
        The tokens of each document.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
    path = folder / f"heldout-{digest}.tokens"
    shard: Shard | None = None
    if path.exists():
        try:
            shard = Shard(path)
        except DataError as damage:
            warnings.warn(f"{damage}; searched again", stacklevel=2)
    if shard is None or not (shard.header["complete"] or shard.entry.tokens > tokens):
        shard = _search(path, tokens, found, tokenizer)
    return map(shard.open(), range(shard.entry.rows))


def _search(
    path: Path, tokens: int, found: Iterator[tuple[int, np.ndarray]], tokenizer: Tokenizer
) -> Shard:
    gathered, count, dtype = list[tuple[int, np.ndarray]](), 0, token_dtype(tokenizer.vocabulary)
    with tqdm(
        desc="searching held-out tokens", total=tokens, unit_scale=True, leave=False, disable=None
    ) as bar:
        for content, part in found:
            gathered.append((content, part.astype(dtype)))
            count += len(part)
            bar.update(len(part))
            if count > tokens:
                break
    header = {"tokenizer": tokenizer.fingerprint, "complete": count <= tokens}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_shard(path, [gathered], header, tokenizer.vocabulary)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error}); write data.cache=FOLDER with room for it"
        ) from error
    return Shard(path)


def _pack(
    packed: np.ndarray, parts: Iterator[np.ndarray], context: int, tokens: int
) -> Iterator[np.ndarray]:
    """Windows [context + 1] of the concatenated parts, until they hold `tokens` targets."""
    left = tokens
    while True:
        while left > 0 and len(packed) > min(context, left):
            yield _window(packed[: min(context, left) + 1], context)
            left -= min(context, left)
            packed = packed[context:]
        if left == 0:
            return
        part = next(parts, None)
        if part is None:
            break
        packed = np.concatenate([packed, part])
    if len(packed) > 1:
        yield _window(packed, context)
        left -= len(packed) - 1
    warnings.warn(
        f"{tokens:,} held-out tokens are asked for (evaluation.tokens, diagnostics_tokens), and "
        f"only {tokens - left:,} are there: all are used; a larger data.holdout gives more",
        stacklevel=2,
    )


def _window(tokens: np.ndarray, context: int) -> np.ndarray:
    return np.pad(tokens.astype(np.int64), (0, context + 1 - len(tokens)), constant_values=IGNORE)


def _batched(windows: Iterator[np.ndarray], batch: int) -> Iterator[torch.Tensor]:
    waiting: list[np.ndarray] = []
    for window in windows:
        waiting.append(window)
        if len(waiting) == batch:
            yield torch.from_numpy(np.stack(waiting))
            waiting = []
    if waiting:
        yield torch.from_numpy(np.stack(waiting))
