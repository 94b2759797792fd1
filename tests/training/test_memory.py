"""Estimates of memory against the tensors of a real pass; and the refusal of what cannot fit."""

import dataclasses

import pytest
import torch

from lrattnres.config import AC, Compile, ConfigError, Device
from lrattnres.config.checks import resolve
from lrattnres.distributed.parallel import Parallel, parallelize
from lrattnres.kernels.backends import KERNELS
from lrattnres.model.attention import BACKENDS
from lrattnres.model.head import LOSSES
from lrattnres.model.loss import window_objective
from lrattnres.model.transformer import build_model
from lrattnres.optim.build import build_optimizer
from lrattnres.residual.base import paths
from lrattnres.training import memory
from lrattnres.training.memory import Alive, check_memory, estimate_memory
from tests.config.test_config import composed
from tests.test_cli import run

SIZE = [
    "model.layers=4",
    "model.dim=64",
    "model.heads=4",
    "model.mlp_width=160",
    "model.context=96",
    "micro_batch=8",
]


def settings(*changes: str):
    return resolve(composed("experiment=demo", "name=x", "documents=false", *SIZE, *changes))[0]


CASES = [(kernels, blocks) for kernels in ("reference", "triton") for blocks in ("4", "null")]
FAST, *SLOW = CASES


@pytest.mark.parametrize(
    ("kernels", "blocks"), [FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
@pytest.mark.parametrize("ac", [mode.name for mode in AC])
@pytest.mark.parametrize("residual", list(paths()))
def test_the_estimate_is_what_a_real_pass_takes(
    residual: str, ac: str, kernels: str, blocks: str
) -> None:
    device = torch.device("cpu")
    if kernels == "triton":
        pytest.importorskip("triton")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = settings(
        f"model.residual={residual}", f"model.blocks={blocks}", f"ac={ac}", f"kernels={kernels}"
    )
    model = build_model(
        config.model, seed=0, device=device, attention=BACKENDS["sdpa"],
        dtype=torch.float32, kernels=KERNELS[kernels], loss=LOSSES["chunked"],
        prepare=lambda model: parallelize(model, config, Parallel()),
    )  # fmt: skip
    optimizer = build_optimizer(model, config.optimizer, config.steps)
    windows = torch.randint(256, (8, 97))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with Alive() as alive:
        window_objective(model, windows, 256, documents=False).total.backward()
        alive.bytes()
    memory = estimate_memory(config, world=1)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert memory.weights == memory.gradients == weights and memory.gathered == 0
    assert memory.moments == sum(tensor.nbytes for tensor in optimizer.tensors().values())
    assert memory.activations == pytest.approx(alive.peak, rel=0.1)
    assert memory.sources < memory.activations


def test_the_kernels_of_the_run_are_counted() -> None:
    """Plain torch keeps h in float32 besides its RMSNorm; Triton's keep a few scalars instead."""
    pytest.importorskip("triton")
    plain, fused = (
        estimate_memory(settings("model.residual=s_lr", "model.blocks=4", f"kernels={kernels}"), 1)
        for kernels in ("reference", "triton")
    )
    tokens, reads = 8 * 96, 8
    saved = plain.activations - fused.activations
    assert 0.5 * reads * tokens * 64 * 4 < saved < 3 * reads * tokens * 64 * 4
    # What is read ahead is carried too.
    assert plain.weights == fused.weights and plain.sources < fused.sources


def test_peaks_are_seen() -> None:
    with Alive() as alive:
        kept = torch.empty(1000)
        for _ in range(3):
            torch.empty(3000)
        kept.view(10, 100).mul_(2)
        assert alive.bytes() == 4000
    assert alive.peak == 16_000


def test_shards_and_source_cache() -> None:
    config = settings("model.residual=p_lr", "model.blocks=2", "model.rank=8", "global_batch=32")
    one, four = estimate_memory(config, 1), estimate_memory(config, 4)
    assert four.weights * 4 == pytest.approx(
        one.weights, abs=4
    ) and four.moments * 4 == pytest.approx(one.moments, abs=4)
    assert four.activations == one.activations and four.gathered > 0
    eight = estimate_memory(
        config, 8
    )  # whose ranks have four windows each, and never a micro-batch of eight
    assert eight.sources == one.sources / 2 and eight.activations < 0.6 * one.activations
    assert one.sources == 4 * 8 * 96 * 3 * (64 + 8)  # the embedding and two blocks: b·K·(d + r)
    replicated = dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, mode=type(config.parallel.mode).ddp)
    )
    assert estimate_memory(replicated, 4).weights == one.weights


def test_a_run_that_cannot_fit_is_refused_with_what_would_fit() -> None:
    config = settings("model.residual=attn_res", "model.blocks=null", "model.layers=2")
    need = estimate_memory(config, 1).total
    assert check_memory(config, 1, need, "a GPU").total == need
    with pytest.raises(ConfigError, match=r"micro_batch=8: .* a GPU has .* would fit: ") as refusal:
        check_memory(config, 1, 0.5 * need, "a GPU")
    for words in str(refusal.value).split("would fit: ")[1].split("; "):
        if "ranks" not in words:
            chosen = settings(
                "model.residual=attn_res", "model.blocks=null", "model.layers=2", *words.split()
            )
            assert estimate_memory(chosen, 1).total <= 0.5 * need, words
    with pytest.raises(ConfigError, match="write a smaller model"):
        check_memory(config, 1, 1000, "a GPU")
    check_memory(
        dataclasses.replace(config, compile=Compile.regions), 1, 0.5 * need, "a GPU"
    )  # may fit once it is fused


def test_the_estimate_is_of_one_of_many_processes() -> None:
    mode = ["parallel.mode=hsdp", "parallel.shard_degree=8"]
    assert "16 x H100" in run("scripts/estimate.py", "experiment=demo", "gpus=16", *mode)
    assert "multiple of the 7 processes" in run(
        "scripts/estimate.py", "experiment=demo", "gpus=7", code=2
    )


def test_train_refuses_before_there_is_a_folder(tiny_run, tmp_path) -> None:
    huge = [
        "model.dim=16384",
        "model.heads=64",
        "model.mlp_width=65536",
        "model.layers=24",
        "micro_batch=1",
    ]
    output = run("train.py", *tiny_run(*huge), code=2)
    assert (
        "a rank needs" in output and "smaller model" in output and not (tmp_path / "runs").exists()
    )


def test_ablations_are_estimated_with_the_kernels_that_take_them() -> None:
    pytest.importorskip("triton", reason="without it auto is reference anyway")
    on_gpu = [
        dataclasses.replace(settings(*words), device=Device.cuda)
        for words in ([], ["model.depth.heads=2"])
    ]
    assert [memory._kernels(config).name for config in on_gpu] == ["triton", "reference"]
