"""Threads are set before torch starts: tests share their cores with the processes they launch."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported

from lrattnres.config import ModelConfig

VECTORS = Path(__file__).parent / "vectors"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tiny_model_config():
    """A function that makes a small ModelConfig; keyword arguments replace its values."""

    def make(**changes) -> ModelConfig:
        values = {
            "residual": "s_lr",
            "rank": 4,
            "blocks": 3,
            "layers": 3,
            "dim": 16,
            "heads": 2,
            "mlp_width": 24,
        }
        return ModelConfig(**values | {"context": 12, "vocabulary": 31} | changes)

    return make


WORDS = tuple(
    "the router reads what every layer wrote before it and mixes keys of few dimensions over depth".split()  # noqa: SIM905
)


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """A folder with one JSON-lines file of 400 different documents."""
    import json
    import random

    folder, choose = tmp_path_factory.mktemp("texts"), random.Random(0)
    lines = [
        {"text": f"{i} " + " ".join(choose.choices(WORDS, k=choose.randint(5, 60)))}
        for i in range(400)
    ]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.fixture
def tiny_run(texts: Path, tmp_path: Path):
    """A function that gives command-line settings of a small run in a folder of its own; arguments are added last."""

    def settings(*changes: str) -> list[str]:
        model = [
            "model.layers=2",
            "model.dim=16",
            "model.heads=2",
            "model.mlp_width=24",
            "model.context=32",
        ]
        size = [
            "steps=40",
            "global_batch=8",
            "micro_batch=4",
            "model.rank=4",
            "model.blocks=2",
            "optimizer.warmup=4",
        ]
        often = [
            "checkpoint.every=5",
            "evaluation.every=20",
            "evaluation.tokens=500",
            "instruments.depth=10",
        ]
        place = [
            "data=files",
            f"data.root={texts}",
            f"data.cache={tmp_path}/cache",
            f"runs={tmp_path}/runs",
            "name=run",
        ]
        return ["experiment=demo", "threads=1", *model, *size, *often, *place, *changes]

    return settings
