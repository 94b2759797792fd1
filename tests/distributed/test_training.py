"""One run on several ranks is the run of one process: losses, norms, batches and weights, for every
variant and mesh.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor

from lrattnres.config.checks import resolve
from lrattnres.data.dataset import open_dataset
from lrattnres.distributed.parallel import parallelize, start_parallel
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import build_model
from lrattnres.residual.base import paths
from lrattnres.training.trainer import Trainer
from tests.config.test_config import composed
from tests.distributed.launch import launch

CPU = torch.device("cpu")
MESHES = {
    "fsdp 2": (2, ["parallel.mode=auto"]),
    "fsdp 4": (4, ["parallel.mode=fsdp"]),
    "hsdp 2x2": (4, ["parallel.mode=hsdp", "parallel.shard_degree=2"]),
    "ddp 2": (2, ["parallel.mode=ddp"]),
}
# Learning rates that leave ten steps comparable, and a batch that is cut twice a rank for two ranks
# and once for four.
SETTINGS = [
    "steps=10",
    "micro_batch=2",
    "z_loss=0.01",
    "optimizer.warmup=2",
    "optimizer.clip=0.5",
    "evaluation.tokens=500",
]
# Maps that begin at zero have tiny gradients, of which Adam makes steps of full size: at this width
# what is rounded grows about tenfold with every step, in float64 too.
TAMED = {"mudd": ["optimizer.routing_lr=1e-4"]}


def build(settings: list[str]) -> Trainer:
    config, _ = resolve(composed(*settings))
    parallel = start_parallel(config)
    model = build_model(
        config.model, seed=0, device=CPU, attention=BACKENDS["sdpa"], dtype=torch.float32,
        prepare=lambda model: parallelize(model, config, parallel),
    )  # fmt: skip
    records: list[dict] = []
    trainer = Trainer(
        config, open_dataset(config), model, None, flops_per_token=1.0, peak_flops=1.0,
        write=records.append, say=print, parallel=parallel,
    )  # fmt: skip
    trainer.records, trainer.save = records, lambda: None
    return trainer


def mask_unevenly(trainer: Trainer) -> None:
    """Takes targets away by the number of the stream, so that every rank has another count."""
    next_batch = trainer.streams.next_batch

    def masked() -> torch.Tensor:
        windows = next_batch()
        for row, stream in enumerate(trainer.streams.owned):
            if stream % 3:
                windows[row, 4 * stream :] = -100
        return windows

    trainer.streams.next_batch = masked


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def ten_steps(
    rank: int, settings: list[str]
) -> tuple[list[dict], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(records, weights before, weights after), whole."""
    trainer = build(settings)
    mask_unevenly(trainer)
    before = {name: whole(tensor).clone() for name, tensor in trainer.model.state_dict().items()}
    assert trainer.fit()
    return (
        trainer.records,
        before,
        {name: whole(tensor).clone() for name, tensor in trainer.model.state_dict().items()},
    )


def assert_same_run(settings: list[str], world: int, extra: list[str], atol: float = 1e-4) -> None:
    records, before, after = ten_steps(0, settings)
    for found, weights, trained in launch(
        ten_steps, world, settings + extra, group=False, limit=120
    ):
        assert all(torch.equal(tensor, weights[name]) for name, tensor in before.items())
        assert [record["batch_hash"] for record in found] == [
            record["batch_hash"] for record in records
        ]
        assert [record["tokens"] for record in found] == [record["tokens"] for record in records]
        for one, other in zip(records, found, strict=True):
            assert one.keys() == other.keys()
            for name in ("loss", "z_loss", "grad_norm", "val_loss"):
                if name in one:
                    assert other[name] == pytest.approx(one[name], rel=1e-5), (one["step"], name)
            for name in ("hidden_norm", "effective_sources", "block_grad_norm"):
                values = [[value or 0 for value in record.get(name, ())] for record in (one, other)]
                assert values[1] == pytest.approx(values[0], rel=1e-4), (one["step"], name)
        for name, tensor in after.items():
            torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=atol, msg=name)


QUICK = [("s_lr", "fsdp 2"), ("p_lr", "hsdp 2x2")]


@pytest.mark.parametrize(("residual", "mesh"), QUICK)
def test_ranks_train_as_one_process_does(tiny_run, residual: str, mesh: str) -> None:
    world, extra = MESHES[mesh]
    assert_same_run(
        tiny_run(*SETTINGS, f"model.residual={residual}", "instruments.gradients=5"), world, extra
    )


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["null", "4"])
@pytest.mark.parametrize("residual", list(paths()))
@pytest.mark.parametrize("mesh", list(MESHES))
def test_every_variant_and_mesh(tiny_run, mesh: str, residual: str, blocks: str) -> None:
    world, extra = MESHES[mesh]
    chosen = [f"model.residual={residual}", f"model.blocks={blocks}", *TAMED.get(residual, [])]
    assert_same_run(tiny_run(*SETTINGS, *chosen), world, extra)


@pytest.mark.slow
def test_matrices_of_a_path_that_muon_updates(tiny_run) -> None:
    """The first site's streams are equal, so its gradient lacks ranks, and what is rounded there
    Muon makes as large as the rest.
    """
    world, extra = MESHES["fsdp 2"]
    chosen = ["model.residual=mhc", "model.path.projections=muon"]
    assert_same_run(tiny_run(*SETTINGS, *chosen), world, extra, atol=1e-3)
