"""Bytes that ranks send in a step, counted while it runs, against what the sizes of the parameters
say.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from lrattnres.commands import main
from lrattnres.distributed.traffic import Traffic
from tests.distributed.launch import Ranks, launch
from tests.distributed.test_training import build

FLOAT = 4
# (ranks, settings, ranks that hold the weights once, copies of the weights)
LAYOUTS = {
    "one": (1, [], 1, 1),
    "fsdp 2": (2, [], 2, 1),
    "fsdp 4": (4, [], 4, 1),
    "hsdp 2x2": (4, ["parallel.mode=hsdp", "parallel.shard_degree=2"], 2, 2),
}


def one_step(
    rank: int, settings: list[str]
) -> tuple[dict[str, int], dict[str, tuple[int, ...]], dict[str, int]]:
    """(bytes sent, shapes of the parameters, what the optimizer says of its own)."""
    trainer = build(settings)
    trainer.train_step()
    sent = trainer.train_step().sent
    assert sent is not None
    return (
        sent,
        {name: tuple(tensor.shape) for name, tensor in trainer.model.named_parameters()},
        trainer.optimizer.work(),
    )


def padded(
    shapes: dict[str, tuple[int, ...]], shards: int, *, times: dict[str, int] | None = None
) -> int:
    """Elements of one rank's shards, each `times` its module's name: a shard of rows has ceil(rows
    / shards) of them.
    """
    return sum(
        -(-rows // shards) * cols * (times or {}).get(name.split(".")[0], 1)
        for name, (rows, cols) in shapes.items()
    )


@pytest.mark.parametrize("mesh", list(LAYOUTS))
@pytest.mark.parametrize("residual", ["s_lr", pytest.param("p_lr", marks=pytest.mark.slow)])
def test_the_bytes_of_a_step_follow_from_the_parameters(tiny_run, residual: str, mesh: str) -> None:
    world, extra, shards, copies = LAYOUTS[mesh]
    settings = tiny_run(
        "micro_batch=2",
        "instruments.ranks=2",
        "evaluation.tokens=500",
        f"model.residual={residual}",
        *extra,
    )
    found = (
        launch(one_step, world, settings, group=False, limit=120)
        if world > 1
        else [one_step(0, settings)]
    )
    _, shapes, _ = found[0]
    passes = 8 // (2 * world)
    # Gathered for the forward pass and again for the backward pass, but for the head, and the
    # queries in the root unit.
    twice = padded(shapes, shards, times={"sublayers": 2, "embedding": 2})
    once = padded(shapes, shards)
    blocks = [
        rows * cols
        for name, (rows, cols) in shapes.items()
        if "sublayers" in name or "embedding_key" in name
    ]
    for sent, _, work in found:
        assert sent["all_gather"] == passes * (shards - 1) * FLOAT * twice + (
            world - 1
        )  # a byte: is there a batch
        assert sent["reduce_scatter"] == passes * (shards - 1) * FLOAT * once
        # A ring of the copies, once a step; then what ranks tell each other: 8 bytes for the
        # tokens, 16 for the losses,
        # 16 for the decision, and a float for the norm of each parameter, which is summed over
        # shards only.
        ring = 2 * (copies - 1) * FLOAT * once // copies
        told = sum(2 * size * (world - 1) // world for size in (8, 16, 16))
        norms = len(shapes) * 2 * FLOAT * (shards - 1) // shards
        assert sent["all_reduce"] == ring + told + norms
        assert sent["all_to_all"] == work["bytes_sent"]
    # To its owner a matrix comes from the ranks of one copy; from there its rows go to all ranks.
    everywhere = sum(blocks) * FLOAT * ((1 - 1 / shards) + (copies - 1 / shards))
    assert sum(sent["all_to_all"] for sent, _, _ in found) == (everywhere if world > 1 else 0)


def test_a_collective_that_cannot_be_counted_is_named() -> None:
    launch(scattering, 2)


def scattering(rank: int) -> None:
    with (
        Traffic(),
        pytest.raises(NotImplementedError, match=r"c10d::scatter_.*instruments.ranks=null"),
    ):
        torch.distributed.scatter(torch.zeros(1), [torch.zeros(1)] * 2 if rank == 0 else None)


def trained(rank: int, settings: list[str]) -> None:
    """As torchrun would start it."""
    sys.argv = ["train.py", *settings]
    main("train")


def test_shares_are_logged_and_printed(tiny_run, tmp_path: Path) -> None:
    settings = tiny_run(
        "steps=8", "optimizer.warmup=2", "instruments.ranks=5", "evaluation.every=null"
    )
    with Ranks(trained, 2, settings, group=False) as ranks:
        endings = ranks.wait(120)
    output = endings[0].output
    assert [ending.code for ending in endings] == [0, 0], output
    records = [
        json.loads(line)
        for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    counted = {record["step"]: record for record in records if "bytes_sent" in record}
    assert list(counted) == [5, 8]
    assert counted[5]["bytes_sent"] == counted[8]["bytes_sent"]
    assert set(counted[5]["bytes_sent"]) == {
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all",
    }  # fmt: skip
    assert all(len(ranks) == 2 and min(ranks) > 0 for ranks in counted[5]["bytes_sent"].values())
    assert all(
        50e6 < peak < 2e9 for peak in counted[5]["peak_memory"]
    )  # torch and Python alone take 100 MB and more
    assert "a rank sends at most" in output and "peak memory" in output
