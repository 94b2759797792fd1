"""Settings that contradict each other, or this machine: found before any data is touched."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from lrattnres.config import (
    Compile,
    ConfigError,
    CorpusName,
    DataConfig,
    Device,
    Kernels,
    LoggerName,
    ModelConfig,
    Orthogonalizer,
    ParallelMode,
    Precision,
    RopeKind,
    RopeScaling,
    TokenizeConfig,
    TokenizerConfig,
    TokenizerName,
    TrainConfig,
)
from lrattnres.config.commands import GenerateConfig, InspectConfig
from lrattnres.config.schema import beyond_use, out_of_bounds
from lrattnres.data.tokenizers import VOCABULARY
from lrattnres.distributed.ranks import placement
from lrattnres.kernels.backends import choose_kernels
from lrattnres.model.attention import choose_attention
from lrattnres.optim.build import unknown
from lrattnres.residual.base import path_of, paths
from lrattnres.residual.matching import MATCHES, matched

T = TypeVar("T")
DTYPES = {Precision.float32: torch.float32, Precision.bfloat16: torch.bfloat16}


def resolve_device(device: Device) -> torch.device:
    """The device that `auto` stands for; names as given otherwise."""
    if device is Device.auto:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device.value)


def checked(config: T) -> T:
    """The settings of any command as they are, if they can be.

    Raises:
        ConfigError: with every value out of its bounds and every contradiction between settings.
    """
    errors = list(out_of_bounds(config))
    if not beyond_use(config):
        errors += [error for check in CHECKS.get(type(config), ()) for error in check(config)]
    if errors:
        raise ConfigError(errors)
    return config


def resolve(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """The configuration that is run and recorded, and a line for each choice that has no use.

    What the residual path has no use for becomes null, or the default, so that sweeps over paths
    work.

    Raises:
        ConfigError: as `checked`.
    """
    checked(config)
    path = path_of(config.model)
    model, notes = path.settled(config.model)
    learns = any(role.owner == "adam" for role in path.roles(model).values())
    if config.optimizer.routing_lr is not None and not learns:
        of_path = f"has no meaning for model.residual={model.residual}: recorded as null"
        notes.append(f"optimizer.routing_lr {of_path}")
        optimizer = dataclasses.replace(config.optimizer, routing_lr=None)
        config = dataclasses.replace(config, optimizer=optimizer)
    if config.kernels.name not in ("auto", *path.backends):
        notes.append(
            f"kernels={config.kernels.name} has no code for model.residual={model.residual}: "
            "recorded as auto"
        )
        config = dataclasses.replace(config, kernels=Kernels.auto)
    if config.compile is Compile.model and placement()[1] > 1:
        # So that the command for one GPU is the command for many.
        notes.append(
            "compile=model is compile=regions on many ranks: weights are gathered between one "
            "region and the next"
        )
        config = dataclasses.replace(config, compile=Compile.regions)
    vocabulary = config.model.vocabulary or VOCABULARY.get(config.tokenizer.name)
    given = dataclasses.replace(config.model, vocabulary=vocabulary)
    config = dataclasses.replace(config, model=dataclasses.replace(model, vocabulary=vocabulary))
    return _matched(config, given, notes) if config.match else (config, notes)


def _matched(
    config: TrainConfig, given: ModelConfig, notes: list[str]
) -> tuple[TrainConfig, list[str]]:
    """With one number changed, after which everything is checked once more. `given` has what the
    other run may need.
    """
    try:
        found, note = matched(config, given)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    try:
        return checked(found), [*notes, note]
    except ConfigError as error:
        raise ConfigError([f"{note}, and then:", *error.errors]) from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message: the known word that is nearest, if one is near."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _path(config: TrainConfig) -> Iterator[str]:
    """What the residual path finds impossible."""
    name, table = config.model.residual, paths()
    if name in table:
        yield from path_of(config.model).errors(config.model)
    else:
        yield f"model.residual={name}: must be one of {', '.join(table)}{did_you_mean(name, table)}"


def _optimizer(config: TrainConfig) -> Iterator[str]:
    if (error := unknown(config.optimizer.name)) is not None:
        yield error


def _match(config: TrainConfig) -> Iterator[str]:
    for key, value, table in (
        ("match", config.match, MATCHES),
        ("match_to", config.match_to, paths()),
    ):
        if value is not None and value not in table:
            yield f"{key}={value}: must be null or one of {', '.join(table)}"
    if config.match is not None and config.match_to is None:
        yield (
            f"match={config.match}: with what? write match_to=… ({', '.join(paths())}), "
            "or match=null"
        )
    if config.match == "parameters" and config.initial is not None:
        yield (
            f"match=parameters: would change model.mlp_width, which initial={config.initial} "
            "decides; write match=compute"
        )
    if config.match is None and config.match_to is not None:
        yield (
            f"match_to={config.match_to}: in what? write match=… ({', '.join(MATCHES)}), "
            "or match_to=null"
        )


def _shapes(config: TrainConfig) -> Iterator[str]:
    model = config.model
    if model.head_dim is not None and model.head_dim % 2:
        yield (
            f"model.head_dim={model.head_dim}: rotary pairs need an even number; write "
            f"{model.head_dim + 1}"
        )
    elif model.head_dim is None and model.heads >= 1 and model.dim % model.heads:
        possible = [n for n in range(1, model.dim + 1) if model.dim % (2 * n) == 0]
        heads = min(possible, key=lambda n: abs(n - model.heads), default=1)
        yield (
            f"model.heads={model.heads}: must divide model.dim={model.dim}; write "
            f"model.heads={heads}, or a model.head_dim"
        )
    elif model.head_dim is None and model.heads >= 1 and (model.dim // model.heads) % 2:
        size = model.dim // model.heads
        yield (
            f"model.heads={model.heads}: leaves a head of {size} dimensions; rotary pairs need "
            "an even number"
        )
    if model.kv_heads is not None and model.kv_heads >= 1 and model.heads % model.kv_heads:
        yield (
            f"model.kv_heads={model.kv_heads}: must divide model.heads={model.heads}; write "
            "null for as many as heads"
        )
    scaling, plain_scaling = model.rope_scaling, RopeScaling()
    used = {
        RopeKind.none: (),
        RopeKind.linear: ("factor",),
        RopeKind.llama3: ("factor", "low", "high", "first_context"),
    }
    for name in ("factor", "low", "high", "first_context"):
        value = getattr(scaling, name)
        if name not in used[scaling.kind] and value != getattr(plain_scaling, name):
            yield (
                f"model.rope_scaling.{name}={value}: has no use with kind={scaling.kind.name}; "
                "write another kind"
            )
    if scaling.kind is RopeKind.llama3 and scaling.low >= scaling.high:
        yield (
            f"model.rope_scaling.low={scaling.low}: must be less than "
            f"model.rope_scaling.high={scaling.high}"
        )
    known = VOCABULARY.get(
        config.tokenizer.name, 0
    )  # a pretrained one is looked at when it is opened
    if model.vocabulary is None and not known:
        yield (
            "model.vocabulary=null: only tokenizer.path knows how many tokens there are; "
            "write model.vocabulary=NUMBER"
        )
    if model.vocabulary is not None and model.vocabulary < known:
        name = config.tokenizer.name.name
        yield (
            f"model.vocabulary={model.vocabulary}: tokenizer={name} has {known} tokens; write "
            "null or at least that"
        )
    if config.micro_batch >= 1 and config.global_batch % config.micro_batch:
        divisors = [n for n in range(1, config.global_batch + 1) if config.global_batch % n == 0]
        near = min(divisors, key=lambda n: abs(n - config.micro_batch), default=1)
        yield (
            f"micro_batch={config.micro_batch}: must divide "
            f"global_batch={config.global_batch}; write micro_batch={near}"
        )


def _schedule(config: TrainConfig) -> Iterator[str]:
    optimizer, steps = config.optimizer, config.steps
    if steps < 1:
        return  # named by its bounds already
    down = round(optimizer.warmdown * steps)
    if optimizer.warmup + down > steps:
        yield (
            f"optimizer.warmup={optimizer.warmup}: with {down} steps of warm-down it does not "
            f"fit into steps={steps}; "
            "write fewer, or more steps"
        )
    if optimizer.momentum_rise + optimizer.momentum_fall > steps:
        rise, fall = optimizer.momentum_rise, optimizer.momentum_fall
        yield (
            f"optimizer.momentum_rise={rise}: with momentum_fall={fall} it does not fit into "
            f"steps={steps}; write fewer"
        )
    if optimizer.orthogonalizer is Orthogonalizer.polar_express and optimizer.iterations != 5:
        yield (
            f"optimizer.iterations={optimizer.iterations}: polar_express is a table of 5 steps; "
            "write 5, or optimizer.orthogonalizer=newton_schulz"
        )


def _data(config: TrainConfig) -> Iterator[str]:
    data = config.data
    yield from _corpus(data)
    yield from _tokenizer(config.tokenizer)
    if data.max_tokens is not None and data.corpus is not CorpusName.tokens:
        yield (
            f"data.max_tokens={data.max_tokens}: only shards know their tokens; write "
            "data.max_files=…, or data=tokens"
        )
    if config.resume not in ("auto", "none") and not config.resume.isdigit():
        yield f"resume={config.resume}: must be auto, none or the step of a checkpoint"


def _corpus(data: DataConfig) -> Iterator[str]:
    """What the chosen corpus has no use for, or lacks."""
    name, missing = data.corpus, "write data.root=FILE, FOLDER or a quoted glob"
    if name is CorpusName.files and data.root is None:
        yield f"data.root=null: data=files needs your texts; {missing}"
    if name is CorpusName.tokens and data.root is None:
        yield (
            "data.root=null: data=tokens needs a folder of shards; write data.root=FOLDER, "
            "made by scripts/tokenize_corpus.py"
        )
    if name is CorpusName.docstrings and data.root is not None:
        yield (
            f"data.root={data.root}: the docstrings corpus reads the installed Python; write "
            "data=files for your own texts"
        )
    hub = name is CorpusName.ultra_fineweb and (data.root is None or data.root.startswith("hf://"))
    if data.revision is not None and not hub:
        yield (
            f"data.revision={data.revision}: only the hub has revisions; write null, or "
            "data=ultra_fineweb data.root=null"
        )
    if data.column != "text" and name is CorpusName.docstrings:
        yield (
            f"data.column={data.column}: data={name.name} has no use for it; write data.column=text"
        )
    if name is not CorpusName.ultra_fineweb:
        for key in ("min_score", "max_files"):
            if getattr(data, key) is not None:
                said = (
                    "; it was decided when the corpus was tokenized"
                    if name is CorpusName.tokens
                    else ""
                )
                yield (
                    f"data.{key}={getattr(data, key)}: data={name.name} has no use for "
                    f"it{said}; write null"
                )
    elif data.deduplicate:
        yield (
            "data.deduplicate=true: needs the hashes of all texts; run "
            "scripts/tokenize_corpus.py, then write data=tokens"
        )


def _tokenizer(tokenizer: TokenizerConfig) -> Iterator[str]:
    """What the chosen tokenizer has no use for, or lacks."""
    needed = tokenizer.name is TokenizerName.pretrained
    for key in ("path", "separator"):
        value = getattr(tokenizer, key)
        if needed and value is None:
            yield (
                f"tokenizer.{key}=null: tokenizer=pretrained needs it; write "
                "tokenizer.path=FOLDER tokenizer.separator=NUMBER"
            )
        if not needed and value is not None:
            yield (
                f"tokenizer.{key}={value}: tokenizer={tokenizer.name.name} has no use for it; "
                "write null"
            )


def _tokenize(config: TokenizeConfig) -> Iterator[str]:
    if config.data.corpus is CorpusName.tokens:
        yield (
            "data.corpus=tokens: is tokenized already; write data=ultra_fineweb, data=files or "
            "data=docstrings"
        )
    if config.data.skip_unreadable:
        yield (
            "data.skip_unreadable=true: shards without a gap or none; restore the file, or take it "
            "out of data.root"
        )
    yield from _corpus(config.data)
    yield from _tokenizer(config.tokenizer)


def _generate(config: GenerateConfig) -> Iterator[str]:
    if "" in config.stop:
        yield "stop=: an empty text would end every continuation at once; leave it out"
    if config.temperature == 0:
        usual = {"top_k": None, "top_p": None, "min_p": None, "samples": 1, "seed": 0}
        for key, value in usual.items():
            if (given := getattr(config, key)) != value:
                yield (
                    f"{key}={given}: has no use with temperature=0, which draws nothing; "
                    "leave it out"
                )
    if config.json and config.echo:
        yield "echo=true: has no use with json=true, which holds the prompt; leave it out"


def _inspect(config: InspectConfig) -> Iterator[str]:
    if (config.text is None) == (config.file is None):
        yield ('text, file: write one of them, text="…" (text=- for standard input) or file=PATH')


def _machine(config: TrainConfig) -> Iterator[str]:
    if config.device is Device.cuda and not torch.cuda.is_available():
        yield (
            "device=cuda: this machine has no CUDA GPU that torch can see; `python train.py "
            "experiment=demo` trains on "
            "a CPU in minutes, and device=cpu runs this very configuration there, however "
            "long it takes"
        )
        return
    device = resolve_device(config.device)
    try:
        choose_attention(config.attention.name, device, DTYPES[config.precision], training=True)
    except ValueError as error:
        yield str(error)
    try:
        path = path_of(config.model) if config.model.residual in paths() else None
        if path is None or config.kernels.name in path.backends:
            choose_kernels(
                config.kernels.name,
                device,
                DTYPES[config.precision],
                compiled=config.compile is not Compile.off,
                beyond=path.beyond_kernels(config.model) if path else [],
            )
    except ValueError as error:
        yield str(error)
    compiler = os.environ.get("CXX", "g++")
    if (
        config.compile is not Compile.off
        and device.type == "cpu"
        and not (shutil.which(compiler) or shutil.which("clang++"))
    ):
        yield (
            f"compile={config.compile.name}: torch.compile needs a C++ compiler on a CPU; "
            "install g++, or write compile=off"
        )
    if config.logger.name is LoggerName.wandb and importlib.util.find_spec("wandb") is None:
        yield (
            "logger.name=wandb: the package wandb is not installed; `pip install wandb`, or "
            "write logger=none"
        )


def _parallel(config: TrainConfig) -> Iterator[str]:
    parallel, world, mode = config.parallel, placement()[1], config.parallel.mode
    alone = mode is ParallelMode.none or (mode is ParallelMode.auto and world == 1)
    if mode is ParallelMode.none and world > 1:
        yield (
            f"parallel.mode=none: there are {world} processes, and each would train the whole "
            "run; write parallel.mode=auto"
        )
    if world == 1 and not alone:
        yield (
            f"parallel.mode={mode.name}: needs several processes, and this one is alone; start "
            "it with "
            "`torchrun --nproc_per_node=N train.py …`, or write parallel.mode=auto"
        )
    if world > 1 and config.model.tied:
        yield (
            "model.tied=true: embedding and head would be cut into different shards on "
            f"{world} processes; train it on one"
        )
    yield from _shard_degree(mode, parallel.shard_degree, world)
    if config.global_batch >= 1 and config.global_batch % world:
        yield (
            f"global_batch={config.global_batch}: must be a multiple of the {world} processes, "
            "which share its streams evenly"
        )
    if config.cluster.requeue and "SLURM_JOB_ID" not in os.environ:
        yield (
            "cluster.requeue=true: this is no SLURM job (SLURM_JOB_ID is not set); write "
            "cluster=local"
        )
    if config.cluster.requeue and config.resume != "auto":
        yield (
            f"resume={config.resume}: a job that is queued again starts with the same words, "
            "and would begin there every time; "
            "write resume=auto"
        )
    data = config.data
    patience = (data.retries + 1) * data.timeout + sum(
        min(60.0, 2.0**tried) for tried in range(data.retries)
    )
    if world > 1 and data.corpus is CorpusName.ultra_fineweb and patience >= parallel.timeout:
        yield (
            f"parallel.timeout={parallel.timeout:g}: one rank may try a read for "
            f"{patience:.0f} s (data.retries, data.timeout), "
            f"and the others would give it up before; write parallel.timeout={2 * patience:.0f}"
        )


def _shard_degree(mode: ParallelMode, degree: int | None, world: int) -> Iterator[str]:
    if mode is not ParallelMode.hsdp:
        if degree is not None:
            yield (
                f"parallel.shard_degree={degree}: has no use without parallel.mode=hsdp; write "
                "null, or that mode"
            )
        return
    choices = [n for n in range(2, world) if world % n == 0]
    if world > 1 and degree not in choices:
        hint = (
            f"write {' or '.join(map(str, choices))}"
            if choices
            else f"{world} cannot be; write parallel.mode=fsdp"
        )
        given = "null" if degree is None else degree
        yield (
            f"parallel.shard_degree={given}: must cut the {world} processes into several "
            f"groups of several; {hint}"
        )


CHECKS: dict[type, tuple[Callable[[Any], Iterator[str]], ...]] = {
    TrainConfig: (
        *(_path, _match, _shapes, _optimizer),
        *(_schedule, _data, _machine, _parallel),
    ),
    TokenizeConfig: (_tokenize,),
    GenerateConfig: (_generate,),
    InspectConfig: (_inspect,),
}
