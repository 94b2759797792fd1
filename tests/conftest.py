"""Threads are set before torch starts: tests share their cores with the processes they launch."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

from lrattnres.config import ModelConfig

VECTORS = Path(__file__).parent / "vectors"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tiny_model_config():
    """A function that makes a small ModelConfig; keyword arguments replace its values."""

    def make(**changes) -> ModelConfig:
        values = {"residual": "s_lr", "rank": 4, "blocks": 3, "layers": 3, "dim": 16, "heads": 2, "mlp_width": 24}
        return ModelConfig(**values | {"context": 12, "vocabulary": 31} | changes)

    return make
