"""Shards of tokens: the same bytes however they were made, and none that is not whole."""

import dataclasses
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lrattnres.config import (
    ConfigError,
    CorpusName,
    DataConfig,
    TokenizeConfig,
    TokenizerConfig,
    TokenizerName,
)
from lrattnres.config.checks import checked
from lrattnres.data.corpora import open_documents
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.heldout import held_out_documents
from lrattnres.data.shards import Shard, token_dtype, write_shard
from lrattnres.data.streams import TrainStreams
from lrattnres.data.text import content_hash
from lrattnres.data.tokenizers import build_tokenizer
from lrattnres.data.tokenizing import split_groups, tokenize_corpus
from tests.data.serving import write_rows
from tests.paths import ROOT
from tests.programs import Program

BYTES = build_tokenizer(TokenizerName.bytes)
CL100K = build_tokenizer(TokenizerName.cl100k_base)


def config(
    folder: Path, out="tok", tokenizer=TokenizerName.cl100k_base, workers=1, **data
) -> TokenizeConfig:
    values = {
        "corpus": CorpusName.ultra_fineweb,
        "root": str(folder / "en"),
        "column": "content",
        "holdout": 0.1,
    }
    return TokenizeConfig(
        str(folder / out), workers, 1, DataConfig(**values | data), TokenizerConfig(tokenizer)
    )


def opened(folder: Path, tokenizer=CL100K, **data):
    return open_documents(
        DataConfig(corpus=CorpusName.tokens, root=str(folder), holdout=0.1, **data), tokenizer
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """About 4 MB of text in 24 row groups, with copies, empty rows and low scores; its shards in `tok`."""
    folder, choose = tmp_path_factory.mktemp("shards"), random.Random(0)
    for number in range(4):
        words = [
            " ".join(f"{choose.randrange(9999)} word" for _ in range(choose.randint(20, 1200)))
            for _ in range(140)
        ]
        texts = [
            None
            if row % 31 == 0
            else ""
            if row % 37 == 0
            else "copy"
            if row % 23 == 0
            else words[row]
            for row in range(140)
        ]
        scores = [choose.random() for _ in texts]
        write_rows(folder / "en" / f"part-{number}.parquet", texts, scores, row_group_size=25)
    tokenize_corpus(config(folder))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_the_shards_hold_what_streaming_reads(folder):
    streamed, shards = open_documents(config(folder).data, CL100K), opened(folder / "tok")
    assert (shards.rows == streamed.rows).all() and len(contents(folder / "tok")) > 4
    for number in range(len(shards.rows)):
        one, other = streamed.group(number), shards.group(number)
        assert (one.present == other.present).all() and (
            one.hashes[one.present] == other.hashes[one.present]
        ).all()
        for row in np.flatnonzero(one.present):
            assert (one.tokens(row) == other.tokens(row)).all()
    plain = {"context": 64, "streams": 8, "seed": 3, "holdout": 0.1}
    left, right = TrainStreams(streamed, **plain), TrainStreams(shards, **plain)
    for _ in range(100):
        assert torch.equal(left.next_batch(), right.next_batch())
    assert torch.equal(left.state(), right.state())
    held = [[h for h, _ in held_out_documents(documents, 0.1)] for documents in (streamed, shards)]
    assert held[0] == held[1] and len(held[0]) > 20


@pytest.mark.slow
def test_any_number_of_workers_and_any_kill_gives_the_same_bytes(folder):
    """A process that is killed twice is continued, and what it had finished is not made again."""
    whole = contents(folder / "tok")
    tokenize_corpus(config(folder, "three", workers=3))
    assert contents(folder / "three") == whole
    command = [
        ROOT / "scripts" / "tokenize_corpus.py",
        *(f"data.root={folder}/en", f"out={folder}/killed", "shard_mb=1", "data.holdout=0.1"),
    ]
    for shards in (1, 2):
        process = Program(command, new_session=True)
        while len(list((folder / "killed").glob("shard_*.tokens"))) < shards:
            assert process.poll() is None
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not (folder / "killed" / "index.json").exists()
    with pytest.raises(
        DataError, match=r"no index\.json; the corpus is not tokenized, or not to its end"
    ):
        opened(folder / "killed")
    before = {path: path.stat().st_mtime_ns for path in (folder / "killed").glob("shard_*.tokens")}
    report = tokenize_corpus(config(folder, "killed"))
    assert contents(folder / "killed") == whole and 0 < report.written < report.tokens
    assert all(path.stat().st_mtime_ns == made for path, made in before.items())


def test_another_corpus_tokenizer_or_command_is_refused(folder, tmp_path):
    with pytest.raises(
        DataError,
        match=r"holds shards of something else \(source: .*tokenizer_name: cl100k_base then, bytes now",
    ):
        tokenize_corpus(config(folder, tokenizer=TokenizerName.bytes, min_score=0.5))
    tokenize_corpus(config(folder))  # and the folder is as it was
    with pytest.raises(
        DataError,
        match=r"tokenized with cl100k_base .* this run uses bytes .*tokenizer=cl100k_base",
    ):
        opened(folder / "tok", BYTES)
    with pytest.raises(DataError, match=r"no index\.json"):
        opened(tmp_path)
    wrong = config(folder, corpus=CorpusName.tokens, skip_unreadable=True, min_score=0.1)
    with pytest.raises(ConfigError) as refusal:
        checked(dataclasses.replace(wrong, workers=0))
    assert len(refusal.value.errors) == 4


@pytest.mark.parametrize(
    "place",
    [
        "magic",
        "length",
        "header",
        "tokens",
        "offsets",
        "hashes",
        "checks",
        "groups",
        "cut",
        "longer",
    ],
)
def test_one_flipped_bit_is_noticed(folder, tmp_path, place):
    """In the tables when the shards are opened; in the tokens of a document when it is read, and in no other."""
    for path in (folder / "tok").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "shard_00001.tokens"
    content, shard = bytearray(path.read_bytes()), Shard(path)
    places = {"magic": 3, "length": 8, "header": 30}
    position = 16 + int.from_bytes(content[8:16], "little")
    for name, (kind, length) in shard.header["arrays"].items():
        position += -position % 64
        places[name] = position + np.dtype(kind).itemsize * (length // 2)
        position += np.dtype(kind).itemsize * length
    if place == "cut":
        del content[-1]
    elif place == "longer":
        content.append(0)
    else:
        content[places[place]] ^= 4
    path.write_bytes(content)
    if place != "tokens":
        with pytest.raises(DataError, match=r"shard_00001\.tokens: .*tokenize again"):
            opened(tmp_path)
        return
    documents, damaged = opened(tmp_path), 0
    for number in range(len(documents.rows)):
        group = documents.group(number)
        for row in np.flatnonzero(group.present):
            try:
                group.tokens(row)
            except DataError as error:
                damaged += 1
                assert "shard_00001.tokens: row" in str(error) and "is damaged" in str(error)
    assert damaged == 1


def test_shards_and_files_that_are_cut_short_while_they_are_used_are_named(folder, tmp_path):
    for path in (folder / "tok").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    documents = opened(tmp_path)
    number = len(documents.rows) - 1
    group, row = documents.group(number), int(np.flatnonzero(documents.group(number).present)[-1])
    group.tokens(row)
    last = max(tmp_path.glob("shard_*"))
    os.truncate(last, 4096)
    with pytest.raises(UnreadableError, match=rf"{last.name}: cut short: .*tokenize again"):
        group.tokens(row)
    last.unlink()
    with pytest.raises(UnreadableError, match=rf"{last.name}.*tokenize again"):
        documents.group(number)
    (tmp_path / "bin").mkdir()
    np.tile(np.arange(257, dtype="<u4"), 99).tofile(tmp_path / "bin" / "a.bin")
    documents = opened(tmp_path / "bin", BYTES)
    group = documents.group(0)
    os.truncate(tmp_path / "bin" / "a.bin", 4096)
    with pytest.raises(UnreadableError, match=r"a\.bin: cut short"):
        group.tokens(90)
    with pytest.raises(UnreadableError, match=r"a\.bin: 4,096 bytes, and .* when the run started"):
        documents.group(0)


def test_budget_and_copies(folder):
    documents = opened(folder / "tok")
    total = int((documents.sizes // 4).sum())
    for budget in (1, total // 3, total, 10 * total):
        some = opened(folder / "tok", max_tokens=budget)
        sizes = some.sizes // 4
        assert (some.rows == documents.rows[: len(some.rows)]).all()
        assert sizes.sum() >= min(budget, total) and (budget >= total or sizes[:-1].sum() < budget)
    copies = [
        h
        for number in range(len(documents.rows))
        for h in documents.group(number).hashes[documents.group(number).present]
    ]
    assert copies.count(content_hash("copy")) > 10
    single = opened(folder / "tok", deduplicate=True)
    once = [
        h
        for number in range(len(single.rows))
        for h in single.group(number).hashes[single.group(number).present]
    ]
    assert once == list(dict.fromkeys(copies)) and single.fingerprint != documents.fingerprint
    report = tokenize_corpus(config(folder, "budget", max_tokens=total // 3, workers=2))
    assert total // 3 <= report.tokens < total and report.shards == len(
        list((folder / "budget").glob("*.tokens"))
    )
    assert (
        opened(folder / "budget").rows == documents.rows[: len(opened(folder / "budget").rows)]
    ).all()


def test_small_vocabularies_take_two_bytes(folder, tmp_path):
    assert (token_dtype(257), token_dtype(65_536), token_dtype(65_537)) == ("<u2", "<u2", "<u4")
    tokenize_corpus(config(folder, "bytes", TokenizerName.bytes, min_score=0.7))
    assert Shard(folder / "bytes" / "shard_00000.tokens").dtype == "<u2"
    documents = opened(folder / "bytes", BYTES)
    assert (
        0
        < sum(documents.group(n).present.sum() for n in range(len(documents.rows)))
        < 0.4 * documents.rows.sum()
    )
    tokens = np.array([256, 1, 2, 255])
    entry = write_shard(
        tmp_path / "a", [[(7, tokens), (8, tokens[:0])], [], [(9, tokens[:1])]], {}, 257
    )
    shard = Shard(tmp_path / "a", entry)
    assert [shard.open()(row).tolist() for row in range(3)] == [[256, 1, 2, 255], [], [256]]
    assert shard.groups.tolist() == [2, 0, 1] and shard.hashes.tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("sizes", "expected"), [([5], [(0, 1)]), ([3, 3, 9, 1], [(0, 2), (2, 3), (3, 4)]), ([], [])]
)
def test_groups_are_cut_into_shards(sizes, expected):
    assert [
        (run.start, run.stop) for run in split_groups(np.array(sizes, dtype=np.int64), 5)
    ] == expected


def test_headerless_files_can_be_read(tmp_path):
    """Documents that a file tears apart are two; separators open the others."""
    first, second = [256, 5, 6, 256, 7], [8, 9, 256, 10, 256]
    for name, tokens in (("a.bin", first), ("b.bin", second)):
        np.array(tokens, dtype="<u4").tofile(tmp_path / name)
    documents = opened(tmp_path, BYTES)
    assert documents.rows.tolist() == [2, 3]
    found = [
        documents.group(number).tokens(row).tolist()
        for number in range(2)
        for row in range(documents.rows[number])
    ]
    assert found == [[256, 5, 6], [256, 7], [256, 8, 9], [256, 10], [256]]
    streams = TrainStreams(documents, context=4, streams=2, seed=0)
    assert streams.next_batch().shape == (2, 5)
    with pytest.raises(DataError, match=r"no data\.max_tokens"):
        opened(tmp_path, BYTES, max_tokens=3)
    fingerprint = documents.fingerprint
    np.array([8, 9, 10, 256, 256], dtype="<u4").tofile(tmp_path / "b.bin")
    assert opened(tmp_path, BYTES).fingerprint != fingerprint
    np.array([256, 257], dtype="<u4").tofile(tmp_path / "b.bin")
    with pytest.raises(DataError, match=r"b\.bin: token 257 at position 1, and bytes has 257"):
        opened(tmp_path, BYTES)
    (tmp_path / "b.bin").write_bytes(b"12345")
    with pytest.raises(DataError, match=r"b\.bin: 5 bytes"):
        opened(tmp_path, BYTES)


def test_the_index_says_what_was_tokenized(folder):
    index = json.loads((folder / "tok" / "index.json").read_text())
    assert (
        index["tokenizer_name"] == "cl100k_base"
        and "560 rows in 24 row groups of 4 files" in index["description"]
    )
    assert [file["path"] for file in index["listing"]["files"]] == [
        f"part-{number}.parquet" for number in range(4)
    ]
