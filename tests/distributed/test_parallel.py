"""Activation checkpointing and compilation: the same gradients, less memory, one graph for equal
sub-layers.
"""

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lrattnres.config import ParallelMode
from lrattnres.config.checks import resolve
from lrattnres.distributed.parallel import Parallel, mesh_shape, parallelize
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import paths
from tests.config.test_config import composed


class Alive(TorchDispatchMode):
    """Bytes of every storage that an operation made and that still is there."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def bytes(self) -> int:
        return sum(size for storage, size in self.storages.values() if not storage.expired())


def prepared(settings: list[str]) -> tuple[Transformer, torch.Tensor]:
    config, _ = resolve(composed(*settings))
    model = build_model(
        config.model, seed=0, device=torch.device("cpu"), attention=BACKENDS["sdpa"],
        dtype=torch.float32, prepare=lambda model: parallelize(model, config, Parallel()),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3
            )
    return model, torch.arange(4 * 32).view(4, 32) % 251


def gradients(settings: list[str]) -> tuple[dict[str, torch.Tensor], int]:
    """(gradients, bytes that the forward pass left for the backward pass)."""
    model, tokens = prepared(settings)
    with Alive() as alive:
        loss = model(tokens, None).square().mean()
        kept = alive.bytes()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, kept


@pytest.mark.parametrize("residual", list(paths()))
def test_recomputation_changes_memory_only(tiny_run, residual: str) -> None:
    settings = tiny_run(f"model.residual={residual}", "model.blocks=null", "model.layers=4")
    expected, everything = gradients(settings)
    kept = [everything]
    for ac in ("selective", "full"):
        found, size = gradients([*settings, f"ac={ac}"])
        kept.append(size)
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert kept[1] < 0.75 * kept[0] and kept[2] < 0.97 * kept[1], kept


@pytest.mark.slow
@pytest.mark.parametrize("ac", ["none", "selective", "full"])
@pytest.mark.parametrize("how", ["model", "regions"])
@pytest.mark.parametrize("residual", ["p_lr", "delta"])
@dynamo.patch(error_on_recompile=True)
def test_compiled_models_are_one_graph_and_stay_so(
    tiny_run, residual: str, how: str, ac: str
) -> None:
    settings = tiny_run(f"model.residual={residual}", "model.layers=4")
    torch._dynamo.reset()
    counters.clear()
    expected, _ = prepared(settings)
    model, tokens = prepared([*settings, f"compile={how}", f"ac={ac}"])
    for _ in range(3):
        loss, truth = (each(tokens, None).square().mean() for each in (model, expected))
        loss.backward()
        truth.backward()
        torch.testing.assert_close(loss, truth)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(
            model.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name
        )
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == (1 if how == "model" else 3)


def test_meshes() -> None:
    assert mesh_shape(ParallelMode.none, 1, None) == ()
    assert mesh_shape(ParallelMode.fsdp, 8, None) == (8,)
    assert mesh_shape(ParallelMode.hsdp, 8, 4) == (2, 4)
    assert mesh_shape(ParallelMode.ddp, 8, None) == (8, 1)
