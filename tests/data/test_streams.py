"""Order, packing and resuming against references that concatenate everything in lists."""

import warnings
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrattnres.config import TokenizerName
from lrattnres.data.documents import EncodedCorpus
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.heldout import held_out_windows
from lrattnres.data.order import permutation
from lrattnres.data.packing import IGNORE
from lrattnres.data.streams import TrainStreams, batch_hash
from lrattnres.data.text import content_hash
from lrattnres.data.tokenizers import build_tokenizer

BYTES = build_tokenizer(TokenizerName.bytes)
SEPARATOR = 256


class ListTexts:
    low = 0

    def __init__(self, texts):
        self.texts, self.present = texts, np.array([bool(text) for text in texts], dtype=bool)
        self.hashes = np.array([content_hash(text or "") for text in texts], dtype=np.uint64)

    def text(self, row):
        return self.texts[row]


class ListCorpus:
    """`groups`: lists of texts, None is no document; `broken`: groups that cannot be read."""

    fingerprint, description, listing, streamed = "list", "a list of texts", None, True
    skipped = ""

    def __init__(self, groups, broken=()):
        self.groups, self.broken, self.asked = groups, set(broken), []
        self.rows = np.array([len(group) for group in groups], dtype=np.int64)
        self.sizes = self.rows

    def place(self, group, row):
        return f"document {group} of {self.description}"

    def group(self, number):
        self.asked.append(number)
        if number in self.broken:
            raise UnreadableError(f"group {number} is broken")
        return ListTexts(self.groups[number])


def streams_of(texts, count, *, context=4, **options):
    """Streams over single documents."""
    return grouped([[text] for text in texts], count, context=context, **options)


def grouped(groups, count, *, context=4, seed=0, broken=(), **options):
    documents = EncodedCorpus(ListCorpus(groups, broken), BYTES)
    return TrainStreams(documents, context=context, streams=count, seed=seed, **options)


def spelled(text):
    return [SEPARATOR, *text.encode()]


def epoch_of(groups, seed, epoch):
    """All texts in the order of an epoch."""
    for group in permutation(len(groups), seed, epoch):
        size = len(groups[group])
        rows = permutation(size, seed, epoch, group, 1) if size > 1 else range(size)
        yield from (groups[group][row] for row in rows)


def reference(groups, count, stream, seed, length):
    """The first `length` tokens of a stream."""
    tokens, epoch, total = [], 0, sum(map(len, groups))
    while len(tokens) < length:
        for text in list(epoch_of(groups, seed, epoch))[
            total * stream // count : total * (stream + 1) // count
        ]:
            tokens += spelled(text) if text else []
        epoch += 1
    return tokens[:length]


TEXTS = st.lists(st.text("abé", min_size=1, max_size=9), min_size=1, max_size=9)


@settings(deadline=None)
@given(TEXTS, st.integers(1, 4), st.integers(1, 7), st.integers(0, 3))
def test_windows_are_those_of_the_concatenated_documents(texts, count, context, seed):
    count = min(count, len(texts))
    streams, steps = streams_of(texts, count, context=context, seed=seed), 12
    batches = torch.stack([streams.next_batch() for _ in range(steps)])
    assert batches.dtype == torch.int64 and batches.shape == (steps, count, context + 1)
    for stream in range(count):
        tokens = reference([[text] for text in texts], count, stream, seed, steps * context + 1)
        assert batches[:, stream].tolist() == [
            tokens[step * context :][: context + 1] for step in range(steps)
        ]


ROWS = st.lists(st.one_of(st.none(), st.text("abé", max_size=9)), max_size=7)
GROUPS = st.lists(ROWS, min_size=1, max_size=9).filter(
    lambda groups: any(text for group in groups for text in group)
)


@settings(deadline=None)
@given(GROUPS, st.integers(1, 5), st.integers(1, 7), st.integers(0, 3), st.integers(0, 3))
def test_groups_of_any_size_are_cut_into_equal_stretches(groups, count, context, seed, workers):
    """Groups with nothing in them, fewer groups than streams, streams without a document in an epoch."""
    count, steps = min(count, sum(map(len, groups))), 6
    options = {"context": context, "seed": seed, "workers": workers, "ahead": 3}
    try:
        streams = grouped(groups, count, **options)
    except DataError:  # a stream whose stretch never has the only text
        epochs = [list(epoch_of(groups, seed, epoch)) for epoch in range(50)]
        cuts = [len(epochs[0]) * stream // count for stream in range(count + 1)]
        assert any(
            not any(text for texts in epochs for text in texts[begin:end])
            for begin, end in pairwise(cuts)
        )
        return
    batches = torch.stack([streams.next_batch() for _ in range(steps)])
    streams.close()
    for stream, skipped in enumerate(streams.state()[:, 4].tolist()):
        epoch, row = streams.state()[stream, :2].tolist()
        begin, end = (sum(map(len, groups)) * cut // count for cut in (stream, stream + 1))
        passed = [
            text for past in range(epoch) for text in list(epoch_of(groups, seed, past))[begin:end]
        ]
        passed += list(epoch_of(groups, seed, epoch))[begin : begin + row]
        assert skipped == sum(not text for text in passed)
    for stream in range(count):
        tokens = reference(groups, count, stream, seed, steps * context + 1)
        assert batches[:, stream].tolist() == [
            tokens[step * context :][: context + 1] for step in range(steps)
        ]


@settings(deadline=None)
@given(TEXTS, st.integers(1, 4), st.integers(1, 7))
def test_every_document_once_an_epoch(texts, count, context):
    """Found in the windows alone: without their overlap they are whole documents, each text as often as it is there."""
    count = min(count, len(texts))
    streams = streams_of(texts, count, context=context)
    rows = torch.cat([streams.next_batch()[:, :-1] for _ in range(400 // context + 1)], dim=1)
    seen = Counter()
    for stream, row in enumerate(rows.tolist()):
        of_epoch = len(texts) * (stream + 1) // count - len(texts) * stream // count
        documents = BYTES.decode(row).split("<|endoftext|>")[1:-1]  # the last one may be cut short
        seen.update(documents[of_epoch : 2 * of_epoch])  # the second epoch
    assert seen == Counter(texts)


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_corpus_without_a_training_document_is_read_once_and_refused(world, workers):
    """Whatever the reason is; each rank reads a group at most once, and the counts are told."""
    corpus = ListCorpus([["a", None, "b", ""], [None], ["c", "d"]] * 15)
    options = {"context": 4, "streams": 4, "seed": 0, "world": world, "workers": workers}
    with pytest.raises(DataError, match=r"105 rows, 45 of them empty, 0 below .*, 60 held out;"):
        TrainStreams(EncodedCorpus(corpus, BYTES), holdout=1.0, **options)
    assert len(corpus.asked) == len(set(corpus.asked)) == 45
    corpus = ListCorpus([["a"], ["b"]] * 8, broken=range(8))
    with pytest.raises(DataError, match=r"8 rows, .*, 8 held out, 8 row groups unreadable"):
        TrainStreams(EncodedCorpus(corpus, BYTES), holdout=1.0, skip_unreadable=True, **options)


def test_groups_without_a_training_document_are_not_read_again():
    corpus = ListCorpus([[None, ""]] * 30 + [["the only text"]])
    streams = TrainStreams(EncodedCorpus(corpus, BYTES), context=4, streams=1, seed=0)
    for _ in range(50):
        streams.next_batch()
    epoch = int(streams.state()[0, 0])
    assert epoch > 10 and Counter(corpus.asked)[30] == epoch + 1
    assert all(times == 1 for group, times in Counter(corpus.asked).items() if group != 30)
    assert 60 * epoch <= streams.skipped_rows <= 60 * (epoch + 1)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(permutation(20, seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert all(sorted(order) == list(range(20)) for order in orders)
    # Recorded: another order would change every run that is continued.
    assert permutation(8, 0, 0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]


WORDS = ["a", "bcdefghijklmnop", "qr", "stu vwx", "\x00", "yz\r\n", "é"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stopping_between_any_two_steps_changes_nothing(count):
    whole, steps = streams_of(WORDS, count), 30
    states, batches = [], []
    for _ in range(steps):
        states.append(whole.state())
        batches.append(whole.next_batch())
    assert states[-1][:, 0].min() >= 2  # well into the third epoch
    for step in range(steps):
        resumed = streams_of(WORDS, count)
        resumed.load_state(states[step])
        assert torch.equal(resumed.state(), states[step])
        assert all(torch.equal(resumed.next_batch(), batch) for batch in batches[step:])


def test_going_back_reads_nothing_before_the_next_batch():
    corpus = ListCorpus([[word] for word in WORDS])
    streams = TrainStreams(EncodedCorpus(corpus, BYTES), context=4, streams=2, seed=0, workers=0)
    before, batch = streams.state(), streams.next_batch()
    corpus.broken = set(range(len(WORDS)))
    streams.go_back(before)
    assert torch.equal(streams.state(), before)
    with pytest.raises(UnreadableError, match="is broken"):
        streams.next_batch()
    assert torch.equal(streams.state(), before)
    corpus.broken = set()
    assert torch.equal(streams.next_batch(), batch)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_number_of_ranks_reads_the_same_batches(world):
    whole = streams_of(WORDS, 4)
    ranks = [streams_of(WORDS, 4, rank=rank, world=world) for rank in range(world)]
    assert sorted(stream for rank in ranks for stream in rank.owned) == [0, 1, 2, 3]
    for step in range(10):
        if step == 5:  # and continues on another number of ranks
            ranks = [streams_of(WORDS, 4, rank=rank, world=world) for rank in range(world)]
            for rank in ranks:
                rank.load_state(whole.state()[rank.owned])
        batch = whole.next_batch()
        hashes = 0
        for rank in ranks:
            part = rank.next_batch()
            assert torch.equal(part, batch[rank.owned])
            hashes += batch_hash(step, rank.owned, part)
        assert hashes % 2**64 == batch_hash(step, whole.owned, batch)


def test_batch_hash_sees_step_stream_and_every_token():
    tokens = torch.arange(12).reshape(3, 4)
    changed = tokens.clone()
    changed[2, 3] += 1
    hashes = [
        batch_hash(0, [0, 1, 2], tokens),
        batch_hash(1, [0, 1, 2], tokens),
        batch_hash(0, [1, 0, 2], tokens),
        batch_hash(0, [0, 1, 2], changed),
    ]
    assert len(set(hashes)) == 4
    assert batch_hash(0, [1, 0, 2], tokens[[1, 0, 2]]) == hashes[0]
    with pytest.raises(ValueError):
        batch_hash(0, [0, 1], tokens)


def test_too_few_documents_are_refused():
    with pytest.raises(DataError, match=r"global_batch=8.*7 training documents.*global_batch=7"):
        streams_of(WORDS, 8)
    with pytest.raises(DataError, match=r"global_batch=4.*multiple of the 3 processes"):
        streams_of(WORDS, 4, world=3)


@pytest.mark.parametrize(
    "state",
    [
        torch.zeros(3, 5, dtype=torch.int64),
        torch.zeros(2, 4, dtype=torch.int64),
        torch.zeros(2, 5),
        torch.tensor([[0, 0, 0, 0, 0], [0, 4, 0, 0, 0]]),
        torch.tensor([[0, 0, 0, 0, 0], [0, 0, 99, 0, 0]]),
        torch.tensor([[0, 0, 0, 0, 0], [-1, 0, 0, 0, 0]]),
        torch.tensor([[0, 0, 0, 0, 0], [0, 0, -1, 0, 0]]),
    ],
)
def test_a_foreign_state_is_refused(state):
    with pytest.raises(DataError, match=r"global_batch"):
        streams_of(WORDS, 2).load_state(state)


def test_a_document_that_cannot_be_encoded_is_named():
    class Refusing:
        name, separator = "refusing", 0

        def encode(self, text):
            raise ValueError("no")

    documents = EncodedCorpus(ListCorpus([["abc"]]), Refusing())
    with pytest.raises(DataError, match=r"document 0 of a list of texts: refusing .*'abc' \(no\)"):
        TrainStreams(documents, context=2, streams=1, seed=0)


@settings(deadline=None)
@given(TEXTS, st.integers(1, 7), st.integers(1, 80), st.integers(1, 5))
def test_held_out_windows_have_exactly_the_tokens_asked_for(texts, context, tokens, batch):
    stream = [token for text in texts for token in spelled(text)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = (np.array(spelled(text)) for text in texts)
        batches = list(held_out_windows(parts, context=context, tokens=tokens, batch=batch))
    used = min(tokens, len(stream) - 1)
    assert [
        f"{tokens} held-out tokens are asked for" in str(warning.message)
        and f"only {used} are there" in str(warning.message)
        for warning in caught
    ] == ([True] if used < tokens else [])
    assert all(len(part) == batch for part in batches[:-1]) and 1 <= len(batches[-1]) <= batch
    windows = torch.cat(batches)
    targets = windows[:, 1:].flatten()
    assert targets.tolist() == stream[1 : used + 1] + [IGNORE] * (len(targets) - used)
    assert len(targets) - used < context
    inputs = windows[:, :-1].flatten()[:used]
    assert inputs.tolist() == stream[:used]


def test_an_empty_held_out_set_names_its_key():
    with pytest.raises(DataError, match=r"data\.holdout"):
        held_out_windows(iter([]), context=4, tokens=8, batch=2)
