"""How much memory a run takes on each rank.

One micro-batch is run on the meta device, where nothing is computed. So what a forward and a
backward pass keep is what the model, its residual path and its activation checkpointing really
keep. Only attention is replaced, by something that saves what every fused kernel saves. A compiled
model keeps less. Not counted: the context and the fragmentation of CUDA (a few percent), and
temporaries of the optimizer, which come when activations are gone.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lrattnres.config import AC, Compile, ConfigError, TrainConfig
from lrattnres.config.checks import DTYPES, resolve_device
from lrattnres.distributed.parallel import Parallel, mesh_shape, mode_of, parallelize
from lrattnres.kernels.backends import KERNELS, DepthKernels
from lrattnres.model.attention import BACKENDS, AttentionBackend
from lrattnres.model.head import LossForm, choose_loss
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.optim.build import build_optimizer
from lrattnres.residual.base import path_of
from lrattnres.training.instruments import transformer_blocks
from lrattnres.training.machine import proc_bytes

META = torch.device("meta")
GB = 1e9


class Alive(TorchDispatchMode):
    """A context that counts the bytes of the storages that operations make, while they exist.

    Attributes:
        peak: The most bytes at one time, exact to 2%.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most = 0  # bytes that would exist if nothing had been freed since the last count
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                known = self._storages.get(storage._cdata)
                if known is None or known[0].expired():
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                    self._most += storage.nbytes()
        if self._most > 1.02 * self.peak:
            self.bytes()
        return result

    def bytes(self) -> int:
        """Bytes of the storages that exist now."""
        self._storages = {
            key: entry for key, entry in self._storages.items() if not entry[0].expired()
        }
        self._most = sum(size for _, size in self._storages.values())
        self.peak = max(self.peak, self._most)
        return self._most


@dataclass(frozen=True)
class Memory:
    """Bytes on each rank.

    Attributes:
        weights, gradients, moments: Of this rank's shards, float32.
        gathered: Whole units that are in use at the same time.
        activations: The most that forward and backward pass keep of one micro-batch.
        sources: The part of `activations` that the residual path reads from.
    """

    weights: int
    gradients: int
    moments: int
    gathered: int
    activations: int
    sources: int

    @property
    def total(self) -> int:
        """All of them but `sources`, which are a part of `activations`."""
        return self.weights + self.gradients + self.moments + self.gathered + self.activations


def estimate_memory(config: TrainConfig, world: int) -> Memory:
    """The memory of a run; takes seconds for the paper's model.

    Args:
        config: Checked and resolved.
        world: Number of ranks.
    """
    model = _on_meta(config)
    state = build_optimizer(model, config.optimizer, config.steps).tensors().values()
    whole, moments = (sum(t.nbytes for t in tensors) for tensors in (model.parameters(), state))
    shards = (mesh_shape(mode_of(config, world), world, config.parallel.shard_degree) or (1,))[-1]
    activations, sources = _measure(model, config, world)
    return Memory(
        weights=-(-whole // shards),
        gradients=-(-whole // shards),
        moments=-(-moments // shards),
        gathered=_gathered(model, config) if world > 1 else 0,
        activations=activations,
        sources=sources,
    )


def _on_meta(config: TrainConfig) -> Transformer:
    """The model of a run on the meta device, not compiled."""
    eager = dataclasses.replace(config, compile=Compile.off)
    return build_model(
        config.model,
        seed=None,
        device=META,
        attention=AttentionBackend(
            "estimate",
            lambda *_: None,
            lambda *qkvm: Fused.apply(*qkvm[:3]),
            BACKENDS["sdpa"].obstacle,
        ),
        dtype=DTYPES[config.precision],
        kernels=_kernels(config),
        loss=_loss(config),
        prepare=lambda model: parallelize(model, eager, Parallel()),
    )


def _kernels(config: TrainConfig) -> DepthKernels:
    """The kernels of a run.

    For `compiled` it is the reference, which is what is compiled: what compiled code keeps is not
    known.
    """
    compiled = config.compile is not Compile.off
    device, dtype = resolve_device(config.device), DTYPES[config.precision]
    chosen = path_of(config.model).choose_kernels(
        config.model, config.kernels.name, device, dtype, compiled=compiled
    )
    return KERNELS["reference"] if chosen.name == "compiled" else chosen


def _loss(config: TrainConfig) -> LossForm:
    """How a run computes head and losses, not compiled."""
    compiled = config.compile is not Compile.off
    tokens, vocabulary = config.micro_batch * config.model.context, config.model.vocabulary
    chosen = choose_loss(config.loss.name, META, tokens, vocabulary, compiled=compiled)
    return chosen._replace(compiled=False)


def _measure(model: Transformer, config: TrainConfig, world: int) -> tuple[int, int]:
    """Runs one forward and backward pass on the meta device.

    Returns:
        Bytes: the most at one time besides weights and gradients; and what the residual path
        carries from site to site.
    """
    size = (min(config.micro_batch, max(1, config.global_batch // world)), config.model.context)
    carried = 0

    def observe(site: int, state: Any) -> None:
        nonlocal carried
        parts = {id(part): part for part in tree_leaves(state) if isinstance(part, Tensor)}
        carried = max(carried, sum(part.nbytes for part in parts.values()))

    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    with Alive() as alive:
        tokens = torch.zeros(size, dtype=torch.int64, device=META)
        objective = model(tokens, None, observe, None, tokens, config.z_loss)
        (objective.total / tokens.numel()).backward()
        alive.bytes()
    return alive.peak, carried


def _gathered(model: Transformer, config: TrainConfig) -> int:
    """Bytes of what is whole on a rank at one time.

    They are the embedding (float32), the head, and some transformer blocks.
    """
    sizes = [sum(p.numel() for p in block) for block in transformer_blocks(model)]
    together = len(sizes)
    if config.parallel.reshard:
        together = min(together, 2 + config.parallel.prefetch)
    size = DTYPES[config.precision].itemsize
    return 4 * model.embedding.weight.numel() + size * (
        model.head.weight.numel() + together * max(sizes)
    )


class Fused(torch.autograd.Function):
    """Saves what a fused attention saves, and computes nothing.

    It saves queries, keys, values, the result, and a float32 logsumexp for each head and position.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = torch.empty_like(value, memory_format=torch.contiguous_format)
        ctx.save_for_backward(
            query, key, value, result, torch.empty(query.shape[:3], device=query.device)
        )
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(part) for part in ctx.saved_tensors[:3])


def check_memory(config: TrainConfig, world: int, available: float, machine: str) -> Memory:
    """Estimates the memory of a run, and refuses a run that is too large.

    Args:
        config: Checked and resolved.
        world: Number of ranks.
        available: Bytes for one rank.
        machine: Their owner, for the message.

    Returns:
        The estimate.

    Raises:
        ConfigError: It needs more. The message has settings that would fit.
    """
    memory = estimate_memory(config, world)
    # A compiled model does not keep all that is counted; it is refused only for what is certain.
    certain = (
        memory.total
        if config.compile is Compile.off
        else memory.total - memory.activations + memory.sources
    )
    if certain <= available:
        return memory
    fitting = (
        words
        for words, other, ranks in _smaller(config, world)
        if estimate_memory(other, ranks).total <= available
    )
    remedies = list(itertools.islice(fitting, 3))
    hint = (
        "any of these would fit: " + "; ".join(remedies)
        if remedies
        else "nothing makes it fit; write a smaller model"
    )
    kept = memory.weights + memory.gradients + memory.moments
    raise ConfigError(
        [
            f"micro_batch={config.micro_batch}: a rank needs {memory.total / GB:.1f} GB "
            f"({memory.activations / GB:.1f} for activations, {kept / GB:.1f} for weights, "
            f"gradients and moments), and {machine} has {available / GB:.1f} GB for it; {hint}"
        ]
    )


def _smaller(config: TrainConfig, world: int) -> Iterator[tuple[str, TrainConfig, int]]:
    """Settings that need less memory, from the nearest to the furthest.

    Yields:
        What to write; the whole configuration; the number of ranks.
    """
    for ac in [ac for ac in (AC.selective, AC.full) if ac is not config.ac]:
        yield f"ac={ac.name}", dataclasses.replace(config, ac=ac), world
    size = config.micro_batch
    while size % 2 == 0:
        size //= 2
        for ac in AC:
            words = f"micro_batch={size}" + (f" ac={ac.name}" if ac is not config.ac else "")
            yield words, dataclasses.replace(config, micro_batch=size, ac=ac), world
    elsewhere = resolve_device(config.device).type != "cpu"  # CPU ranks would share the memory
    for ranks in (2 * world, 4 * world, 8 * world) if elsewhere else ():
        if (
            config.global_batch % ranks == 0
            and config.parallel.shard_degree is None
            and not config.model.tied
        ):
            yield f"{ranks} ranks instead of {world}", config, ranks


def available_memory(device: torch.device) -> tuple[float, str]:
    """The memory that one rank may use: 95% of a GPU, or an equal share of what the host has free.

    Returns:
        Bytes, and the name of their owner.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return 0.95 * total, torch.cuda.get_device_name(device)
    free = proc_bytes("meminfo", "MemAvailable")
    return free / int(os.environ.get("LOCAL_WORLD_SIZE", 1)), "this machine"
