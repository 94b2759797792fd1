"""Corpora from real files: what is read, what is refused, and the cache."""

import gzip
import json
import os
import random
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from lrattnres.config import CorpusName, DataConfig, TokenizerName
from lrattnres.data.corpora import cache_folder, open_corpus
from lrattnres.data.docstrings import read_docstrings
from lrattnres.data.documents import EncodedCorpus, held_out
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.heldout import held_out_documents
from lrattnres.data.streams import TrainStreams
from lrattnres.data.text import content_hash
from lrattnres.data.tokenizers import build_tokenizer
from tests.programs import Program

BITING = [
    "<|endoftext|> in a text",
    "nul \x00 and bell \x07",
    "one\r\ntwo\r\n",
    "שלום \u202e مرحبا \u2028 line separator",
    " \n ",
    "x" * 5_000_000,
]


@pytest.fixture
def opened(tmp_path):
    """Opens a corpus below tmp_path/in with its cache in tmp_path/cache."""
    (tmp_path / "in").mkdir()

    def open_it(root="in", corpus="files", column="text"):
        root = None if root is None else root if "://" in root else str(tmp_path / root)
        cache = str(tmp_path / "cache")
        return open_corpus(
            DataConfig(
                corpus=CorpusName[corpus], root=root, column=column, holdout=0.5, cache=cache
            )
        )

    return open_it


def texts(corpus):
    return [corpus.text(index) for index in range(len(corpus))]


def json_lines(values, key="text"):
    return b"".join(
        json.dumps({"id": number, key: value}).encode() + b"\n"
        for number, value in enumerate(values)
    )


def write_parquet(path, values, column="text", **options):
    parquet.write_table(pa.table({"id": list(range(len(values))), column: values}), path, **options)


WRITERS = {
    ".jsonl": lambda path, values: path.write_bytes(json_lines(values)),
    ".jsonl.gz": lambda path, values: path.write_bytes(gzip.compress(json_lines(values))),
    ".jsonl.zst": lambda path, values: path.write_bytes(zstandard.compress(json_lines(values))),
    ".parquet": lambda path, values: write_parquet(path, values, row_group_size=2),
}


@pytest.mark.parametrize("ending", WRITERS)
def test_every_format_keeps_texts_that_bite(opened, tmp_path, ending):
    WRITERS[ending](tmp_path / "in" / f"a{ending}", ["first", None, "", *BITING])
    corpus = opened()
    assert texts(corpus) == ["first", *BITING]
    assert corpus.description == "files: 7 documents, 5.0 MB, 2 empty rows skipped"


def test_one_text_file_is_one_document(opened, tmp_path):
    for number, text in enumerate(BITING):
        (tmp_path / "in" / f"{number}.txt").write_bytes(text.encode())
    (tmp_path / "in" / "empty.txt").touch()
    assert texts(opened()) == BITING


def test_lone_surrogates_become_the_replacement_character(opened, tmp_path):
    (tmp_path / "in" / "a.jsonl").write_bytes(rb'{"text": "a\ud800b \ud83d\ude00 \udfff"}')
    assert texts(opened()) == ["a\ufffdb 😀 \ufffd"]


def test_files_come_in_the_order_of_their_relative_paths(opened, tmp_path):
    for name in ("b.txt", "a/z.txt", "a.txt", "B.txt"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    assert texts(opened()) == sorted(["b.txt", "a/z.txt", "a.txt", "B.txt"])
    assert texts(opened("in/**/?.txt")) == ["B.txt", "a.txt", "a/z.txt", "b.txt"]
    assert texts(opened("in/a.txt")) == ["a.txt"]


def test_concatenated_frames_are_read_to_the_end(opened, tmp_path):
    one, two = json_lines(["one"]), json_lines(["two"])
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(one) + gzip.compress(two))
    (tmp_path / "in" / "b.jsonl.zst").write_bytes(zstandard.compress(one) + zstandard.compress(two))
    assert texts(opened()) == ["one", "two", "one", "two"]


def test_unknown_endings_are_named_once(opened, tmp_path):
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "in" / "b.csv").write_text("1,2")
    (tmp_path / "in" / "c.md").write_text("# no")
    with pytest.warns(UserWarning, match=r"skipped.*b\.csv, .*c\.md") as caught:
        assert texts(opened()) == ["text"]
    assert len(caught) == 1
    with pytest.raises(DataError, match=r"data\.root=.*b\.csv: unknown ending.*\.txt"):
        opened("in/b.csv")


def test_hidden_files_are_left_out_and_counted(opened, tmp_path):
    kept = ["a.txt", "b/c.txt"]
    hidden = [".git/x.txt", "._a.txt", "b/.cache/y.txt", "b/_z.txt", "_old/a.txt", ".DS_Store"]
    for name in kept + hidden:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    with pytest.warns(UserWarning, match=r"data\.root=.*in: 5 files left out.*_z\.txt") as caught:
        assert texts(opened()) == kept
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="2 files left out"):
        assert texts(opened("in/**/*.txt")) == kept
    assert texts(opened("in/b/_*.txt")) == ["b/_z.txt"]
    assert texts(opened("in/.git")) == [".git/x.txt"]
    assert texts(opened("in/._a.txt")) == ["._a.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_listed_is_named(opened, tmp_path):
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "in" / "shut").mkdir(mode=0)
    with pytest.raises(DataError, match="shut: cannot be listed"):
        opened()


LETTERS = ["".join(random.Random(number).choices("abcdefghij ", k=5000)) for number in range(20)]
HALF = [(ending, "cut short") for ending in (".jsonl.gz", ".jsonl.zst", ".parquet")] + [
    (".jsonl", "line 11")
]


@pytest.mark.parametrize(("ending", "message"), HALF)
def test_a_file_cut_in_half_is_named_and_nothing_is_kept(opened, tmp_path, ending, message):
    path = tmp_path / "in" / f"a{ending}"
    WRITERS[ending](path, LETTERS)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=rf"a\{ending}.*{message}"):
        opened()
    assert list((tmp_path / "cache").iterdir()) == []


ODD = [
    ("a.jsonl", b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}', ["a", "b"]),
    ("a.jsonl", b'\xef\xbb\xbf\n{"text": "a"}\n', ["a"]),
    ("a.jsonl", b'{"text": "a"}\r\n{"text": "b\\r\\n"}\r\n', ["a", "b\r\n"]),
    ("a.jsonl", b'{"text": "a\\u0000b"}\n\n  \t\n{"text": " "}', ["a\0b", " "]),
    ("a.txt", b"\xef\xbb\xbfa\r\nb\0 ", ["a\r\nb\0 "]),
    ("a.txt", "a\ufeffb".encode(), ["a\ufeffb"]),
    ("a.txt", b" \n", [" \n"]),
]


@pytest.mark.parametrize(("name", "content", "expected"), ODD)
def test_odd_files_are_read_as_they_are(opened, tmp_path, name, content, expected):
    (tmp_path / "in" / name).write_bytes(content)
    assert texts(opened()) == expected


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
    ids=str,
)
def test_every_kind_of_text_column(opened, tmp_path, kind):
    values = pa.array(["a", None, "ä\0", "", "a"]).cast(kind)
    parquet.write_table(pa.table({"text": values}), tmp_path / "in" / "a.parquet")
    none = pa.table({"text": pa.array([], pa.string())})
    parquet.write_table(none, tmp_path / "in" / "b.parquet")
    nulls = pa.table({"text": pa.array([None, None], pa.null())})
    parquet.write_table(nulls, tmp_path / "in" / "c.parquet")
    corpus = opened()
    assert texts(corpus) == ["a", "ä\0", "a"]
    assert "4 empty rows skipped" in corpus.description


BROKEN = [
    ("a.jsonl", b'{"text": "a\0b"}', r"a\.jsonl, line 1: not a line of JSON.*control character"),
    ("a.jsonl", b'{"text": "ok"}\n{"text": "a"\n', r"a\.jsonl, line 2: not a line of JSON"),
    ("a.jsonl", b'{"text": "ok"}\n\n[1]\n', r"a\.jsonl, line 3: a JSON list"),
    (
        "a.jsonl",
        b'{"text": "ok"}\n{"body": "a", "n": 1}\n',
        r"a\.jsonl, line 2: no key text.*data\.column=.*body, n",
    ),
    ("a.jsonl", b'{"text": "ok"}\n{"text": 7}\n', r"a\.jsonl, line 2: text holds int"),
    (
        "a.jsonl",
        b'{"text": "ok"}\n{"text": "\xff"}\n',
        r"a\.jsonl, line 2: not a line of JSON in UTF-8",
    ),
    ("a.jsonl", b'{"text": ' + b"[" * 200_000, r"a\.jsonl, line 1: not a line of JSON"),
    ("a.jsonl.gz", b"", r"a\.jsonl\.gz: cannot be read"),
    ("a.jsonl.gz", b"plain text", r"a\.jsonl\.gz: cannot be read"),
    ("a.jsonl.zst", b"", r"a\.jsonl\.zst: cannot be read"),
    ("a.jsonl.zst", b"plain text", r"a\.jsonl\.zst: cannot be read"),
    ("a.parquet", b"", r"a\.parquet: cannot be read"),
    ("a.parquet", b"plain text", r"a\.parquet: cannot be read"),
    ("a.txt", b"latin \xe9", r"a\.txt: not UTF-8"),
    ("a.txt", b"", r"data\.root=.*not one text"),
    (
        "a.jsonl",
        b'{"text": null}\n{"text": ""}\n',
        r"data\.root=.*not one text in data\.column=text",
    ),
    ("a.csv", b"1,2", r"data\.root=.*holds no file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
@pytest.mark.filterwarnings("ignore:data.root")
def test_broken_files_are_named(opened, tmp_path, name, content, message):
    (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        opened()


def test_broken_tables_are_named(opened, tmp_path):
    path = tmp_path / "in" / "a.parquet"
    write_parquet(path, ["a"], column="body")
    with pytest.raises(
        DataError, match=r"a\.parquet: no column text; .*; write data\.column= one of body"
    ):
        opened()
    assert texts(opened(column="body")) == ["a"]
    with pytest.raises(DataError, match=r"a\.parquet: column id holds int64, not text"):
        opened(column="id")
    parquet.write_table(
        pa.table({"text": pa.array([b"ok", b"\xff"]).cast(pa.binary()).view(pa.string())}), path
    )
    with pytest.raises(DataError, match=r"a\.parquet: not UTF-8"):
        opened()


def test_roots_that_cannot_be_used(opened):
    with pytest.raises(DataError, match=r"data\.root=null.*data\.root=FILE"):
        opened(None)
    with pytest.raises(DataError, match=r"data\.root=.*nowhere: no such file"):
        opened("nowhere")
    with pytest.raises(DataError, match=r"data\.root=.*no file matches"):
        opened("in/*.nothing")
    with pytest.raises(DataError, match=r"data\.root=.*holds no file"):
        opened("in")


def test_equal_documents_have_equal_fingerprints(opened, tmp_path):
    WRITERS[".jsonl"](tmp_path / "in" / "a.jsonl", LETTERS)
    WRITERS[".parquet"](tmp_path / "b.parquet", LETTERS)
    WRITERS[".jsonl"](tmp_path / "c.jsonl", LETTERS[::-1])
    assert opened().fingerprint == opened("b.parquet").fingerprint != opened("c.jsonl").fingerprint


def test_the_cache_is_reused_until_a_source_changes(opened, tmp_path):
    path = tmp_path / "in" / "a.jsonl"
    WRITERS[".jsonl"](path, ["one"])
    assert texts(opened()) == ["one"]
    first = {file: file.stat().st_ino for file in (tmp_path / "cache").iterdir()}
    opened()
    assert {file: file.stat().st_ino for file in (tmp_path / "cache").iterdir()} == first
    WRITERS[".jsonl"](path, ["two"])
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert texts(opened()) == ["two"]
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("size", [0, 100, 0.5, 0.99])
def test_a_damaged_cache_is_prepared_again(opened, tmp_path, size):
    WRITERS[".jsonl"](tmp_path / "in" / "a.jsonl", LETTERS)
    opened()
    (cached,) = (tmp_path / "cache").iterdir()
    os.truncate(cached, size if size >= 1 else int(cached.stat().st_size * size))
    with pytest.warns(UserWarning, match="damaged.*prepared again"):
        assert texts(opened()) == LETTERS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts(opened()) == LETTERS


def test_a_flipped_letter_in_the_cache_is_noticed(opened, tmp_path):
    WRITERS[".jsonl"](tmp_path / "in" / "a.jsonl", LETTERS)
    opened()
    (cached,) = (tmp_path / "cache").iterdir()
    content = bytearray(cached.read_bytes())
    content[content.index(LETTERS[3].encode()) + 7] ^= 1
    cached.write_bytes(content)
    corpus = opened()
    assert corpus.text(2) == LETTERS[2]
    with pytest.raises(DataError, match="document 3 is damaged; delete the file"):
        corpus.text(3)


def test_a_cache_that_is_cut_short_while_it_is_used_is_named(opened, tmp_path):
    WRITERS[".jsonl"](tmp_path / "in" / "a.jsonl", LETTERS * 9)
    corpus = opened()
    (cached,) = (tmp_path / "cache").iterdir()
    os.truncate(cached, 4096)
    with pytest.raises(UnreadableError, match=r"files-.*\.arrow: cut short: .* prepared again"):
        corpus.text(150)
    with pytest.warns(UserWarning, match="damaged"):
        assert opened().text(150) == LETTERS[10]


def test_a_flipped_hash_in_the_cache_is_noticed(opened, tmp_path):
    WRITERS[".jsonl"](tmp_path / "in" / "a.jsonl", LETTERS)
    fingerprint = opened().fingerprint
    (cached,) = (tmp_path / "cache").iterdir()
    content = bytearray(cached.read_bytes())
    content[content.index(content_hash(LETTERS[3]).to_bytes(8, "little"))] ^= 1
    cached.write_bytes(content)
    with pytest.warns(UserWarning, match=r"damaged.*prepared again"):
        assert opened().fingerprint == fingerprint


def test_a_cache_that_cannot_be_written_names_its_key(opened, tmp_path):
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"cannot be written.*data\.cache=FOLDER"):
        opened()


@pytest.mark.slow
def test_processes_that_prepare_at_once_do_not_disturb_each_other(tmp_path):
    WRITERS[".jsonl"](tmp_path / "a.jsonl", LETTERS * 20)
    program = (
        "from lrattnres.config import *; from lrattnres.data.corpora import open_corpus\n"
        "corpus = open_corpus(DataConfig(corpus=CorpusName.files, root='a.jsonl', cache='c'))\n"
        "print(len(corpus), corpus.fingerprint, corpus.text(399)[:3])"
    )
    running = [
        Program(["-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path) for _ in range(3)
    ]
    answers = {process.communicate(timeout=60)[0] for process in running}
    assert len(answers) == 1 and answers.pop().startswith("400 ")
    assert len(list((tmp_path / "c").iterdir())) == 1


def test_the_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder(None) == Path("/x/lrattnres")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(None) == Path.home() / ".cache" / "lrattnres"
    assert cache_folder("~/here") == Path.home() / "here"


def test_no_document_crosses_from_one_side_to_the_other(opened, tmp_path):
    """Copies, order and company of a text do not matter, nor does a seed or an epoch."""
    words = [f"text {number}" for number in range(60)]
    WRITERS[".jsonl"](tmp_path / "in" / "a.jsonl", words + words[::-1])
    WRITERS[".jsonl"](tmp_path / "b.jsonl", [*words[::2], "one more"])
    tokenizer = build_tokenizer(TokenizerName.bytes)
    documents, other = (EncodedCorpus(opened(root), tokenizer) for root in ("in", "b.jsonl"))

    def left_out(documents, holdout):
        return [
            tokenizer.decode(tokens[1:]) for _, tokens in held_out_documents(documents, holdout)
        ]

    left = left_out(documents, 0.3)
    kept = set(words) - set(left)
    assert 10 < len(left) < 70 and sorted(left) == sorted(2 * list(set(left)))
    assert left_out(documents, 0.3) == left != sorted(left)
    assert set(left_out(other, 0.3)) - {"one more"} == set(left) & set(words[::2])
    assert set(left_out(documents, 0.2)) < set(left)
    for seed in range(3):
        streams = TrainStreams(documents, context=64, streams=4, seed=seed, holdout=0.3)
        rows = np.concatenate([streams.next_batch()[:, :-1].numpy() for _ in range(20)], axis=1)
        assert streams.state()[:, 0].min() >= 2
        assert {
            text for row in rows for text in tokenizer.decode(row).split("<|endoftext|>")[1:-1]
        } == kept


def test_copies_are_left_out_where_asked(opened, tmp_path):
    WRITERS[".jsonl"](tmp_path / "in" / "a.jsonl", ["one", "two", "one", "three", "two", "one"])
    corpus = opened()
    plain = corpus.fingerprint
    corpus.deduplicate()
    assert [texts(corpus)[row] for row in np.flatnonzero(corpus.present)] == ["one", "two", "three"]
    assert corpus.fingerprint != plain and "3 copies left out" in corpus.description


def test_the_share_of_held_out_documents_is_the_one_asked_for():
    hashes = np.array(
        [content_hash(f"document {number}") for number in range(20_000)], dtype=np.uint64
    )
    for holdout, expected in ((0.0, 0), (0.05, 1000), (0.5, 10_000), (1.0, 20_000)):
        assert (
            abs(held_out(hashes, holdout).sum() - expected)
            <= 4 * (20_000 * holdout * (1 - holdout)) ** 0.5
        )
    with pytest.raises(DataError, match=r"data\.holdout=1\.5"):
        held_out(hashes, 1.5)


def test_docstrings_are_found_by_parsing(tmp_path):
    long = "A sentence that is repeated until it is long enough. " * 5
    (tmp_path / "pkg" / "tests").mkdir(parents=True)
    (tmp_path / "pkg" / "tests" / "bad.py").write_text("def broken(:")
    (tmp_path / "pkg" / "b.py").write_text(
        f'"""{long}b\n\n    indented\n    """\n\nasync def f():\n    """{long}f"""\n'
    )
    (tmp_path / "pkg" / "a.py").write_text(
        f'class C:\n    r"""{long}\\d"""\n    def m(self):\n        """too short"""\nx = "\\d"\n'
    )
    (tmp_path / "pkg" / "c.py").write_text(f'"""{long}f"""\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = list(read_docstrings([tmp_path]))
    assert found == [f"{long}\\d", f"{long}b\n\nindented", f"{long}f"]
    (tmp_path / "new.py").write_text("def f[T(: ...")
    with pytest.warns(UserWarning, match=r"new\.py left out"):
        assert list(read_docstrings([tmp_path])) == found


def test_docstrings_of_a_real_package():
    package = Path(json.__file__).parent
    found = list(read_docstrings([package]))
    assert len(found) > 5 and any("Serialize ``obj`` to a JSON formatted" in text for text in found)


@pytest.mark.slow
def test_the_docstrings_corpus_is_as_large_as_documented(opened):
    corpus = opened(None, corpus="docstrings")
    assert 7_000 < len(corpus) < 12_000
    assert 5e6 < sum(len(corpus.text(index).encode()) for index in range(len(corpus))) < 9e6
    assert len(np.unique(corpus.hashes)) == len(corpus)
