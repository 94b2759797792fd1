"""Training with the Triton kernels, against one process that trains with the reference: sharded, recomputed, at full size."""

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from lrattnres.config.checks import resolve
from lrattnres.distributed.parallel import Parallel, parallelize, start_parallel
from lrattnres.kernels.backends import KERNELS
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import build_model
from tests.config.test_config import composed
from tests.distributed.launch import launch
from tests.kernels.test_triton import DEVICE
from tests.test_cli import comparable, run


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(
    rank: int, settings: list[str], kernels: str, device: torch.device
) -> dict[str, torch.Tensor]:
    """Of a loss summed over four windows, of which every rank takes its share; queries are not zero."""
    config, _ = resolve(composed(*settings))
    parallel = start_parallel(config) if config.parallel.mode.name != "none" else Parallel()
    model = build_model(
        config.model, seed=0, device=device, attention=BACKENDS["sdpa"], dtype=torch.float32, kernels=KERNELS[kernels],
        prepare=lambda model: parallelize(model, config, parallel),
    )  # fmt: skip
    with torch.no_grad():
        queries = model.router.queries
        values = torch.linspace(-1, 1, queries.numel(), device=device).view(queries.shape)
        queries.copy_(
            distribute_tensor(values, queries.device_mesh, queries.placements)
            if parallel.mesh
            else values
        )
    tokens = torch.arange(4 * 16, device=device).view(4, 16) % 31
    for _ in range(2):  # the second pass meets shards that were gathered and freed before
        model.zero_grad()
        model(tokens[rank :: parallel.ranks.world], None).logsumexp(-1).square().sum().backward()
    return {name: whole(parameter.grad).cpu() for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    for name, expected in truth.items():
        assert (found[name] - expected).norm() <= 2e-5 * expected.norm(), name


SMALL = ["model.layers=3", "model.blocks=3", "parallel.mode=none"]


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["s_lr", "p_lr"])
def test_two_ranks_with_kernels_are_one_process_without(tiny_run, residual: str) -> None:
    """FSDP2: the queries stay in the root unit, so a group's are there before its sub-layers are gathered."""
    settings = tiny_run(*SMALL, f"model.residual={residual}")
    sharded = [*settings, "parallel.mode=fsdp", "ac=selective"]
    truth = gradients(0, settings, "reference", torch.device("cpu"))
    for found in launch(gradients, 2, sharded, "triton", DEVICE, group=False, limit=240):
        assert_same(found, truth)


@pytest.mark.slow
@pytest.mark.parametrize("ac", ["selective", "full"])
def test_recomputation_with_kernels_changes_nothing(tiny_run, ac: str) -> None:
    settings = tiny_run(*SMALL)
    plain, found = (
        gradients(0, [*settings, f"ac={mode}"], "triton", DEVICE) for mode in ("none", ac)
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
    assert_same(found, gradients(0, settings, "reference", torch.device("cpu")))


@pytest.mark.slow
def test_the_demo_trains_with_kernels_as_without(tmp_path) -> None:
    """The model at its real size, as `python train.py experiment=demo kernels=triton`; two steps of two windows."""
    few = [
        "steps=2",
        "global_batch=2",
        "micro_batch=2",
        "evaluation.every=null",
        "evaluation.tokens=256",
    ]
    rest = [
        "optimizer.warmup=1",
        "checkpoint.every=2",
        "instruments.depth=null",
        f"runs={tmp_path}",
    ]
    losses = []
    for kernels in ("triton", "reference"):
        run(
            "train.py",
            "experiment=demo",
            *few,
            *rest,
            f"kernels={kernels}",
            f"name={kernels}",
            limit=1800,
        )
        losses.append([record["loss"] for record in comparable(tmp_path / kernels)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
