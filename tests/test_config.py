"""What the configuration refuses, and that it names every fault at once, with its key, its value and a remedy."""

import csv
import dataclasses

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from lrattnres.checks import BOUNDS, resolve
from lrattnres.config import ConfigError, EvalConfig, TokenizeConfig, TrainConfig, defaults, fields_of, flatten, parse, plain
from lrattnres.depth.router import VARIANTS
from lrattnres.entry import loosened, run_name
from tests.paths import CONFIGS, ROOT

DEMO = ("experiment=demo", "name=test")


def composed(*overrides: str) -> TrainConfig:
    """What the command line would hand over, before it is checked."""
    ConfigStore.instance().store(name="train_schema", node=defaults(TrainConfig))
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        tree = compose("train", loosened(overrides, CONFIGS))
    return parse(TrainConfig, OmegaConf.to_container(tree, resolve=True))


def faults(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        resolve(composed(*DEMO, *overrides))
    return refusal.value.faults


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.rank=129", ["model.rank=129", "between 1 and model.dim=128"]),
        ("model.rank=0", ["model.rank=0", "between 1 and model.dim=128"]),
        ("model.rank=abc", ["model.rank=abc", "a whole number or null"]),
        ("model.rank=None", ["model.rank=None", "write model.rank=null"]),
        ("model.rank=null", ["model.rank=null", "write model.rank="]),
        ("model.rank=1.5", ["model.rank=1.5", "a whole number"]),
        ("model.blocks=13", ["model.blocks=13", "2*model.layers=12"]),
        ("model.blocks=0", ["model.blocks=0", "null makes every sub-layer a source"]),
        ("model.heads=3", ["model.dim=128", "model.heads=3"]),
        ("model.heads=128", ["model.heads=128", "1 dimensions", "even"]),
        ("model.vocabulary=256", ["model.vocabulary=256", "257", "null"]),
        ("micro_batch=5", ["micro_batch=5", "global_batch=16", "micro_batch=4"]),
        ("model.residual=slr", ["model.residual=slr", "baseline, attn_res, p_lr, s_lr, delta", "did you mean s_lr"]),
        ("model.routing=plus", ["model.routing=plus", "replace, add"]),
        ("compile=no", ["compile=no", "off, model, regions"]),
        ("attention=fast", ["attention=fast", "auto, flash, varlen, flex, sdpa"]),
        ("documents=no", ["documents=no", "true or false"]),
        ("model.rnak=3", ["model.rnak=3", "no such key", "did you mean model.rank"]),
        ("sed=3", ["sed=3", "no such key", "did you mean seed"]),
        ("optimizer.muon_lr=fast", ["optimizer.muon_lr=fast", "a number"]),
        ("optimizer.warmup=290", ["optimizer.warmup=290", "steps=300"]),
        ("optimizer.iterations=6", ["optimizer.iterations=6", "newton_schulz"]),
        ("data.holdout=0", ["data.holdout=0", "between 0 and 1"]),
        ("data.root=x", ["data.root=x", "data=files"]),
        ("data=files", ["data.root=null", "write data.root="]),
        ("data=tokens", ["data.root=null", "scripts/tokenize_corpus.py"]),
        ("data.min_score=0.5", ["data.min_score=0.5", "docstrings", "null"]),
        ("data.max_tokens=5", ["data.max_tokens=5", "data=tokens"]),
        ("data.revision=main", ["data.revision=main", "only the hub"]),
        ("data.workers=-1", ["data.workers=-1", "between 0 and 256"]),
        ("resume=last", ["resume=last", "auto, none"]),
        ("seed=-1", ["seed=-1", "between 0 and"]),
        ("steps=0", ["steps=0", "at least 1"]),
        ("evaluation.tokens=0", ["evaluation.tokens=0", "at least 1"]),
        ("attention=flex", ["attention=flex", "no backward", "attention=sdpa"]),
    ],
)
def test_a_fault_names_key_value_and_remedy(override: str, words: list[str]) -> None:
    if override == "attention=flex" and torch.cuda.is_available():
        pytest.skip("flex trains on a GPU")
    (fault,) = faults(override)
    for word in words:
        assert word in fault


def test_all_faults_come_at_once() -> None:
    typed = faults("model.rank=abc", "compile=no", "foo=1", "model.layrs=2")
    assert len(typed) == 4
    crossed = faults("model.rank=500", "model.blocks=99", "micro_batch=7", "data.holdout=2")
    assert len(crossed) == 4


def test_without_a_gpu_the_paper_says_what_runs_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="experiment=demo"):
        resolve(composed("name=x"))


def test_the_default_is_the_papers_run() -> None:
    config = composed("name=x", "device=cpu")
    resolved, notes = resolve(config)
    model = resolved.model
    assert (model.residual, model.blocks, model.rank) == ("s_lr", 8, 64)
    assert (model.layers, model.dim, model.heads, model.mlp_width) == (24, 1024, 16, 2816)
    assert (model.context, model.vocabulary, model.rope_base, model.init_std) == (2048, 100_277, 500_000, 0.02)
    assert (config.steps, config.global_batch * model.context, config.z_loss) == (38_146, 262_144, 1e-5)
    optimizer = config.optimizer
    assert (optimizer.muon_lr, optimizer.adam_lr, optimizer.warmup, optimizer.warmdown) == (1e-3, 3e-4, 2000, 0.2)
    assert (optimizer.momentum, optimizer.momentum_low, optimizer.momentum_rise, optimizer.momentum_fall) == (
        0.95,
        0.85,
        300,
        100,
    )
    assert (optimizer.muon_weight_decay, optimizer.adam_beta1, optimizer.adam_beta2, optimizer.clip) == (0.1, 0.9, 0.95, 1.0)
    assert (optimizer.final, optimizer.cautious, optimizer.iterations) == (0.1, True, 5)
    assert config.evaluation.tokens == 200_000_000 and config.evaluation.diagnostics_tokens == 1_000_000
    assert config.documents and notes == []


@pytest.mark.parametrize("residual", list(VARIANTS))
def test_every_variant_composes_and_records_what_it_uses(residual: str) -> None:
    config, notes = resolve(composed(*DEMO, f"model.residual={residual}", "model.routing=add"))
    keys = VARIANTS[residual].keys
    assert (config.model.rank is None) == (keys is None or not keys.ranked)
    assert (config.model.blocks is None) == (config.model.routing is None) == (keys is None)
    unused = [name for name in ("rank", "blocks", "routing") if getattr(config.model, name) is None]
    assert len(notes) == len(unused)
    for name, note in zip(unused, notes, strict=True):
        assert f"model.{name}" in note and residual in note


@pytest.mark.parametrize("group", ["model", "data", "tokenizer", "optimizer", "logger", "experiment"])
def test_every_shipped_choice_is_possible(group: str, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for file in sorted((CONFIGS / group).glob("*.yaml")):
        extra = [f"data.root={tmp_path}"] if file.stem in ("files", "tokens") else []
        if group == "tokenizer" or group == "data":
            extra.append("model.vocabulary=null")
        resolve(composed("name=x", "device=cpu", f"{group}={file.stem}", *extra, "optimizer.warmup=2", "compile=off",
                         "optimizer.momentum_rise=0", "optimizer.momentum_fall=0"))  # fmt: skip


def test_every_field_is_documented_and_bounds_exist() -> None:
    for schema in (TrainConfig, EvalConfig, TokenizeConfig):
        for key, (_, metadata) in fields_of(schema).items():
            assert len(metadata["help"]) > 8, key
    assert set(BOUNDS) <= set(fields_of(TrainConfig))


def test_a_resolved_configuration_survives_its_file() -> None:
    config, _ = resolve(composed(*DEMO))
    text = OmegaConf.to_yaml(OmegaConf.create(plain(config)))
    assert parse(TrainConfig, OmegaConf.to_container(OmegaConf.create(text))) == config


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "demo-s_lr-N4-r16"),
        (["experiment=demo", "++model.residual=s_lr"], "demo-s_lr-N4-r16"),
        (["++seed=2", "++optimizer.muon_lr=0.02"], "demo-s_lr-N4-r16-optimizer.muon_lr=0.02-seed=2"),
        (["++optimizer.muon_lr=0.02", "++seed=2"], "demo-s_lr-N4-r16-optimizer.muon_lr=0.02-seed=2"),
        (["++resume=none", "logger=wandb", "++checkpoint.every=7", "++threads=1"], "demo-s_lr-N4-r16"),
        (["data=files", "++data.root=my texts/a"], "demo-s_lr-N4-r16-data=files-data.root=my_texts_a"),
    ],
)
def test_the_name_follows_from_the_choices(overrides: list[str], name: str) -> None:
    assert run_name("demo", composed(*DEMO), overrides) == name


def test_names_of_variants_differ() -> None:
    config = composed(*DEMO)
    full = dataclasses.replace(config, model=dataclasses.replace(config.model, blocks=None))
    assert run_name("demo", full, []) == "demo-s_lr-full-r16"
    baseline, _ = resolve(composed(*DEMO, "model.residual=baseline"))
    assert run_name("demo", baseline, []) == "demo-baseline"
    long = run_name("demo", config, [f"++k{i}={'x' * 50}" for i in range(9)])
    assert len(long) <= 150 and long != run_name("demo", config, [f"++k{i}={'y' * 50}" for i in range(9)])


def test_only_settings_are_loosened() -> None:
    given = ["model=demo", "model.rank=3", "+table1=glob(*)", "seed=1,2", "-m", "hydra.sweep.dir=x", "~model.rank"]
    assert loosened(given, CONFIGS) == [
        "model=demo", "++model.rank=3", "+table1=glob(*)", "++seed=1,2", "-m", "hydra.sweep.dir=x", "~model.rank",
    ]  # fmt: skip


def test_flatten_names_leaves_by_their_path() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": 1, "a.c": {}, "d": None}


@pytest.mark.parametrize("row", list(csv.DictReader((ROOT / "tests/depth/table1.csv").open())), ids=lambda row: row["row"])
def test_the_rows_of_table_1_are_a_group(row: dict[str, str]) -> None:
    (file,) = (CONFIGS / "table1").glob(f"{row['row']}_*.yaml")
    config, notes = resolve(composed("name=x", "device=cpu", f"+table1={file.stem}"))
    chosen = tuple("" if value is None else str(value) for value in (config.model.blocks, config.model.rank))
    assert (config.model.residual, *chosen) == (row["residual"], row["blocks"], row["rank"]) and notes == []
