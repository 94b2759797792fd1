"""A corpus of texts to shards of tokens: in parallel, resumable, the same bytes for any number of
workers.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from lrattnres.config import TokenizeConfig
from lrattnres.data.corpora import open_corpus
from lrattnres.data.documents import Corpus, Counts, EncodedCorpus
from lrattnres.data.errors import DataError
from lrattnres.data.shards import FORMAT, INDEX, Entry, Shard, write_shard
from lrattnres.data.tokenizers import build_tokenizer

MIB = 2**20
PLAN = "plan.json"


class Report(NamedTuple):
    """What a folder of shards holds; `written` tokens and `seconds` are those of this call."""

    shards: int
    documents: int
    tokens: int
    written: int
    seconds: float


def tokenize_corpus(config: TokenizeConfig) -> Report:
    """Writes the shards of `config.data` to the folder `config.out`, and its index last.

    A folder that an earlier call left unfinished is continued.

    Raises:
        DataError: the corpus cannot be had, has no document, or changes meanwhile; or the folder
            holds shards of another corpus, tokenizer or shard size.
    """
    out = Path(config.out).expanduser()
    corpus, tokenizer = open_corpus(config.data), build_tokenizer(config.tokenizer)
    plan = {
        "format": FORMAT,
        "source": corpus.fingerprint,
        "description": corpus.description,
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_name": tokenizer.name,
        "shard_mb": config.shard_mb,
    }
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        _continue(out, plan)
        begin = time.monotonic()
        runs = split_groups(corpus.sizes, config.shard_mb * MIB)
        bar = tqdm(
            desc=f"tokenizing {out}",
            total=int(corpus.sizes.sum()),
            unit="B",
            unit_scale=True,
            disable=None,
        )
        with bar:
            entries, written = _write_all(config, out, corpus, runs, plan, bar)
        shards = [Shard(out / entry.name) for entry in entries]
        documents = sum(int((np.diff(shard.offsets) > 0).sum()) for shard in shards)
        if not documents:
            counts = Counts.sum(Counts.of(corpus.group(n), 0.0) for n in range(len(corpus.rows)))
            raise DataError(
                f"data.root={config.data.root}: no document to tokenize: {counts}; write a smaller "
                "data.min_score, or another corpus"
            )
        for path in out.glob("shard_*.tokens"):  # read ahead of a token budget
            if path.name not in {entry.name for entry in entries}:
                path.unlink()
        _write_json(
            out / INDEX,
            plan | {"listing": corpus.listing, "shards": [asdict(entry) for entry in entries]},
        )
    seconds = time.monotonic() - begin
    return Report(len(entries), documents, sum(entry.tokens for entry in entries), written, seconds)


def split_groups(sizes: np.ndarray, target: int) -> list[range]:
    """Runs of groups, each closed by the group with which it reaches `target` bytes of text."""
    runs, begin, size = list[range](), 0, 0
    for group, more in enumerate(sizes.tolist()):
        size += more
        if size >= target or group == len(sizes) - 1:
            runs.append(range(begin, group + 1))
            begin, size = group + 1, 0
    return runs


def _write_all(
    config: TokenizeConfig,
    out: Path,
    corpus: Corpus,
    runs: list[range],
    plan: dict[str, Any],
    bar: tqdm[Any],
) -> tuple[list[Entry], int]:
    """The shards in order until they hold `max_tokens`, and the tokens this call wrote."""
    begin, entries, written, budget = time.monotonic(), list[Entry](), 0, config.data.max_tokens
    waiting: deque[tuple[range, bool, Future[Entry]]] = deque()
    pending = iter(enumerate(runs))
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(config.workers, spawn, _open_worker, (config, corpus.listing)) as pool:
        try:
            while budget is None or sum(entry.tokens for entry in entries) < budget:
                while len(waiting) < 2 * config.workers and (following := next(pending, None)):
                    number, groups = following
                    path = out / f"shard_{number:05d}.tokens"
                    there = _finished(path)
                    waiting.append(
                        (
                            groups,
                            there is None,
                            _done(there) if there else pool.submit(_work, path, groups, plan),
                        )
                    )
                if not waiting:
                    break
                groups, new, future = waiting.popleft()
                entries.append(future.result())
                written += entries[-1].tokens if new else 0
                bar.update(int(corpus.sizes[groups.start : groups.stop].sum()))
                bar.set_postfix_str(f"{written / (time.monotonic() - begin):,.0f} tokens/s")
        except BrokenProcessPool as error:
            raise DataError(
                f"{out}: a worker was killed, for want of memory perhaps; the same command "
                "continues"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return entries, written


_worker: EncodedCorpus | None = None


def _open_worker(config: TokenizeConfig, listing: dict[str, Any] | None) -> None:
    global _worker
    corpus = open_corpus(config.data, listing, fresh=True)
    _worker = EncodedCorpus(corpus, build_tokenizer(config.tokenizer))


def _work(path: Path, groups: range, plan: dict[str, Any]) -> Entry:
    """One shard, in a worker. Raises DataError where the corpus is not that of the plan."""
    assert _worker is not None
    if _worker.fingerprint != plan["source"]:
        raise DataError(
            f"{path}: the corpus changes while it is tokenized; start again when it is at rest"
        )
    header = plan | {"groups": [groups.start, groups.stop]}
    return write_shard(
        path, (_rows(_worker, number) for number in groups), header, _worker.tokenizer.vocabulary
    )


def _rows(documents: EncodedCorpus, number: int) -> Iterator[tuple[int, np.ndarray]]:
    group, nothing = documents.group(number), np.empty(0, dtype=np.int32)
    for row in range(len(group.hashes)):
        yield int(group.hashes[row]), group.tokens(row) if group.present[row] else nothing


def _finished(path: Path) -> Entry | None:
    """What an earlier call wrote, if it is whole."""
    try:
        return Shard(path).entry if path.exists() else None
    except DataError:
        return None


def _done(entry: Entry) -> Future[Entry]:
    future: Future[Entry] = Future()
    future.set_result(entry)
    return future


def _continue(out: Path, plan: dict[str, Any]) -> None:
    """Writes the plan to a new folder; compares it in an old one, and clears what was
    left there.
    """
    path = out / PLAN
    if path.exists():
        before = json.loads(path.read_bytes())
        changed = [
            f"{key}: {before.get(key)} then, {plan[key]} now"
            for key in plan
            if before.get(key) != plan[key]
        ]
        if changed:
            raise DataError(
                f"out={out}: holds shards of something else ({'; '.join(changed)}); write another "
                "folder"
            )
    elif any(out.glob("shard_*")):
        raise DataError(f"out={out}: holds shards, but no {PLAN}; write another folder")
    (out / INDEX).unlink(missing_ok=True)
    for partial in out.glob("*.partial"):
        partial.unlink()
    _write_json(path, plan)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"out={out}: another process writes there; wait for it, or write another folder"
            ) from None
        yield
