"""From one model to many ranks: compilation, then activation checkpointing, then shards.

`none` is one process. `fsdp` shards every weight, gradient and moment over all ranks; `hsdp` shards
over `shard_degree` ranks and replicates these sets of ranks; `ddp` is `hsdp` with shards of the
whole. All are FSDP2's `fully_shard` on a device mesh. The router's methods are called, not its
`forward`, so it stays in the root unit; the others are embedding, pairs of sub-layers (attention,
MLP), and head: no `Depth` crosses a boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch._dynamo.config as dynamo
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from lrattnres.config import AC, Compile, ParallelMode, TrainConfig
from lrattnres.config.checks import resolve_device
from lrattnres.distributed.ranks import Ranks, start_ranks
from lrattnres.model.transformer import Transformer


@dataclass(frozen=True)
class Parallel:
    """How a run is spread. mesh: None, ("shard",) or ("replicate", "shard"); mode: never `auto`."""

    ranks: Ranks = field(default_factory=Ranks)
    mesh: DeviceMesh | None = None
    mode: ParallelMode = ParallelMode.none


def start_parallel(config: TrainConfig) -> Parallel:
    """Connects the ranks that torchrun or SLURM started and lays the mesh over them. Collective.

    For a process alone there is nothing to do.
    """
    device = resolve_device(config.device).type
    ranks = start_ranks(device, config.parallel.timeout)
    mode = mode_of(config, ranks.world)
    shape = mesh_shape(mode, ranks.world, config.parallel.shard_degree)
    mesh = (
        init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        if shape
        else None
    )
    return Parallel(ranks, mesh, mode)


def mode_of(config: TrainConfig, world: int) -> ParallelMode:
    """What `auto` means on so many ranks; any other mode is itself."""
    if config.parallel.mode is not ParallelMode.auto:
        return config.parallel.mode
    return ParallelMode.fsdp if world > 1 else ParallelMode.none


def mesh_shape(mode: ParallelMode, world: int, shard_degree: int | None) -> tuple[int, ...]:
    """() without a mesh, (shards,), or (replicas, shards)."""
    return {
        ParallelMode.none: (),
        ParallelMode.fsdp: (world,),
        ParallelMode.hsdp: (world // (shard_degree or 1), shard_degree or 1),
        ParallelMode.ddp: (world, 1),
    }[mode]


def parallelize(model: Transformer, config: TrainConfig, parallel: Parallel) -> None:
    """Compiles, recomputes and shards a model as the settings say, in place.

    Parameters keep their names. Gradients are summed over ranks, not averaged.

    Args:
        model: On the meta device, before there are weights.
        config: Its `compile`, `ac` and `parallel` count.
        parallel: The ranks and their mesh.
    """
    # Regions are compiled before they are wrapped: equal sub-layers then share their code, and a
    # checkpoint runs it twice.
    COMPILE_MODES[config.compile](model)
    AC_MODES[config.ac](model)
    if parallel.mesh is not None:
        _shard(model, config, parallel.mesh)


def _recompute(function: Callable[..., object]) -> Callable[..., object]:
    # Nothing in the model is random.
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


def _selective(model: Transformer) -> None:
    """Sub-layers are recomputed; what the depth reads saved stays: sources, reads, kernels' own."""
    for sublayer in model.sublayers:
        sublayer.forward = _recompute(sublayer.forward)


def _full(model: Transformer) -> None:
    """Only the sources and what each site reads stay; sub-layers, writes and the arithmetic of
    reads are recomputed.
    """
    model.step = _recompute(model.step)  # type: ignore[method-assign]


def _compile_regions(model: Transformer) -> None:
    """Their `forward` alone: the hooks that gather and free shards stay outside of the code.

    Where attention takes keys and values of all blocks before, each block has code of its own.
    """
    dynamo.recompile_limit = max(dynamo.recompile_limit, len(model.sublayers))
    for sublayer in model.sublayers:
        sublayer.forward = torch.compile(sublayer.forward, fullgraph=True)
    if model.head.form.name == "whole":  # a chunk's arithmetic is compiled by itself
        head = model.head
        head.forward = torch.compile(head.forward, fullgraph=True)  # type: ignore[method-assign]


AC_MODES: dict[AC, Callable[[Transformer], None]] = {
    AC.none: lambda model: None,
    AC.selective: _selective,
    AC.full: _full,
}
COMPILE_MODES: dict[Compile, Callable[[Transformer], None]] = {
    Compile.off: lambda model: None,
    Compile.model: lambda model: model.compile(fullgraph=True),
    Compile.regions: _compile_regions,
}


def _shard(model: Transformer, config: TrainConfig, mesh: DeviceMesh) -> None:
    # Sub-layers and head compute in `dtype`, so gathering them in it loses nothing. Embedding and
    # router do not: their gradients sum over tokens in float32, as in one process. Inputs are left
    # alone: rotary angles stay float32.
    half = MixedPrecisionPolicy(
        param_dtype=model.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    single = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    reshard = config.parallel.reshard
    pairs = [list(model.sublayers[i : i + 2]) for i in range(0, len(model.sublayers), 2)]
    fully_shard(model.embedding, mesh=mesh, mp_policy=single, reshard_after_forward=reshard)
    for pair in pairs:
        fully_shard(pair, mesh=mesh, mp_policy=half, reshard_after_forward=reshard)
    fully_shard(
        model.head, mesh=mesh, mp_policy=half, reshard_after_forward=False
    )  # its backward comes next
    fully_shard(model, mesh=mesh, mp_policy=single)
    _prefetch([model.embedding, *(pair[0] for pair in pairs), model.head], config.parallel.prefetch)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _prefetch(units: list[torch.nn.Module], ahead: int) -> None:
    """Each unit asks for the next `ahead` ones, in the order of either pass."""
    for order, name in (
        (units, "set_modules_to_forward_prefetch"),
        (units[::-1], "set_modules_to_backward_prefetch"),
    ):
        for place, unit in enumerate(order):
            getattr(unit, name)(order[place + 1 : place + 1 + ahead])
