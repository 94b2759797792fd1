"""Ablations on several ranks are those of one process: what they learn stays with the router, whole
on each rank.
"""

import pytest

from tests.distributed.test_training import MESHES, SETTINGS, assert_same_run

EVERYTHING = [
    "key_norm=false",
    "heads=2",
    "input_queries=true",
    "block_scale=mean",
    "learned_scale=true",
    "query_std=0.02",
]
STATES = ["sources=states", "embedding_source=false", "learned_scale=true"]


@pytest.mark.slow
@pytest.mark.parametrize("ablations", [EVERYTHING, STATES], ids=["everything", "states"])
@pytest.mark.parametrize("mesh", ["fsdp 2", "hsdp 2x2", "ddp 2"])
def test_ranks_train_ablations_as_one_process_does(
    tiny_run, mesh: str, ablations: list[str]
) -> None:
    world, extra = MESHES[mesh]
    chosen = [f"model.depth.{setting}" for setting in ablations]
    assert_same_run(tiny_run(*SETTINGS, "model.residual=p_lr", *chosen), world, extra)
