"""Measures every stage between a parquet file and the model.

    python bench/data.py [--root DIR] [--rounds N]

Without --root, the documentation strings of the installed Python are first written as parquet, with
the columns of the paper's corpus. Rates are tokens of cl100k_base by the seconds for which one
thread had a core, medians over rounds that take the stages in turn. Each round also times tiktoken
alone on the same documents. So the figures also hold on a machine that does other work; only
"tokenize to shards" and the training step are measured by the clock.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import pyarrow as pa
import tiktoken
import torch
from pyarrow import parquet

from lrattnres.config import (
    CorpusName,
    DataConfig,
    Device,
    ModelConfig,
    TokenizeConfig,
    TokenizerConfig,
    TokenizerName,
)
from lrattnres.config.checks import resolve_device
from lrattnres.data.corpora import open_corpus, open_documents
from lrattnres.data.documents import Corpus, Documents, EncodedCorpus
from lrattnres.data.packing import split_windows
from lrattnres.data.streams import TrainStreams
from lrattnres.data.tokenizers import Tokenizer, build_tokenizer
from lrattnres.data.tokenizing import tokenize_corpus
from lrattnres.model.attention import choose_attention
from lrattnres.model.loss import window_objective
from lrattnres.model.transformer import build_model

CONTEXT, STREAMS, STEPS = 512, 16, 60
NAME = TokenizerName.cl100k_base


def timed(work: Callable[[], object]) -> float:
    """Seconds for which this thread had a core, whatever else the machine does."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def sample_folder(folder: Path) -> Path:
    """Writes the docstrings corpus to a folder as four parquet files; returns the folder."""
    corpus = open_corpus(DataConfig(corpus=CorpusName.docstrings, holdout=0.1))
    texts = [corpus.group(number).text(0) for number in range(len(corpus.rows))]
    for number in range(4):
        part = texts[number::4]
        table = pa.table(
            {"content": part, "score": [0.9] * len(part), "source": ["python"] * len(part)}
        )
        parquet.write_table(table, folder / f"part-{number}.parquet", row_group_size=250)
    return folder


def texts_of(corpus: Corpus) -> Iterator[str]:
    """The text of every document."""
    for number in range(len(corpus.rows)):
        group = corpus.group(number)
        yield from (group.text(row) for row in np.flatnonzero(group.present).tolist())


def stream(documents: Documents, steps: int) -> None:
    """Reads and packs a number of batches in this thread."""
    streams = TrainStreams(documents, context=CONTEXT, streams=STREAMS, seed=0)
    for _ in range(steps):
        streams.next_batch()


def streamed_texts(corpus: Corpus, documents: Documents, steps: int) -> list[str]:
    """The documents that `stream` reads, which tiktoken alone is given too.

    Args:
        corpus: Has the texts.
        documents: The same corpus, encoded.
        steps: Number of batches.
    """
    seen: list[int] = []

    class Noted:
        rows, sizes, streamed = documents.rows, documents.sizes, documents.streamed
        fingerprint, description, listing = (
            documents.fingerprint,
            documents.description,
            documents.listing,
        )

        def group(self, number: int) -> Any:
            group, tokens = documents.group(number), documents.group(number).tokens

            class Group:
                hashes, present = group.hashes, group.present

                def tokens(self, row: int) -> np.ndarray:
                    seen.append(int(group.hashes[row]))
                    return tokens(row)

            return Group()

    stream(Noted(), steps)
    by_hash: dict[int, str] = {}
    for number in range(len(corpus.rows)):
        texts = corpus.group(number)
        by_hash |= {
            int(texts.hashes[row]): texts.text(row)
            for row in np.flatnonzero(texts.present).tolist()
        }
    return [by_hash[value] for value in seen]


def to_device(windows: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Windows cut into inputs, targets and document numbers, on a device."""
    return [part.to(device) for part in split_windows(windows, 100_257)]


def stages(
    data: DataConfig, corpus: Corpus, documents: Documents, shards: Documents, rounds: int
) -> dict[str, float]:
    """Prints and returns the rate of every stage in tokens a second.

    Args:
        data: The settings of the corpus.
        corpus: Its texts.
        documents: It, encoded while it is read.
        shards: It, tokenized before.
        rounds: Number of rounds.

    Returns:
        By stage; and the rate of "tokenize and pack" divided by that of tiktoken alone.
    """
    offline = f"{NAME.name}_offline"
    encoding = tiktoken.get_encoding(
        offline if offline in tiktoken.list_encoding_names() else NAME.name
    )
    texts = streamed_texts(corpus, documents, STEPS)
    whole, packed = int(shards.sizes.sum()) // 4, STEPS * STREAMS * CONTEXT
    tokens_alone = sum(len(encoding.encode_to_numpy(text, disallowed_special=())) for text in texts)
    groups = [
        corpus.group(number) for number in range(len(corpus.rows))
    ]  # kept, so that nothing is read again below
    windows = torch.randint(0, 1000, (STREAMS, CONTEXT + 1))
    device = resolve_device(Device.auto)

    def read() -> None:
        fresh = open_corpus(data)
        for number in range(len(fresh.rows)):
            fresh.group(number)

    work: dict[str, tuple[Callable[[], object], int]] = {
        "read and hash": (read, whole),
        "decode": (lambda: list(texts_of(corpus)), whole),
        "tiktoken alone": (
            lambda: [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts],
            tokens_alone,
        ),
        "tokenize and pack": (lambda: stream(documents, STEPS), packed),
        "pack from shards": (lambda: stream(shards, 20 * STEPS), 20 * packed),
        f"split, to {device.type}": (
            lambda: [to_device(windows, device) for _ in range(50)],
            50 * STREAMS * CONTEXT,
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, (job, tokens) in work.items():
            rates[name].append(tokens / timed(job))
    for name, values in rates.items():
        print(f"{name:<20}{statistics.median(values):>16,.0f} tokens/s   (best {max(values):,.0f})")
    ratios = [
        ours / alone
        for ours, alone in zip(rates["tokenize and pack"], rates["tiktoken alone"], strict=True)
    ]
    median, each = statistics.median(ratios), ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"tokenize and pack against tiktoken alone: median {median:.3f} (rounds {each})")
    del groups
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return medians | {"tokenize and pack / tiktoken alone": median}


def memory(documents: Documents, tokens: int) -> list[float]:
    """Prints and returns the resident memory, in MiB, at ten points while tokens are streamed."""
    streams = TrainStreams(documents, context=CONTEXT, streams=STREAMS, seed=0, workers=2, ahead=8)
    size, seen = STREAMS * CONTEXT, []
    for step in range(tokens // size):
        streams.next_batch()
        if step % max(1, tokens // size // 10) == 0:
            seen.append(
                int(Path("/proc/self/statm").read_text().split()[1])
                * resource.getpagesize()
                / 2**20
            )
    streams.close()
    shown = ", ".join(f"{value:.0f}" for value in seen)
    print(f"resident MiB over {tokens / 1e6:.0f}M tokens: {shown}")
    return seen


def waiting(documents: Documents, tokenizer: Tokenizer, steps: int) -> float:
    """Prints and returns the share of its time that a training step waits for data."""
    device = resolve_device(Device.auto)
    config = ModelConfig("s_lr", 16, 4, None, 6, 128, 4, 352, CONTEXT, tokenizer.vocabulary)
    attention = choose_attention("auto", device, torch.float32, training=True)
    model = build_model(config, seed=0, device=device, attention=attention, dtype=torch.float32)
    streams = TrainStreams(documents, context=CONTEXT, streams=4, seed=0, workers=2, ahead=8)
    streams.next_batch()
    streams.waited, begin = 0.0, time.perf_counter()
    for _ in range(steps):
        objective = window_objective(
            model, streams.next_batch(), tokenizer.separator, documents=True
        )
        (objective.total / objective.losses.tokens.sum()).backward()
        model.zero_grad()
    seconds = time.perf_counter() - begin
    streams.close()
    share = streams.waited / seconds
    print(
        f"a step of {4 * CONTEXT} tokens takes {seconds / steps:.3f} s, "
        f"and waits for data {share:.3%} of it"
    )
    return share


def main() -> None:
    parser = common.options(__doc__, device=False)
    parser.add_argument("--root", help="folder of parquet files in the paper's schema")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--tokens", type=int, default=10_000_000, help="streamed while memory is watched"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = options.root or str(sample_folder(Path(temporary)))
        data = DataConfig(corpus=CorpusName.ultra_fineweb, root=root, column="content", holdout=0.1)
        corpus, tokenizer = open_corpus(data), build_tokenizer(NAME)
        report = tokenize_corpus(
            TokenizeConfig(f"{temporary}/tokens", 1, 64, data, TokenizerConfig(NAME))
        )
        rate = report.tokens / report.seconds
        print(corpus.description)
        print(f"{'tokenize to shards':<20}{rate:>16,.0f} tokens/s   (a process)")
        shards = open_documents(
            DataConfig(corpus=CorpusName.tokens, root=f"{temporary}/tokens", holdout=0.1), tokenizer
        )
        documents = EncodedCorpus(corpus, tokenizer)
        found = {
            "options": common.words(options),
            "tokens_per_second": stages(data, corpus, documents, shards, options.rounds)
            | {"tokenize to shards": rate},
            "resident_mib": memory(documents, options.tokens),
            "waits": waiting(documents, tokenizer, 5),
        }
        common.write_json(options.json, common.machine(torch.device("cpu")) | found)


if __name__ == "__main__":
    main()
