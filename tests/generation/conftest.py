"""A run that was trained for a moment: what these tests load."""

from pathlib import Path

import pytest

from lrattnres.config.checks import resolve
from lrattnres.training.run import train
from tests.config.test_config import composed

MODEL = [
    "layers=2",
    "dim=16",
    "heads=2",
    "mlp_width=24",
    "context=48",
    "residual=p_lr",
    "rank=4",
    "blocks=2",
]


@pytest.fixture(scope="session")
def trained(texts: Path, tmp_path_factory) -> Path:
    """The folder of a run of 20 steps on bytes, trained here."""
    place = tmp_path_factory.mktemp("trained")
    size = [
        "steps=20",
        "global_batch=8",
        "micro_batch=8",
        "optimizer.warmup=4",
        "evaluation.tokens=200",
        "checkpoint.every=10",
    ]
    data = [
        "data=files",
        f"data.root={texts}",
        f"data.cache={place}/cache",
        f"runs={place}",
        "name=run",
        "data.workers=0",
    ]
    train(
        *resolve(
            composed(
                "experiment=demo", "threads=1", *(f"model.{word}" for word in MODEL), *size, *data
            )
        )
    )
    return place / "run"
