"""The paper's command on real parquet with its own tokenizer, as processes: killed, cut off from their data, continued."""

import random
import signal
from pathlib import Path

import numpy as np
import pytest

from lrattnres.config import CorpusName, DataConfig, TokenizeConfig, TokenizerConfig, TokenizerName
from lrattnres.config.checks import resolve
from lrattnres.data.dataset import open_dataset
from lrattnres.data.errors import DataError
from lrattnres.data.tokenizing import tokenize_corpus
from lrattnres.runs.checkpoint import Checkpoints
from lrattnres.runs.metrics import MetricsFile
from tests.config.test_config import composed
from tests.data.serving import serving, write_rows
from tests.test_cli import assert_equal_runs, run, start, wait_for_step

STEPS = 24
WORDS = [
    "a",
    "stream",
    "of",
    "words",
    "read",
    "from",
    "many",
    "files",
    "in",
    "an",
    "order",
    "nobody",
    "keeps",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """1,200 documents in 40 row groups of 4 files, and their shards in `tok`."""
    folder, choose = tmp_path_factory.mktemp("paper"), random.Random(0)
    for number in range(4):
        texts = [
            f"{number} {row} " + " ".join(choose.choices(WORDS, k=choose.randint(3, 60)))
            for row in range(300)
        ]
        write_rows(folder / "en" / f"part-{number}.parquet", texts, row_group_size=30)
    data = DataConfig(
        corpus=CorpusName.ultra_fineweb, root=str(folder / "en"), column="content", holdout=0.02
    )
    tokenize_corpus(
        TokenizeConfig(str(folder / "tok"), 1, 64, data, TokenizerConfig(TokenizerName.cl100k_base))
    )
    return folder


def paper(place: Path, *changes: str) -> list[str]:
    """The paper's run with a tiny model."""
    machine = [
        "device=cpu",
        "precision=float32",
        "compile=off",
        "threads=1",
        f"runs={place}/runs",
        f"data.cache={place}/cache",
    ]
    model = [
        "model.layers=2",
        "model.dim=16",
        "model.heads=2",
        "model.mlp_width=24",
        "model.context=32",
        "model.rank=4",
    ]
    size = [
        "model.blocks=2",
        f"steps={STEPS}",
        "global_batch=4",
        "micro_batch=2",
        "instruments.log=1",
        "instruments.depth=null",
    ]
    schedule = [
        "optimizer.warmup=4",
        "optimizer.momentum_rise=4",
        "optimizer.momentum_fall=4",
        "checkpoint.every=5",
    ]
    evaluation = [
        "evaluation.every=null",
        "evaluation.tokens=300",
        "evaluation.diagnostics_tokens=300",
    ]
    return ["experiment=paper", *machine, *model, *size, *schedule, *evaluation, *changes]


def hashes(folder: Path) -> list[str]:
    return [record["batch_hash"] for record in MetricsFile.read(folder / "metrics.jsonl")]


SOURCES = [["en"], ["tok", "data=tokens"]]


@pytest.mark.slow
def test_two_random_kills_change_nothing(folder, tmp_path):
    """From parquet and from its shards, with and without threads that read ahead; the two give the same batches."""
    choose, runs = random.Random(), tmp_path / "runs"
    for source, *choices in SOURCES:
        settings = paper(tmp_path, f"data.root={folder}/{source}", *choices)
        assert f"finished at step {STEPS}" in run("train.py", *settings, f"name={source}")
        cut = runs / f"{source}-cut"
        for step in sorted(choose.sample(range(1, STEPS - 2), 2)):
            process = start(
                "train.py",
                *settings,
                f"name={cut.name}",
                f"data.workers={choose.choice([0, 1, 3])}",
            )
            wait_for_step(process, cut / "metrics.jsonl", step)
            process.kill()
            process.communicate()
            assert process.returncode == -signal.SIGKILL, step
        run("train.py", *settings, f"name={cut.name}")
        assert_equal_runs(runs / source, cut, STEPS)
    assert hashes(runs / "en") == hashes(runs / "tok")
    records = [MetricsFile.read(runs / name / "metrics.jsonl")[-1] for name in ("en", "tok")]
    assert records[0]["val_loss"] == records[1]["val_loss"]


def bytes_run(place: Path, root: str, *changes: str) -> list[str]:
    return [
        *paper(
            place,
            "tokenizer=bytes",
            f"data.root={root}",
            "name=run",
            "data.ahead=1",
            "data.retries=1",
        ),
        *changes,
    ]


def test_data_that_become_unreadable_stop_the_run_and_are_saved(folder, tmp_path):
    """The run goes on from the very step once the server is well, or passes over what is broken and counts it."""
    with serving(folder) as server:
        settings = bytes_run(tmp_path, f"{server.address}/en", "steps=300", "checkpoint.every=1000")
        place = tmp_path / "runs" / "run"
        process = start("train.py", *settings)
        wait_for_step(process, place / "metrics.jsonl", 3)
        server.broken = {"part-0.parquet", "part-1.parquet", "part-2.parquet", "part-3.parquet"}
        output = process.communicate(timeout=120)[0]
        assert (
            process.returncode == 74
            and "unreadable after 2 tries" in output
            and "Traceback" not in output
        ), output
        (step,) = Checkpoints(place / "checkpoints").steps()
        assert (
            f"saved at step {step}" in output
            and MetricsFile.read(place / "metrics.jsonl")[-1]["step"] == step
        )
        server.broken = {"part-2.parquet"}
        output = run("train.py", *settings, "data.skip_unreadable=true")
        assert f"continuing from step {step}" in output and "finished at step 300" in output
        last = MetricsFile.read(place / "metrics.jsonl")[-1]
        assert last["skipped_groups"] > 0
        server.broken = set()
    straight = bytes_run(
        *(tmp_path, str(folder / "en"), f"steps={max(step, STEPS)}", "name=straight"),
        "checkpoint.every=1000",
    )
    run("train.py", *straight)
    assert hashes(place)[:step] == hashes(tmp_path / "runs" / "straight")[:step]


@pytest.mark.slow
def test_a_changed_corpus_is_refused_with_what_differs(folder, tmp_path):
    for path in (folder / "en").iterdir():
        (tmp_path / "en").mkdir(exist_ok=True)
        (tmp_path / "en" / path.name).write_bytes(path.read_bytes())
    settings = bytes_run(tmp_path, str(tmp_path / "en"))
    run("train.py", *settings)
    write_rows(tmp_path / "en" / "part-2.parquet", ["another text"] * 20)
    (tmp_path / "en" / "part-3.parquet").unlink()
    output = run("train.py", *settings, code=2)
    assert "the corpus changed since the run started" in output
    assert (
        "part-2.parquet: changed (bytes, rows, footer" in output
        and "part-3.parquet: gone" in output
    )
    assert "the corpus differ" in run("eval.py", f"run={tmp_path}/runs/run", code=2)


def test_memory_is_bounded(folder, tmp_path):
    """Four streams may hold four row groups, and no more than there are."""
    settings = bytes_run(tmp_path, str(folder / "en"))
    dataset = open_dataset(resolve(composed(*settings))[0])
    needed = np.sort(dataset.documents.sizes)[-4:].sum() / 2**30
    dataset.config.data.memory = needed * 1.01
    dataset.streams().close()
    dataset.config.data.memory = needed * 0.99
    with pytest.raises(DataError, match=r"data\.memory=.*4 streams .*scripts/tokenize_corpus\.py"):
        dataset.streams()
    assert dataset.streams(rank=1, world=2).owned == [1, 3]
