"""A run that starts from given weights starts with their loss, and moves routing at a rate of its
own.
"""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch

import lrattnres
from lrattnres.config import ConfigError, ModelConfig, OptimizerConfig
from lrattnres.config.commands import ConvertConfig, ExportConfig
from lrattnres.data.dataset import open_dataset
from lrattnres.entry import settings, started_from
from lrattnres.exchange.convert import convert
from lrattnres.exchange.export import export_run
from lrattnres.exchange.folder import write_model
from lrattnres.model.attention import BACKENDS
from lrattnres.model.loss import window_losses
from lrattnres.model.transformer import build_model
from lrattnres.optim.build import build_optimizer
from lrattnres.runs.folder import RunFolder
from tests.data.test_pretrained_tokenizer import byte_level_tokenizer
from tests.test_cli import comparable, run

SIZES = {"layers": 2, "dim": 16, "heads": 2, "mlp_width": 24, "context": 32, "vocabulary": 257}


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    """A baseline with weights far from their start."""
    config = ModelConfig("baseline", None, None, **SIZES)
    model = build_model(
        config, seed=0, device=torch.device("cpu"), attention=BACKENDS["sdpa"], dtype=torch.float32
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    path = tmp_path_factory.mktemp("given")
    write_model(
        path, config, model.state_dict(), "", tokenizer="bytes", separator=256, ends=[256], step=0
    )
    return path


def test_another_residual_path_starts_at_the_loss_of_the_model_it_was_made_of(
    given: Path, texts: Path, tmp_path: Path
) -> None:
    words = ["model.residual=attn_res", "model.gate=true"]
    convert(settings(ConvertConfig, [f"source={given}", f"out={tmp_path}/model", *words]))
    data = ["tokenizer=bytes", "data=files", f"data.root={texts}", f"runs={tmp_path}", "name=run"]
    size = [
        "steps=2",
        "global_batch=8",
        "micro_batch=8",
        "optimizer.warmup=1",
        "instruments.log=1",
        "threads=1",
    ]
    machine = ["device=cpu", "precision=float32", "evaluation.tokens=300", "instruments.depth=null"]
    run("train.py", "experiment=finetune", f"initial={tmp_path}/model", *data, *size, *machine)
    baseline, dataset = lrattnres.load(given), open_dataset(RunFolder.read_config(tmp_path / "run"))
    with torch.no_grad(), closing(dataset.streams()) as streams:
        sums = window_losses(baseline, streams.next_batch(), 256, documents=True).sums()
    assert sums.cross_entropy / sums.tokens > 5
    assert comparable(tmp_path / "run")[0]["loss"] == pytest.approx(
        (sums.cross_entropy / sums.tokens).item(), abs=1e-5
    )
    identity = json.loads((tmp_path / "run" / "identity.json").read_text())
    assert len(identity["initial weights"]) == 64


def test_a_pretrained_model_is_trained_further_with_its_own_tokenizer(
    texts: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="the model is made by transformers")
    words = byte_level_tokenizer(["the router reads what every layer wrote"] * 9, tmp_path / "qwen")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    tokens = {
        "vocab_size": words.get_vocab_size() + 3,
        "bos_token_id": None,
        "eos_token_id": words.token_to_id("<|end|>"),
    }
    more = {"num_key_value_heads": 1, "max_position_embeddings": 32, **tokens}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **more)).save_pretrained(
        tmp_path / "qwen"
    )
    paths = [f"source={tmp_path}/qwen", f"out={tmp_path}/model"]
    convert(settings(ConvertConfig, [*paths, "model.residual=delta", "model.blocks=2"]))
    data = [
        "data=files",
        f"data.root={texts}",
        f"runs={tmp_path}",
        "name=run",
        "device=cpu",
        "precision=float32",
    ]
    size = [
        "steps=3",
        "global_batch=4",
        "micro_batch=4",
        "optimizer.warmup=1",
        "threads=1",
        "evaluation.tokens=200",
    ]
    run(
        "train.py",
        "experiment=finetune",
        f"initial={tmp_path}/model",
        *data,
        *size,
        "instruments.depth=null",
    )
    export_run(settings(ExportConfig, [f"run={tmp_path}/run", f"out={tmp_path}/after"]))
    first, last = lrattnres.load(tmp_path / "model"), lrattnres.load(tmp_path / "after")
    assert (
        not torch.equal(first.head.weight, last.head.weight)
        and (tmp_path / "after" / "tokenizer.json").is_file()
    )
    assert json.loads((tmp_path / "after" / "config.json").read_text())[
        "eos_token_id"
    ] == words.token_to_id("<|end|>")


def test_the_given_model_decides_the_model(given: Path) -> None:
    values = {"initial": str(given), "tokenizer": {"name": "bytes"}, "model": {"layers": 9}}
    assert started_from(values, ["experiment=finetune", "++seed=1"])["model"]["layers"] == 2
    assert started_from({"initial": None, "model": 1}, ["++model.rank=3"]) == {
        "initial": None,
        "model": 1,
    }
    with pytest.raises(ConfigError) as refusal:
        started_from(
            values | {"tokenizer": {"name": "gpt2"}}, ["++model.rank=3", "model=demo", "++name=a"]
        )
    assert len(refusal.value.errors) == 3 and "write tokenizer=bytes" in str(refusal.value)
    with pytest.raises(ConfigError, match="initial: not set; write initial=DIR"):
        started_from({"initial": "???"}, [])
    with pytest.raises(ConfigError, match=r"initial=/not/there: .*write a folder"):
        started_from({"initial": "/not/there"}, [])


@pytest.mark.parametrize("routing_lr", [None, 0.004])
def test_routing_moves_at_its_own_rate(routing_lr: float | None) -> None:
    config = ModelConfig("delta", None, 2, **SIZES, gate=True)
    model = build_model(
        config, seed=0, device=torch.device("cpu"), attention=BACKENDS["sdpa"], dtype=torch.float32
    )
    settings = OptimizerConfig(
        muon_lr=0.01,
        adam_lr=0.0005,
        routing_lr=routing_lr,
        warmup=2,
        warmdown=0.0,
        momentum_rise=0,
        momentum_fall=0,
    )
    optimizer = build_optimizer(model, settings, steps=10)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.set_step(0)
    optimizer.step()
    # Adam's first step is the learning rate in the direction of the sign, and the warm-up is at a
    # half.
    for name, rate in {
        "embedding.weight": 0.0005,
        "router.queries": routing_lr or 0.0005,
        "router.gates": routing_lr or 0.0005,
    }.items():
        moved = (model.get_parameter(name) - before[name]).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, rate / 2), rtol=1e-3, atol=1e-6)
