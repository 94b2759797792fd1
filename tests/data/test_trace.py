"""Whole corpora whose batches tell which documents they hold: nothing lost, nothing twice, whoever reads and however often
it stops. From parquet and from its shards, which give the same batches.
"""

import random
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrattnres.config import CorpusName, DataConfig, TokenizeConfig, TokenizerConfig, TokenizerName
from lrattnres.data.corpora import open_documents
from lrattnres.data.documents import held_out
from lrattnres.data.heldout import held_out_documents
from lrattnres.data.order import Order
from lrattnres.data.packing import segments
from lrattnres.data.streams import TrainStreams, batch_hash
from lrattnres.data.text import content_hash
from lrattnres.data.tokenizers import build_tokenizer
from lrattnres.data.tokenizing import tokenize_corpus
from tests.data.serving import write_rows

BYTES = build_tokenizer(TokenizerName.bytes)
HOLDOUT, STREAMS, CONTEXT = 0.15, 4, 48
SHARDS, ROWS = 8, 20


def word(shard: int, row: int) -> str:
    return f"s{shard}r{row:02d}_"


@pytest.fixture(scope="module", params=["parquet", "tokens"])
def documents(request, tmp_path_factory):
    """8 shards of 20 documents, each of which repeats a word of its own; two row groups a shard."""
    folder = tmp_path_factory.mktemp("trace")
    for shard in range(SHARDS):
        choose = random.Random(shard)
        texts = [word(shard, row) * choose.randint(1, 40) for row in range(ROWS)]
        write_rows(folder / "en" / f"part-{shard}.parquet", texts, row_group_size=11)
    data = DataConfig(
        corpus=CorpusName.ultra_fineweb, root=str(folder / "en"), column="content", holdout=HOLDOUT
    )
    if request.param == "tokens":
        tokenize_corpus(
            TokenizeConfig(str(folder / "tok"), 1, 1, data, TokenizerConfig(TokenizerName.bytes))
        )
        data = DataConfig(corpus=CorpusName.tokens, root=str(folder / "tok"), holdout=HOLDOUT)
    return open_documents(data, BYTES)


def streams_of(documents, seed=0, **options) -> TrainStreams:
    return TrainStreams(
        documents, context=CONTEXT, streams=STREAMS, seed=seed, holdout=HOLDOUT, **options
    )


def hashes(streams: TrainStreams, steps: range) -> list[int]:
    return [batch_hash(step, streams.owned, streams.next_batch()) for step in steps]


STEPS = 260  # into the third epoch


@pytest.fixture(scope="module")
def straight(documents) -> list[int]:
    streams = streams_of(documents)
    found = hashes(streams, range(STEPS))
    assert streams.state()[:, 0].min() >= 2
    return found


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_stops_and_resumes_change_nothing(documents, straight, workers):
    """Also twice in a row, at once after a start, in the second epoch, and with another number of threads."""
    choose, state, step = random.Random(workers), None, 0
    stops = sorted([0, 0, 1, STEPS, *choose.sample(range(STEPS), 12)])
    found, seen = [], set()
    for stop in stops:
        streams = streams_of(documents, workers=workers, ahead=choose.randint(1, 5))
        if state is not None:
            streams.load_state(state)
        found += hashes(streams, range(step, stop))
        state, step = streams.state(), stop
        seen |= set(state[:, 0].tolist())
        streams.close()
    assert found == straight and {1, 2} <= seen


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 3])
def test_ranks_and_threads_change_nothing(documents, straight, world, workers):
    """The hashes of ranks add up; the state of one number of ranks is continued by another."""
    other, states = {1: 4, 2: 1, 4: 2}[world], torch.empty(STREAMS, 5, dtype=torch.int64)
    total = [0] * STEPS
    for rank in range(world):
        streams = streams_of(documents, rank=rank, world=world, workers=workers, ahead=2)
        for step, value in enumerate(hashes(streams, range(STEPS // 2))):
            total[step] += value
        states[streams.owned] = streams.state()
        streams.close()
    for rank in range(other):
        streams = streams_of(documents, rank=rank, world=other, workers=workers, ahead=2)
        streams.load_state(states[streams.owned])
        for step, value in zip(
            range(STEPS // 2, STEPS), hashes(streams, range(STEPS // 2, STEPS)), strict=True
        ):
            total[step] += value
        streams.close()
    assert [value % 2**64 for value in total] == straight


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_micro_batches_add_up(documents, straight, parts):
    streams = streams_of(documents)
    for step in range(20):
        pieces = zip(
            torch.tensor(streams.owned).split(parts), streams.next_batch().split(parts), strict=True
        )
        assert (
            sum(batch_hash(step, owned.tolist(), piece) for owned, piece in pieces) % 2**64
            == straight[step]
        )


def test_every_document_once_an_epoch_and_no_held_out_one_ever(documents):
    """Found in the tokens alone: which words follow a separator, between the places where epochs begin."""
    left = {BYTES.decode(tokens[1:]) for _, tokens in held_out_documents(documents, HOLDOUT)}
    everything = {word(shard, row) for shard in range(SHARDS) for row in range(ROWS)}
    kept = everything - {text[:6] for text in left}
    assert 10 < len(left) < 40 and all(content_hash(text) < HOLDOUT * 2**64 for text in left)
    for seed in range(3):
        order, streams = (
            Order(documents.rows, seed=seed, streams=STREAMS),
            streams_of(documents, seed),
        )
        rows = torch.cat([streams.next_batch()[:, :-1] for _ in range(STEPS)], dim=1)
        counts = [Counter[str]() for _ in range(2)]
        for stream, row in enumerate(rows.tolist()):
            texts = BYTES.decode(row).split("<|endoftext|>")[1:-1]
            assert all(re.fullmatch(rf"({text[:6]})+", text) for text in texts)
            sizes = [expected(documents, order, epoch, stream) for epoch in range(2)]
            assert len(texts) > sum(sizes)
            counts[0].update(text[:6] for text in texts[: sizes[0]])
            counts[1].update(text[:6] for text in texts[sizes[0] : sum(sizes)])
            assert not {text[:6] for text in texts} - kept
        assert counts[0] == counts[1] == Counter(kept)


def expected(documents, order: Order, epoch: int, stream: int) -> int:
    """Training documents of a stream in an epoch, counted row by row."""
    count = row = 0
    while row < order.length(stream):
        piece = order.piece(epoch, stream, row)
        count += int((~held_out(documents.group(piece.group).hashes, HOLDOUT))[piece.rows].sum())
        row += len(piece.rows)
    return count


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 9), st.integers(0, 2))
def test_an_epoch_deals_every_row_once(sizes, streams, epoch):
    total = sum(sizes)
    if total < streams:
        return
    order = Order(np.array(sizes), seed=3, streams=streams)
    dealt, lengths = [], [order.length(stream) for stream in range(streams)]
    for stream in range(streams):
        row = 0
        while row < lengths[stream]:
            group, rows = order.piece(epoch, stream, row)
            dealt += [(group, int(number)) for number in rows]
            row += len(rows)
        assert row == lengths[stream]
    assert sorted(dealt) == [
        (group, row) for group, size in enumerate(sizes) for row in range(size)
    ]
    assert max(lengths) - min(lengths) <= 1


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 90), st.integers(1, 6), st.integers(0, 5))
def test_packing_keeps_every_token_once(documents, context, streams, seed):
    """Windows overlap by one, segments cover the window, and numbers change where a separator stands and nowhere else."""
    packed = TrainStreams(documents, context=context, streams=streams, seed=seed, holdout=HOLDOUT)
    windows = [packed.next_batch() for _ in range(8)]
    for before, after in pairwise(windows):
        assert torch.equal(before[:, -1], after[:, 0])
    for window in windows:
        inputs = window[:, :-1]
        numbers = segments(inputs, 256)
        for row, found in zip(inputs.tolist(), numbers.tolist(), strict=True):
            lengths = Counter(found)
            assert sum(lengths.values()) == context and sorted(lengths) == list(range(len(lengths)))
            assert all(
                (b - a == 1) == (token == 256)
                for a, b, token in zip(found, found[1:], row[1:], strict=False)
            )


def test_the_order_is_recorded(straight):
    """Another order would change every run that is continued, and parquet and its shards must agree."""
    assert sum(straight) % 2**64 == 0xCE4772CD3E456933
