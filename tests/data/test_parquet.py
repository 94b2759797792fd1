"""Streaming parquet from folders and a web server that misbehaves: the tokens are the local ones."""

import os
import random
import threading
import time
from contextlib import contextmanager
from email.utils import formatdate

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from lrattnres.config import (
    CorpusName,
    DataConfig,
    TokenizeConfig,
    TokenizerConfig,
    TokenizerName,
)
from lrattnres.data import stores
from lrattnres.data.corpora import open_corpus, open_documents
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.heldout import held_out_documents, kept_held_out
from lrattnres.data.listing import differences
from lrattnres.data.streams import TrainStreams
from lrattnres.data.tokenizers import build_tokenizer
from lrattnres.data.tokenizing import tokenize_corpus
from tests.data.serving import serving, write_rows

BYTES = build_tokenizer(TokenizerName.bytes)
CL100K = build_tokenizer(TokenizerName.cl100k_base)
CL100K_CONFIG = TokenizerConfig(TokenizerName.cl100k_base)


@pytest.fixture
def folder(tmp_path):
    """Five files of very unequal size, one in a subfolder; every text is a word of its own, repeated."""
    for number, rows in enumerate([1, 60, 7, 33, 200]):
        choose = random.Random(number)
        texts = [f"w{number}x{row} " * choose.randint(1, 30) for row in range(rows)]
        write_rows(
            tmp_path / "en" / ("deep" if number == 2 else "") / f"part-{number}.parquet", texts
        )
    return tmp_path / "en"


@pytest.fixture
def impatient(monkeypatch):
    """Pauses between tries are not what is tested."""
    monkeypatch.setattr(stores, "LONGEST_PAUSE", 0.01)


def config(root, **options) -> DataConfig:
    values = {
        "corpus": CorpusName.ultra_fineweb,
        "column": "content",
        "holdout": 0.2,
        "timeout": 0.4,
        "retries": 5,
    }
    return DataConfig(root=str(root), **values | options)


def opened(root, tokenizer=BYTES, **options):
    return open_documents(config(root, **options), tokenizer)


def streams_of(documents, **options) -> TrainStreams:
    return TrainStreams(
        documents, **{"context": 32, "streams": 6, "seed": 1, "holdout": 0.2} | options
    )


def batches(documents, steps=40, **options) -> torch.Tensor:
    streams = streams_of(documents, **options)
    found = torch.stack([streams.next_batch() for _ in range(steps)])
    streams.close()
    return found


ERRORS = ["drop", "stall", "error", "half", "short", "later", None]


@pytest.mark.parametrize("workers", [0, 3])
def test_a_server_that_drops_stalls_fails_and_truncates_gives_the_local_stream(
    folder, impatient, workers
):
    expected = batches(opened(folder))
    with serving(folder.parent) as server:
        choose = random.Random(workers)
        server.retry_after = "0"
        server.errors = [*ERRORS, *choose.choices(ERRORS, [3, 1, 3, 3, 3, 0, 8], k=25)]
        documents = opened(f"{server.address}/en", retries=20)
        assert documents.fingerprint == opened(folder).fingerprint
        assert torch.equal(batches(documents, workers=workers), expected)
        assert not server.errors


@contextmanager
def every_root(folder, monkeypatch):
    """The same folder as five stores: the roots, the local one first, and the server."""
    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*.parquet"):
        memory.pipe(f"/bucket/en/{path.relative_to(folder)}", path.read_bytes())
    with serving(folder.parent) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        remote = [f"{server.address}/en/", "memory://bucket/en", "hf://datasets/owner/name/en"]
        yield [folder, f"file://{folder}", *remote], server
    memory.rm("/bucket", recursive=True)


def test_every_prefix_gives_the_same_order(folder, monkeypatch):
    write_rows(folder / "http & co.parquet", ["a name that a listing of links may get wrong"])
    with every_root(folder, monkeypatch) as (roots, _):
        expected = batches(opened(folder), 10)
        for root in roots:
            documents = opened(root)
            assert documents.fingerprint == opened(folder).fingerprint, root
            assert torch.equal(batches(documents, 10), expected), root
    with pytest.raises(DataError, match=r"data\.root=hf://models/x.*hf://datasets/OWNER"):
        opened("hf://models/x/y")
    with pytest.raises(DataError, match=r"data\.root=none://.*none"):
        opened("none://bucket")


HIDDEN = [
    ".ipynb_checkpoints/b-checkpoint.parquet",
    "deep/_temporary/c.parquet",
    "._d.parquet",
    "_e.parquet",
]


def test_hidden_files_are_left_out_of_every_store_and_counted(folder, monkeypatch):
    expected = opened(folder).fingerprint
    for name in HIDDEN:
        write_rows(folder / name, ["a copy"])
    with every_root(folder, monkeypatch) as (roots, _):
        for root in roots:
            with pytest.warns(UserWarning, match=r"data\.root=.*: 4 files left out.*_e\.parquet"):
                assert opened(root).fingerprint == expected, root


def test_what_a_run_has_pinned_is_not_listed_again(folder, monkeypatch):
    """But for a local folder, which shows at once what changed; not even that for another rank."""
    before = opened(folder)
    write_rows(folder / "part-9.parquet", ["new"])
    assert opened(folder).fingerprint != before.fingerprint
    told = open_documents(config(folder), BYTES, before.listing, fresh=True)
    assert told.fingerprint == before.fingerprint
    again = open_documents(config(folder), BYTES, before.listing)
    assert again.fingerprint != before.fingerprint
    with every_root(folder, monkeypatch) as (roots, server):
        for root in roots[2:]:
            pinned = opened(root).listing
            server.requests.clear()
            again = open_documents(config(root), BYTES, pinned)
            assert not server.requests and again.listing == pinned, root
            assert torch.equal(batches(again, 10), batches(opened(folder), 10)), root
        assert pinned["revision"] == "a" * 40
        reads = [path for _, path in server.requests if not path.startswith("/api")]
        assert reads and all("a" * 40 in path for path in reads)


def test_retry_after_is_obeyed_and_no_longer_than_a_read_may_take(folder, monkeypatch):
    monkeypatch.setattr(stores, "LONGEST_PAUSE", 0.01)
    with serving(folder.parent) as server:
        documents = opened(f"{server.address}/en", retries=4)
        soon = formatdate(time.time() + 2, usegmt=True)
        for group, (asked, least) in enumerate([(soon, 0.9), ("1", 1.0), ("no date", 0.0)]):
            server.errors, server.retry_after = ["later"], asked
            begin = time.monotonic()
            documents.group(group)
            assert not server.errors
            assert least <= time.monotonic() - begin < 3
        server.errors, server.retry_after, begin = ["later"], "3600", time.monotonic()
        with pytest.raises(UnreadableError, match=r"unreadable after 1 tries.*status 429"):
            documents.group(len(documents.rows) - 1)
        assert time.monotonic() - begin < 3


def test_what_stays_unreadable_is_named_or_skipped_and_counted(folder, impatient):
    with serving(folder.parent) as server:
        documents = opened(f"{server.address}/en", retries=2)
        server.broken = {"part-3.parquet"}
        with pytest.raises(
            UnreadableError,
            match=r"en/part-3\.parquet: unreadable after 3 tries in \d+ s.*500.*data\.retries",
        ):
            batches(documents)
        skipping = streams_of(documents, skip_unreadable=True, workers=2, ahead=4)
        rows = torch.cat([skipping.next_batch()[:, :-1] for _ in range(150)], dim=1)
        skipping.close()
        text = "".join(BYTES.decode(row) for row in rows)
        assert "w3x" not in text and all(f"w{number}x" in text for number in (0, 1, 2, 4))
        state = skipping.state()
        assert 0 < skipping.skipped == int(state[:, 3].sum())
        resumed = streams_of(documents, skip_unreadable=True)
        resumed.load_state(state)
        assert torch.equal(resumed.state(), state) and torch.equal(
            resumed.next_batch(), skipping.next_batch()
        )
        skipping.close()
        server.broken = set()
        server.ranges = False
        with pytest.raises(DataError, match="does not serve ranges"):
            opened(f"{server.address}/en")
        with pytest.raises(DataError, match="status 404"):
            opened(f"{server.address}/none")


@pytest.mark.parametrize("skip", [False, True])
def test_a_process_does_not_wait_for_tries_that_nobody_needs(folder, skip):
    """A reader in a pause of a minute lets go at once when the streams are closed, and does not skip on and on."""
    with serving(folder.parent) as server:
        streams = streams_of(
            opened(f"{server.address}/en", retries=50), workers=2, ahead=4, skip_unreadable=skip
        )
        streams.next_batch()
        server.broken = {path.name for path in folder.rglob("*.parquet")}
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("data")]
        time.sleep(0.5)
        streams.close()
        begin = time.monotonic()
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - begin < 5 and not any(thread.is_alive() for thread in threads)


def test_after_a_failure_the_streams_are_where_they_were(folder, impatient):
    for workers in (0, 2):
        with serving(folder.parent) as server:
            expected = batches(opened(folder))
            streams = streams_of(
                opened(f"{server.address}/en", retries=0), workers=workers, ahead=4
            )
            server.broken = {path.name for path in folder.rglob("*.parquet")}
            found = []
            with pytest.raises(UnreadableError):
                for _ in range(40):
                    found.append(streams.next_batch())
            state = streams.state()
            server.broken = set()
            other = streams_of(opened(folder))
            other.load_state(state)
            for step in range(len(found), 40):
                batch = streams.next_batch()
                assert torch.equal(batch, expected[step]) and torch.equal(other.next_batch(), batch)
            streams.close()


def test_a_changed_corpus_says_what_differs(folder):
    before = opened(folder)
    (folder / "part-0.parquet").unlink()
    write_rows(folder / "part-9.parquet", ["new"])
    table = parquet.read_table(folder / "part-1.parquet")
    parquet.write_table(
        table.take(list(range(len(table)))[::-1]), folder / "part-1.parquet", row_group_size=20
    )
    after = opened(folder)
    assert before.fingerprint != after.fingerprint
    gone, new, changed = differences(before.listing, after.listing)
    assert gone == "part-0.parquet: gone" and new == "part-9.parquet: new"
    assert changed.startswith("part-1.parquet: changed") and "footer" in changed
    with pytest.raises(
        UnreadableError, match=r"part-1\.parquet: (is not the file any more|refused: it ends after)"
    ):
        before.group(2)
    with pytest.raises(UnreadableError, match=r"part-0\.parquet: refused"):
        before.group(1)


def test_a_file_replaced_in_the_middle_of_a_run_is_noticed(folder):
    """Even one of the same size: its footer is not the one that was listed."""
    documents = opened(folder)
    path = folder / "part-4.parquet"
    changed = path.read_bytes().replace(b"parquet-cpp-arrow", b"parquet-cpp-arroW")
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    with pytest.raises(UnreadableError, match=r"part-4\.parquet: is not the file any more"):
        documents.group(len(documents.rows) - 1)


def test_scores_files_and_columns(folder, tmp_path):
    texts = [f"text {number}" for number in range(8)]
    write_rows(
        tmp_path / "s" / "a.parquet", texts, [0.1, 0.5, 0.9, None, float("nan"), 0.5, 0.49, 1.0]
    )
    write_rows(tmp_path / "s" / "b.parquet", ["other"])
    documents = opened(tmp_path / "s", min_score=0.5, max_files=1)
    group = documents.group(0)
    assert [BYTES.decode(group.tokens(row)[1:]) for row in np.flatnonzero(group.present)] == [
        texts[i] for i in (1, 2, 5, 7)
    ]
    assert documents.fingerprint != opened(tmp_path / "s", max_files=1).fingerprint
    with pytest.raises(
        DataError,
        match=r"no column text; the columns are content \(string\), score \(double\), source "
        r"\(string\); write data\.column= one of content, source",
    ):
        opened(tmp_path / "s", column="text")
    with pytest.raises(DataError, match=r"column score holds double, not text"):
        opened(tmp_path / "s", column="score")
    with pytest.raises(DataError, match=r"holds no file that ends with \.parquet"):
        opened(tmp_path / "nothing")
    write_rows(tmp_path / "all" / "ultrafineweb_zh" / "a.parquet", texts)
    with pytest.raises(DataError, match=r"ultrafineweb_zh/a\.parquet is not of the English part"):
        opened(tmp_path / "all")


@pytest.mark.parametrize("size", [0, 3, 100, 0.5, 0.99])
def test_a_file_cut_short_is_named(folder, size):
    path = folder / "part-4.parquet"
    os.truncate(path, size if size >= 1 or size == 0 else int(path.stat().st_size * size))
    with pytest.raises(UnreadableError, match=r"part-4\.parquet: no parquet file, or cut short"):
        opened(folder)


def test_a_damaged_page_is_named(folder):
    write_rows(
        folder / "part-4.parquet",
        [f"text {i}" for i in range(50)],
        write_page_checksum=True,
        compression="gzip",
    )
    documents = opened(folder)
    content = bytearray((folder / "part-4.parquet").read_bytes())
    content[
        parquet.read_metadata(folder / "part-4.parquet").row_group(0).column(0).data_page_offset
        + 40
    ] ^= 0xFF
    (folder / "part-4.parquet").write_bytes(content)
    with pytest.raises(UnreadableError, match=r"part-4\.parquet, row group 0.*damaged"):
        list(held_out_documents(documents, 1.0))


BITING = [
    "<|endoftext|> and <|fim_prefix|> are text",
    "nul \x00 and bell \x07",
    "one\r\ntwo\r\n",
    "שלום \u202e مرحبا \u2028 line",
    " \n ",
    "\ufeffmark \ufffd 😀" * 3,
    "",
    None,
    "   ",
]


@pytest.mark.parametrize("giant", [200_000, pytest.param(5_000_000, marks=pytest.mark.slow)])
def test_texts_that_bite_come_back_whole(tmp_path, giant):
    texts = [*BITING, "x" * giant]
    write_rows(tmp_path / "a.parquet", texts, row_group_size=3)
    documents = opened(tmp_path, CL100K)
    found = [tokens for _, tokens in held_out_documents(documents, 1.0)]
    assert sorted(CL100K.decode(tokens[1:]) for tokens in found) == sorted(
        text for text in texts if text
    )
    for tokens in found:
        assert tokens[0] == 100_257 and (tokens[1:] < 100_257).all()


KINDS = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
    pa.json_(pa.string()),
]
TEXTS = [None, "", '"one"', '"zwei é"', '"one"']


def spelled(documents):
    groups = map(documents.group, range(len(documents.rows)))
    return [
        BYTES.decode(group.tokens(row)[1:])
        for group in groups
        for row in np.flatnonzero(group.present)
    ]


def read_three_ways(place, column="text", **options):
    """The texts that a corpus of files, streaming and tokenizing find in a folder of parquet."""
    cache, root = str(place.parent / "cache"), str(place)
    prepared = open_corpus(DataConfig(CorpusName.files, root, column=column, cache=cache))
    yield [prepared.text(row) for row in range(len(prepared))]
    yield spelled(opened(place, column=column, **options))
    data = config(place, column=column, **options)
    out = place.parent / "tok"
    tokenize_corpus(TokenizeConfig(str(out), 1, 1, data, TokenizerConfig(TokenizerName.bytes)))
    yield spelled(open_documents(DataConfig(CorpusName.tokens, str(out), holdout=0.2), BYTES))


def test_every_kind_of_text_is_read_the_same_three_ways(tmp_path):
    """A file of each, and one of nulls; each has a struct with a part of the column's name."""
    (tmp_path / "in").mkdir()
    other = pa.array([{"text": "not this", "url": "nor this"}] * len(TEXTS))
    for number, kind in enumerate([*KINDS, pa.null()]):
        values = pa.array(TEXTS, kind if kind == pa.string_view() else pa.string())
        if isinstance(kind, pa.BaseExtensionType):
            values = pa.ExtensionArray.from_storage(kind, values)
        values = values.cast(kind) if kind != pa.null() else pa.nulls(len(TEXTS))
        table = pa.table({"meta": other, "text": values, "id": range(len(TEXTS))})
        parquet.write_table(table, tmp_path / "in" / f"{number}.parquet")
    for found in read_three_ways(tmp_path / "in"):
        assert found == ['"one"', '"zwei é"', '"one"'] * len(KINDS)


STRUCT = pa.struct([("text", pa.string()), ("url", pa.string())])
UNFIT = [
    ([("meta", STRUCT), ("id", pa.int64())], "no column text; the columns are meta \\(struct"),
    ([("text", STRUCT)], "column text holds struct<text: string, url: string>, not text"),
    ([("text", pa.binary()), ("a", pa.string())], "text holds binary, not text; .* one of a$"),
    ([("text", pa.dictionary(pa.int8(), pa.float64()))], "text holds d(ouble|ictionary<.*), not"),
    ([("text", pa.list_(pa.string()))], "column text holds list<.*, not text"),
    ([("text", pa.string()), ("text", pa.string())], "2 columns of the name text"),
    ([("text", pa.string())], "and not one (row|text)"),
]


@pytest.mark.parametrize(("fields", "message"), UNFIT)
def test_what_cannot_be_read_is_refused_the_same_three_ways(tmp_path, fields, message):
    (tmp_path / "in").mkdir()
    parquet.write_table(pa.schema(fields).empty_table(), tmp_path / "in" / "a.parquet")
    three = read_three_ways(tmp_path / "in")
    with pytest.raises(DataError, match=message):
        next(three)
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "in", column="text")
    data = config(tmp_path / "in", column="text")
    with pytest.raises(DataError, match=message):
        tokenize_corpus(TokenizeConfig(str(tmp_path / "t"), 1, 1, data, CL100K_CONFIG))


def test_a_corpus_without_a_text_is_refused_with_what_is_in_it(tmp_path):
    write_rows(tmp_path / "in" / "a.parquet", ["", None, "a", "b"], [1.0, 1.0, 0.1, None])
    data = config(tmp_path / "in", min_score=0.5)
    counts = r"4 rows, 2 of them empty, 2 below data\.min_score, 0 held out"
    with pytest.raises(DataError, match=f"no document to train on: {counts}"):
        streams_of(open_documents(data, BYTES), streams=2)
    for _ in range(2):  # a second call finds the shards of the first
        with pytest.raises(DataError, match=f"no document to tokenize: {counts}"):
            tokenize_corpus(TokenizeConfig(str(tmp_path / "t"), 1, 1, data, CL100K_CONFIG))
    with pytest.raises(DataError, match=r"below data\.min_score"):
        write_rows(tmp_path / "text" / "a.parquet", ["a"], [0.1])
        streams_of(opened(tmp_path / "text", min_score=0.5), streams=1)
    table = pa.table({"content": ["a"], "score": ["high"]})
    parquet.write_table(table, tmp_path / "in" / "a.parquet")
    with pytest.raises(DataError, match="column score holds string, not numbers"):
        open_documents(data, BYTES)


def test_skipped_rows_are_told_at_the_start(tmp_path):
    write_rows(tmp_path / "a.parquet", ["", None, "a", "b", "c"], [1.0, 1.0, 0.1, 0.9, 0.9])
    documents = opened(tmp_path, min_score=0.5)
    streams = streams_of(documents, streams=1, holdout=0.0)
    told = "2 empty and 1 below data.min_score of the 5 rows read so far"
    assert documents.skipped == told
    for _ in range(40):
        streams.next_batch()
    epoch, row, *_, skipped = streams.state()[0].tolist()
    assert 3 * epoch <= skipped <= 3 * epoch + min(row, 3) and streams.skipped_rows == skipped


def test_bytes_that_are_no_text_are_refused(tmp_path):
    wrong = (
        pa.array([b"fine", b"\xed\xa0\x80"]).cast(pa.binary()).view(pa.string())
    )  # half a surrogate pair
    parquet.write_table(pa.table({"content": wrong}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row group 0, row 1: not UTF-8"):
        list(held_out_documents(opened(tmp_path), 1.0))
    parquet.write_table(pa.table({"content": pa.array([1, 2])}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: column content holds int64, not text"):
        opened(tmp_path)


def test_the_held_out_set_is_searched_once_and_the_same_for_any_threads(folder, tmp_path):
    documents = opened(folder)
    whole = list(held_out_documents(documents, 0.2))
    assert [h for h, _ in held_out_documents(documents, 0.2, workers=3)] == [h for h, _ in whole]
    expected = np.concatenate([tokens for _, tokens in whole])

    def kept(tokens, found):
        return np.concatenate(
            list(kept_held_out(tmp_path / "cache", ("key",), tokens, iter(found), BYTES))
        )

    first = kept(300, whole)
    assert 300 < len(first) < len(expected) and (first == expected[: len(first)]).all()
    assert (kept(200, []) == first).all()  # the file is long enough
    assert (kept(10**6, whole) == expected).all()
    assert (kept(10**9, []) == expected).all()  # it is complete
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="cut short.*searched again"):
        assert (kept(10**6, whole) == expected).all()


def test_streams_in_one_group_share_it(folder):
    corpus = open_corpus(config(folder))
    assert corpus.group(3) is not corpus.group(4)
    one = corpus.group(3)
    assert corpus.group(3) is one
