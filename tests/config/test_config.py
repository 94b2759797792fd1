"""What the configuration refuses: all errors at once, each with key, value and a remedy."""

import dataclasses
import math

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from lrattnres.commands.config_reference import BESIDE_TRAINING, COMPOSED, OWN
from lrattnres.commands.estimate import EstimateConfig
from lrattnres.config import (
    ConfigError,
    EvalConfig,
    Kernels,
    TokenizeConfig,
    TrainConfig,
    defaults,
    fields_of,
    flatten,
    option,
    parse,
    parse_options,
    plain,
    values_of,
)
from lrattnres.config.checks import checked, resolve
from lrattnres.config.commands import ConvertConfig, ExportConfig, GenerateConfig, InspectConfig
from lrattnres.config.schema import alternatives
from lrattnres.entry import loosened, of_paper, plain_settings, run_name, settings
from lrattnres.kernels.backends import choose_kernels
from lrattnres.residual.base import path_of, paths
from tests.paths import CONFIGS

DEMO = ("experiment=demo", "name=test")


def composed(*overrides: str) -> TrainConfig:
    """What the command line would hand over, before it is checked."""
    ConfigStore.instance().store(name="train_schema", node=defaults(TrainConfig))
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        tree = compose("train", loosened(overrides, CONFIGS))
    return parse(TrainConfig, plain_settings(tree))


def faults(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        resolve(composed(*DEMO, *overrides))
    return refusal.value.errors


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
        ("model.heads=3", ["model.dim=128", "model.heads=3", "write model.heads=2"]),
        ("model.layers=5000", ["model.layers=5000", "between 1 and 4096"]),
        ("model.heads=128", ["model.heads=128", "1 dimensions", "even"]),
        ("model.kv_heads=3", ["model.kv_heads=3", "model.heads=4", "null"]),
        ("model.head_dim=7", ["model.head_dim=7", "write 8"]),
        ("model.rope_scaling.factor=2", ["model.rope_scaling.factor=2", "kind=none"]),
        ("model.norm_eps=-1", ["model.norm_eps=-1", "between 0 and"]),
        ("model.qk_norm=rms", ["model.qk_norm=rms", "plain, gains, none"]),
        ("model.vocabulary=256", ["model.vocabulary=256", "257", "null"]),
        ("micro_batch=5", ["micro_batch=5", "global_batch=16", "micro_batch=4"]),
        (
            "model.residual=slr",
            [
                "model.residual=slr",
                ", ".join(paths()),
                "did you mean s_lr",
            ],
        ),
        ("model.routing=plus", ["model.routing=plus", "replace, add"]),
        ("compile=no", ["compile=no", "off, model, regions"]),
        ("attention=fast", ["attention=fast", "auto, flash3, flash, varlen, flex, sdpa"]),
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
        ("steps=9999999999999999999999", ["steps=9999999999999999999999", "at most"]),
        ("optimizer.muon_lr=nan", ["optimizer.muon_lr=nan", "must be a finite number"]),
        ("optimizer.muon_lr=inf", ["optimizer.muon_lr=inf", "must be a finite number"]),
        ("optimizer.muon_lr=-1", ["optimizer.muon_lr=-1.0", "at least 0"]),
        ("data.holdout=1", ["data.holdout=1.0", "between 0 and 1, both excluded"]),
        ("data.column=body", ["data.column=body", "docstrings", "write data.column=text"]),
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


def test_a_job_that_is_queued_again_does_not_begin_at_one_step_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    (fault,) = faults("cluster.requeue=true", "resume=20")
    assert "resume=20" in fault and "write resume=auto" in fault
    resolve(composed(*DEMO, "cluster.requeue=true"))


def test_a_rank_may_try_no_read_for_longer_than_the_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    streamed = ["data=ultra_fineweb", "tokenizer=cl100k_base"]
    (fault,) = faults(*streamed, "data.retries=12")
    assert "parallel.timeout=600" in fault and "write parallel.timeout=" in fault
    resolve(composed(*DEMO, *streamed))


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
    assert (model.context, model.vocabulary, model.rope_base, model.init_std) == (
        2048,
        100_277,
        500_000,
        0.02,
    )
    assert (config.steps, config.global_batch * model.context, config.z_loss) == (
        38_146,
        262_144,
        1e-5,
    )
    optimizer = config.optimizer
    assert (optimizer.muon_lr, optimizer.adam_lr, optimizer.warmup, optimizer.warmdown) == (
        1e-3,
        3e-4,
        2000,
        0.2,
    )
    assert (
        optimizer.momentum,
        optimizer.momentum_low,
        optimizer.momentum_rise,
        optimizer.momentum_fall,
    ) == (
        0.95,
        0.85,
        300,
        100,
    )
    assert (
        optimizer.muon_weight_decay,
        optimizer.adam_beta1,
        optimizer.adam_beta2,
        optimizer.clip,
    ) == (0.1, 0.9, 0.95, 1.0)
    assert (optimizer.final, optimizer.cautious, optimizer.iterations) == (0.1, True, 5)
    assert (
        config.evaluation.tokens == 200_000_000
        and config.evaluation.diagnostics_tokens == 1_000_000
    )
    assert config.documents and notes == []


@pytest.mark.parametrize("residual", list(paths()))
def test_every_variant_composes_and_records_what_it_uses(residual: str) -> None:
    config, notes = resolve(composed(*DEMO, f"model.residual={residual}", "model.routing=add"))
    uses = path_of(config.model).uses
    for name in ("rank", "blocks", "routing"):
        assert (getattr(config.model, name) is None) == (name not in uses)
    unused = [name for name in ("rank", "blocks", "routing") if getattr(config.model, name) is None]
    assert len(notes) == len(unused)
    for name, note in zip(unused, notes, strict=True):
        assert f"model.{name}" in note and residual in note


@pytest.mark.parametrize(
    "group", ["model", "data", "tokenizer", "optimizer", "logger", "experiment"]
)
def test_every_shipped_choice_is_possible(group: str, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for file in sorted((CONFIGS / group).glob("*.yaml")):
        extra = [f"data.root={tmp_path}"] if file.stem in ("files", "tokens") else []
        if group == "tokenizer" or group == "data":
            extra.append("model.vocabulary=null")
        if file.stem == "pretrained":
            extra += [f"tokenizer.path={tmp_path}", "tokenizer.separator=0", "model.vocabulary=99"]
        short = [f"optimizer.{key}" for key in ("warmup=2", "momentum_rise=0", "momentum_fall=0")]
        shown = [f"{group}={file.stem}", *extra, *short, "compile=off"]
        resolve(composed("name=x", "device=cpu", *shown))


SCHEMAS = dict.fromkeys([*COMPOSED.values(), *OWN.values(), *BESIDE_TRAINING.values()])
SETTINGS = [
    pytest.param(schema, key, id=f"{schema.__name__}.{key}")
    for schema in SCHEMAS
    for key in fields_of(schema)
]
ANY = {str: "x", int: 1, float: 0.5, bool: True}


def told(schema: type, values: dict[str, object]) -> list[str]:
    """What is wrong with these values, of a schema whose others are possible."""
    usual = flatten(defaults(schema))
    needed = {key: alternatives(kind)[0] for key, (kind, _) in fields_of(schema).items()}
    tree = {
        key: ANY[kind] if kind in ANY else next(iter(kind)).name
        for key, kind in needed.items()
        if usual[key] == "???"
    }
    try:
        checked(parse(schema, tree | values))
    except ConfigError as refusal:
        return [
            error
            for error in refusal.errors
            if error.startswith(tuple(f"{key}=" for key in values))
        ]
    return []


@pytest.mark.parametrize(("schema", "key"), SETTINGS)
def test_every_setting_is_documented_and_every_number_has_bounds(schema: type, key: str) -> None:
    kind, metadata = fields_of(schema)[key]
    assert len(metadata["help"]) > 8
    beyond = {int: 10**22, float: math.nan}
    for number in [beyond[part] for part in alternatives(kind) if part in beyond]:
        (error,) = told(schema, {key: number})
        assert "must be at most" in error or "must be between" in error or "finite" in error
    usual = flatten(defaults(schema)).get(key)
    if metadata["limits"] and usual not in (None, "???"):
        assert not told(schema, {key: usual})


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        (EvalConfig, {"tokens": 0, "batch": -1, "limit": 0, "threads": 0, "step": -1}),
        (ExportConfig, {"step": -1}),
        (ConvertConfig, {"context": 0, "seed": -1}),
        (TokenizeConfig, {"workers": 0, "data.holdout": 2.0, "data.timeout": 0.0}),
        (GenerateConfig, {"tokens": 0, "top_p": 2.0, "temperature": -1.0}),
        (InspectConfig, {"first": -1, "shown": 513}),
        (EstimateConfig, {"gpus": 0}),
    ],
)
def test_all_commands_are_checked_alike_and_tell_all_at_once(schema: type, wrong: dict) -> None:
    assert len(told(schema, wrong)) == len(wrong)
    if schema in OWN.values():
        with pytest.raises(ConfigError) as refusal:
            settings(schema, [f"{key}={value}" for key, value in wrong.items()] + [
                f"{key}=x" for key in ("run", "source", "out", "prompt", "model.residual", "text")
                if key in fields_of(schema)
            ])  # fmt: skip
        assert len(refusal.value.errors) == len(wrong)


def test_wrong_types_do_not_hide_values_out_of_bounds() -> None:
    with pytest.raises(ConfigError) as refusal:
        composed(*DEMO, "model.rank=abc", "model.layers=0", "seed=-1")
    assert len(refusal.value.errors) == 3


def test_numbers_beyond_all_use_are_refused_at_once() -> None:
    """Nothing counts up to them to propose a better one."""
    (error,) = faults("global_batch=9999999999999999999999", "micro_batch=7")
    assert "between 1 and 1048576" in error


def test_a_resolved_configuration_survives_its_file() -> None:
    config, _ = resolve(composed(*DEMO))
    text = OmegaConf.to_yaml(OmegaConf.create(plain(config)))
    assert parse(TrainConfig, OmegaConf.to_container(OmegaConf.create(text))) == config


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "demo-s_lr-N4-r16"),
        (["experiment=demo", "++model.residual=s_lr"], "demo-s_lr-N4-r16"),
        (
            ["++seed=2", "++optimizer.muon_lr=0.02"],
            "demo-s_lr-N4-r16-optimizer.muon_lr=0.02-seed=2",
        ),
        (
            ["++optimizer.muon_lr=0.02", "++seed=2"],
            "demo-s_lr-N4-r16-optimizer.muon_lr=0.02-seed=2",
        ),
        (
            ["++resume=none", "logger=wandb", "++checkpoint.every=7", "++threads=1"],
            "demo-s_lr-N4-r16",
        ),
        (
            ["data=files", "++data.root=my texts/a"],
            "demo-s_lr-N4-r16-data=files-data.root=my_texts_a",
        ),
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
    assert len(long) <= 150 and long != run_name(
        "demo", config, [f"++k{i}={'y' * 50}" for i in range(9)]
    )


def test_only_settings_are_loosened() -> None:
    assert loosened(["run=runs/demo-steps=6-seed=1", "run='runs/a=b'"], CONFIGS) == [
        "++run='runs/demo-steps=6-seed=1'", "++run='runs/a=b'",
    ]  # fmt: skip
    given = [
        "model=demo",
        "model.rank=3",
        "+table1=glob(*)",
        "seed=1,2",
        "-m",
        "hydra.sweep.dir=x",
        "~model.rank",
    ]
    assert loosened(given, CONFIGS) == [
        "model=demo", "++model.rank=3", "+table1=glob(*)", "++seed=1,2", "-m", "hydra.sweep.dir=x",
        "~model.rank",
    ]  # fmt: skip


def test_flatten_names_leaves_by_their_path() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": 1, "a.c": {}, "d": None}


@dataclasses.dataclass(frozen=True)
class Options:
    n: int = option("streams")
    tanh: bool = option("with tanh", False)
    widths: list[int] = option("some widths", list, at_least=1)


def test_settings_of_a_residual_path_are_free_and_reach_it() -> None:
    config = composed(*DEMO, "model.path.n=2", "model.path.deep.er=[a,null]", "+model.path.m=1.5")
    assert config.model.path == {"n": 2, "deep": {"er": ["a", None]}, "m": 1.5}
    assert composed(*DEMO).model.path == {} == defaults(TrainConfig)["model"]["path"]
    assert flatten(plain(config))["model.path.n"] == 2
    assert parse(TrainConfig, plain(config)) == config
    assert values_of(config).keys() == fields_of(TrainConfig).keys()
    assert values_of(config)["model.path"]["deep.er"] == ["a", None]
    (wrong,) = faults("model.path=3")
    assert "model.path=3: must be settings" in wrong
    with pytest.raises(ConfigError) as refusal:
        composed(*DEMO, "model.paht.n=2", "seed.n=3")
    assert len(refusal.value.errors) == 2


def test_settings_of_a_residual_path_are_parsed_as_all_others_are() -> None:
    assert parse_options(Options, {"n": 2, "widths": [1]}, "model.path") == Options(2, False, [1])
    for wrong in ({"n": 10**22}, {"n": 1, "widths": [2, 0]}):
        with pytest.raises(ConfigError, match=r"model\.path\.\w+=.*: must be at "):
            parse_options(Options, wrong, "model.path")
    with pytest.raises(ConfigError) as refusal:
        parse_options(Options, {"tan": 1, "tanh": "abc", "widths": ["x"]}, "model.path")
    assert refusal.value.errors == [
        "model.path.tan=1: no such key; did you mean model.path.tanh?",
        "model.path.tanh=abc: must be true or false; write true or false",
        "model.path.widths=['x']: must be a list of whole numbers",
        "model.path.n: not set; write model.path.n=… (a whole number: streams)",
    ]


# Row, residual path, N and r of the paper's Table 1, and r at an eighth of its width.
GRID = [
    ("01_baseline", "baseline", None, None, None),
    ("02_full_attn_res", "attn_res", None, None, None),
    ("03_block4_attn_res", "attn_res", 4, None, None),
    ("04_block8_attn_res", "attn_res", 8, None, None),
    ("05_block16_attn_res", "attn_res", 16, None, None),
    ("06_full_p_lr_r16", "p_lr", None, 16, 2),
    ("07_full_p_lr_r32", "p_lr", None, 32, 4),
    ("08_full_p_lr_r64", "p_lr", None, 64, 8),
    ("09_block4_p_lr_r32", "p_lr", 4, 32, 4),
    ("10_block8_p_lr_r32", "p_lr", 8, 32, 4),
    ("11_block16_p_lr_r32", "p_lr", 16, 32, 4),
    ("12_full_s_lr_r16", "s_lr", None, 16, 2),
    ("13_full_s_lr_r32", "s_lr", None, 32, 4),
    ("14_full_s_lr_r64", "s_lr", None, 64, 8),
    ("15_full_s_lr_r128", "s_lr", None, 128, 16),
    ("16_full_s_lr_r256", "s_lr", None, 256, 32),
    ("17_full_s_lr_r512", "s_lr", None, 512, 64),
    ("18_block4_s_lr_r64", "s_lr", 4, 64, 8),
    ("19_block8_s_lr_r64", "s_lr", 8, 64, 8),
    ("20_block16_s_lr_r64", "s_lr", 16, 64, 8),
]


def test_the_grid_of_table_1_is_whole() -> None:
    assert sorted(file.stem for file in (CONFIGS / "table1").iterdir()) == [row[0] for row in GRID]


@pytest.mark.parametrize(
    ("row", "residual", "blocks", "paper_rank", "proxy_rank"), GRID, ids=[row[0] for row in GRID]
)
def test_a_row_of_table_1_at_both_sizes(
    row: str, residual: str, blocks: int | None, paper_rank: int, proxy_rank: int
) -> None:
    for experiment, rank in (("paper", paper_rank), ("proxy", proxy_rank)):
        config, notes = resolve(
            composed(
                "device=cpu", "name=x", f"experiment={experiment}", f"+table1={row}", "compile=off"
            )
        )
        assert (config.model.residual, config.model.blocks, config.model.rank) == (
            residual,
            blocks,
            rank,
        ) and notes == []
        name = run_name(
            experiment, config, [f"+table1={row}", f"experiment={experiment}", "++seed=2"]
        )
        granularity = "" if residual == "baseline" else f"-N{blocks}" if blocks else "-full"
        assert name == f"{experiment}-{residual}{granularity}{f'-r{rank}' if rank else ''}-seed=2"
        assert (f"rank {rank} of {config.model.dim}" if rank else "no rank") in of_paper(
            row, config
        )


def test_a_rank_that_was_written_wins_and_one_that_is_no_whole_number_is_refused() -> None:
    row = ("experiment=proxy", "+table1=10_block8_p_lr_r32", "name=x")
    assert composed(*row, "model.rank=5").model.rank == 5
    assert composed(*row, "model.dim=96", "model.heads=2").model.rank == 3
    for dim, width in ((100, "3.125"), (16, "0.5")):
        with pytest.raises(
            ConfigError, match=rf"model\.dim={dim}: 32 of 1024 .* {width}; write model\.rank="
        ):
            composed(*row, f"model.dim={dim}")
    assert composed(*row, "model.dim=100", "model.rank=3").model.rank == 3
    with pytest.raises(ConfigError, match=r"model\.dim=abc: must be a whole number"):
        composed(*row, "model.dim=abc")


def test_the_proxy_is_as_large_as_its_page_says() -> None:
    config, _ = resolve(composed("experiment=proxy", "name=x"))
    assert (config.steps, config.global_batch, config.micro_batch, config.compile.name) == (
        200,
        8,
        8,
        "off",
    )
    assert (
        config.evaluation.every,
        config.evaluation.tokens,
        config.evaluation.diagnostics_tokens,
    ) == (100, 131_072, 65_536)


def test_kernels_that_a_path_has_no_code_for_are_recorded_as_auto() -> None:
    """Also without a GPU, so that a sweep over paths may ask for kernels."""
    for name, path in (("triton", "mudd"), ("compiled", "hc"), ("triton", "baseline")):
        config, notes = resolve(
            composed(*DEMO, f"model.residual={path}", f"kernels={name}", "model.rank=null")
        )
        assert config.kernels is Kernels.auto
        note = f"kernels={name} has no code for model.residual={path}: recorded as auto"
        assert note in notes
    with pytest.raises(ValueError, match="kernels=triton: it has no code for this residual path"):
        choose_kernels(
            "triton", torch.device("cpu"), torch.float32, compiled=False, known=["reference"]
        )


def test_a_path_of_a_folder_that_is_not_named_any_more() -> None:
    with pytest.raises(ConfigError, match=r"model.residual=tail: no such .*LRATTNRES_PATHS=FOLDER"):
        path_of(dataclasses.replace(composed(*DEMO).model, residual="tail"))
