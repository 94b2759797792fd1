"""Muon over real ranks against one process: weights, moments, and each rank's share of the work."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from lrattnres.config import ModelConfig, OptimizerConfig
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.optim import muon, sharding
from lrattnres.optim.build import RunOptimizer, build_optimizer
from tests.distributed.launch import launch

STEPS = 6
CONFIG = OptimizerConfig(muon_lr=0.02, adam_lr=0.01, warmup=3, momentum_rise=2, momentum_fall=2)
# Matrices of 66, 26, 54 and 4 rows: over 3 ranks some shards are short, one is empty.
UNEVEN = ModelConfig(
    residual="p_lr",
    rank=4,
    blocks=2,
    layers=3,
    dim=22,
    heads=1,
    mlp_width=27,
    context=8,
    vocabulary=31,
)
EVEN = ModelConfig(
    residual="s_lr",
    rank=4,
    blocks=None,
    layers=4,
    dim=16,
    heads=2,
    mlp_width=24,
    context=8,
    vocabulary=32,
)
ADAM = ("embedding.weight", "head.weight", "router.queries")


def build(config: ModelConfig) -> Transformer:
    return build_model(
        config, seed=3, device=torch.device("cpu"), attention=BACKENDS["sdpa"], dtype=torch.float32
    )


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    """As a run does it: pairs of sub-layers are units, the rest belongs to the root."""
    for pair in zip(model.sublayers[::2], model.sublayers[1::2], strict=True):
        fully_shard(list(pair), mesh=mesh)
    fully_shard(model, mesh=mesh)


def give_gradients(model: Transformer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in model.parameters():
        gradient = 0.1 * torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def train(model: Transformer, optimizer: RunOptimizer) -> dict[str, Tensor]:
    """All parameters and moments after some steps, whole."""
    for step in range(STEPS):
        give_gradients(model, step)
        optimizer.set_step(step)
        optimizer.step()
    tensors = dict(model.named_parameters()) | optimizer.tensors()
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def differences(
    rank: int, shape: tuple[int, ...], sharded: bool
) -> tuple[dict[str, float], int, int]:
    """Name -> largest difference from one process, if any; number of names; least rows."""
    model, alone, mesh = build(UNEVEN), build(UNEVEN), mesh_of(shape)
    expected = train(alone, build_optimizer(alone, CONFIG, STEPS))
    if sharded:
        shard(model, mesh)
    result = train(model, build_optimizer(model, CONFIG, STEPS, None if sharded else mesh))
    smallest = min(len(sharding.local(parameter.detach())) for parameter in model.parameters())
    different = {name: (expected[name] - result[name]).abs().max().item() for name in expected}
    return {name: most for name, most in different.items() if most}, len(expected), smallest


@pytest.mark.parametrize(
    ("shape", "sharded"),
    [((2,), True), ((3,), True), ((4,), True), ((2, 2), True), ((2, 1), True), ((2,), False)],
    ids=["fsdp 2", "fsdp 3", "fsdp 4", "hsdp 2x2", "replicas 2x1", "whole on 2"],
)
def test_every_update_is_that_of_one_process(shape: tuple[int, ...], sharded: bool) -> None:
    """Muon to the bit. So is Adam, but for the last few entries of a shard.

    Torch's CPU kernel takes what does not fill a vector register by other instructions, which round
    otherwise, and a shard ends elsewhere than the whole does.
    """
    results = launch(differences, torch.Size(shape).numel(), shape, sharded)
    for different, count, _ in results:
        assert count > 30
        assert all(name.startswith(ADAM) and most < 1e-8 for name, most in different.items()), (
            different
        )
        assert sharded or not different
    if shape == (3,):
        assert min(smallest for *_, smallest in results) == 0


def differences_in_half(rank: int) -> dict[str, float]:
    """As on CUDA, where the iteration runs, and its result travels, in bfloat16."""
    muon.iteration_dtype = lambda device: torch.bfloat16
    return differences(rank, (2,), True)[0]


def test_nothing_is_lost_when_results_travel_in_bfloat16() -> None:
    for different in launch(differences_in_half, 2):
        assert all(name.startswith(ADAM) for name in different)


def measure(rank: int, shape: tuple[int, ...]) -> dict[str, int]:
    """One step's work as the optimizer tells it, beside what the step is seen to do."""
    model = build(EVEN)
    if shape != (1,):
        shard(model, mesh_of(shape))
    optimizer = build_optimizer(model, CONFIG, STEPS)
    sent, collective = 0, distributed.all_to_all_single

    def counted(
        output: Tensor, rows: Tensor, received: list[int], given: list[int], **how: Any
    ) -> Any:
        nonlocal sent
        sent += (sum(given) - given[rank]) * rows.shape[1] * rows.element_size()
        return collective(output, rows, received, given, **how)

    distributed.all_to_all_single = counted
    give_gradients(model, 0)
    with FlopCounterMode(display=False) as counter:
        optimizer.set_step(0)
        optimizer.step()
    return optimizer.work() | {"seen_flops": counter.get_total_flops(), "seen_bytes": sent}


def test_work_and_bytes_of_a_rank_fall_with_the_ranks() -> None:
    matrices = [
        parameter.numel()
        for name, parameter in build(EVEN).named_parameters()
        if name.startswith("sublayers")
    ]
    size, whole = 4 * sum(matrices), launch(measure, 1, (1,))[0]
    assert (
        whole["matrices"] == len(matrices) == 16 and whole["bytes_sent"] == whole["seen_bytes"] == 0
    )
    for shape in ((2,), (4,), (2, 2)):
        world, shards = torch.Size(shape).numel(), shape[-1]
        # A rank's rows of the matrices that its replica owns, but for those it owns itself; then a
        # copy of each matrix it owns to every replica, but for the rows that it keeps.
        there, back = (
            Fraction(shards - 1, shards * world),
            Fraction(world // shards, world) - Fraction(1, shards * world),
        )
        for rank in launch(measure, world, shape):
            assert rank["matrices"] == 16 / world
            assert rank["flops"] == rank["seen_flops"] == whole["seen_flops"] / world
            assert rank["bytes_sent"] == rank["seen_bytes"] == size * (there + back)
            assert shape == (2, 2) or rank["bytes_sent"] < 2 * size / world


def test_owners_have_equal_work() -> None:
    assert sharding.owners([5, 1, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 1, 1]
    for costs, world in product(([7, 7, 7, 3, 3, 2], [1] * 9, [4]), (1, 2, 3, 5)):
        chosen = sharding.owners(costs, world)
        load = [
            sum(cost for cost, rank in zip(costs, chosen, strict=True) if rank == here)
            for here in range(world)
        ]
        assert max(load) <= Fraction(4, 3) * max(Fraction(sum(costs), world), max(costs))


def refusals(rank: int) -> list[str]:
    said = []
    for placements in ([Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]):
        mesh = init_device_mesh("cpu", (2,) if len(placements) == 1 else (1, 2))
        tensor = distribute_tensor(torch.ones(4, 4), mesh, placements)
        with pytest.raises(ValueError) as fault:
            sharding.layout(tensor)
        said.append(str(fault.value))
    return said


def test_other_placements_are_refused() -> None:
    assert all("use Shard(0) and Replicate()" in text for text in launch(refusals, 2)[0])


def test_staggered_tasks_each_are_one_stage_behind() -> None:
    seen: list[str] = []

    def task(name: str) -> Any:
        for stage in "123":
            seen.append(name + stage)
            if stage != "3":
                yield

    sharding.staggered(map(task, "abcd"), alive=3)
    assert seen == ["a1", "b1", "a2", "c1", "b2", "a3", "d1", "c2", "b3", "d2", "c3", "d3"]
    seen.clear()
    sharding.staggered(map(task, "ab"), alive=1)
    assert seen == ["a1", "a2", "a3", "b1", "b2", "b3"]
