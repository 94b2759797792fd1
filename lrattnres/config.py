"""The typed schema of a run and of an evaluation, and how a composed tree becomes one.

Every value lives in exactly one place: what describes an experiment (sizes, corpora, learning rates) stands in
`configs/`, and those fields have no default here; what hardly ever changes has its default here, the paper's.
`parse` turns a plain tree into a dataclass and collects every fault before it raises.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")


class ConfigError(Exception):
    """One or more faults of a configuration; `str` lists them all, one a line."""

    def __init__(self, faults: list[str]):
        self.faults = faults
        super().__init__("\n".join(f"  - {fault}" for fault in faults))


def option(help: str, default: Any = MISSING, *, may_change: bool = False) -> Any:
    """A documented field. `may_change`: a run may be continued with another value; results depend on it by rounding at most."""
    metadata = {"help": help, "may_change": may_change}
    if dataclasses.is_dataclass(default):
        return field(default_factory=default, metadata=metadata)  # type: ignore[arg-type]
    return field(default=default, metadata=metadata)


class Routing(Enum):
    replace = "replace"
    add = "add"


class CorpusName(Enum):
    docstrings = "docstrings"
    files = "files"
    ultra_fineweb = "ultra_fineweb"
    tokens = "tokens"


class TokenizerName(Enum):
    bytes = "bytes"
    cl100k_base = "cl100k_base"
    gpt2 = "gpt2"


class Orthogonalizer(Enum):
    newton_schulz = "newton_schulz"
    polar_express = "polar_express"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class AttentionBackend(Enum):
    auto = "auto"
    flash = "flash"
    varlen = "varlen"
    flex = "flex"
    sdpa = "sdpa"


class Kernels(Enum):
    auto = "auto"
    triton = "triton"
    compiled = "compiled"
    reference = "reference"


class Compile(Enum):
    off = "off"
    model = "model"
    regions = "regions"


class AC(Enum):
    none = "none"
    selective = "selective"
    full = "full"


class ParallelMode(Enum):
    auto = "auto"
    none = "none"
    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"


class LoggerName(Enum):
    none = "none"
    wandb = "wandb"


@dataclass
class ModelConfig:
    residual: str = option("residual path: a row of the table of variants (lrattnres/depth/router.py)")
    rank: int | None = option("width r of a routing key, 1..dim; null where the variant has no key of its own")
    blocks: int | None = option("number N of depth blocks, 1..2*layers; null: every sub-layer is a source")
    routing: Routing | None = option("how the mixture is used: replace the stream or add to it; null: as published", None)
    layers: int = option("number L of transformer blocks, each of two sub-layers")
    dim: int = option("width d of the residual stream")
    heads: int = option("attention heads; dim / heads must be even")
    mlp_width: int = option("width of the SwiGLU hidden layer")
    context: int = option("window length in tokens")
    vocabulary: int | None = option("rows of embedding and head; null: the tokenizer's size", None)
    rope_base: float = option("base of the rotary position embedding", 500_000.0)
    init_std: float = option("standard deviation of every initial weight but the queries, which are zero", 0.02)


@dataclass
class DataConfig:
    corpus: CorpusName = option("which corpus is read")
    root: str | None = option(
        "where it lies: a file, folder or glob (files); a folder, http(s)://, s3:// or hf:// prefix (ultra_fineweb; null: the "
        "hub); a folder of shards (tokens)",
        None,
    )
    revision: str | None = option("git revision of the hub's data set; null: the newest, kept for the whole run", None)
    column: str = option("name of the text column or JSON key", "text")
    holdout: float = option("share of documents held out, chosen by a hash of their content, between 0 and 1")
    min_score: float | None = option("least value of the column `score` (ultra_fineweb); null: every row", None)
    max_files: int | None = option("only the first files of the listing (ultra_fineweb); null: all", None)
    max_tokens: int | None = option(
        "token budget: the first groups that hold this many (tokens, scripts/tokenize_corpus.py); null: all", None
    )
    deduplicate: bool = option("leave out later copies of a text (docstrings, files, tokens)", False)
    cache: str | None = option(
        "folder for prepared corpora and held-out tokens; null: $XDG_CACHE_HOME/lrattnres or ~/.cache/lrattnres",
        None,
        may_change=True,
    )
    workers: int = option("threads that read and tokenize ahead; 0: in the training thread", 2, may_change=True)
    ahead: int = option("batches that they keep ready", 8, may_change=True)
    memory: float = option("GiB that the row groups of a streamed corpus may take", 32.0, may_change=True)
    timeout: float = option("seconds without an answer after which a remote read is tried again", 30.0, may_change=True)
    retries: int = option("further tries of a read, each after twice the pause (1, 2, 4 … 60 s)", 8, may_change=True)
    # May change although the data depend on it: a run that stopped at a broken file must be able to go on. It is counted.
    skip_unreadable: bool = option("pass over row groups that stay unreadable, and count them", False, may_change=True)


@dataclass
class TokenizerConfig:
    name: TokenizerName = option("how text becomes tokens")


@dataclass
class OptimizerConfig:
    muon_lr: float = option("peak learning rate of Muon: every matrix inside the blocks")
    adam_lr: float = option("peak learning rate of Adam: embedding, head and queries")
    warmup: int = option("steps of linear warm-up")
    warmdown: float = option("share of all steps spent on the linear warm-down, 0..1", 0.2)
    final: float = option("learning rate at the last step, as a share of the peak", 0.1)
    momentum: float = option("Nesterov momentum of Muon", 0.95)
    momentum_low: float = option("momentum at the first and the last step", 0.85)
    momentum_rise: int = option("steps over which the momentum rises to its value; 0: no rise")
    momentum_fall: int = option("last steps over which it falls back; 0: no fall")
    muon_weight_decay: float = option("decoupled weight decay of Muon", 0.1)
    cautious: bool = option("decay a weight only where its update has the same sign", True)
    orthogonalizer: Orthogonalizer = option("coefficients of the orthogonalising iteration", Orthogonalizer.polar_express)
    iterations: int = option("steps of the orthogonalising iteration", 5)
    adam_beta1: float = option("Adam's decay of the first moment", 0.9)
    adam_beta2: float = option("Adam's decay of the second moment", 0.95)
    adam_eps: float = option("Adam's epsilon", 1e-8)
    clip: float | None = option("largest norm of the whole gradient; null: no clipping", 1.0)


@dataclass
class CheckpointConfig:
    every: int = option("steps between checkpoints", may_change=True)
    keep_last: int = option("newest checkpoints that are kept, at least 1", 2, may_change=True)
    keep_every: int | None = option("checkpoints at multiples of this step are kept for good", None, may_change=True)
    asynchronous: bool = option("training goes on from a copy in host memory while it is written", False, may_change=True)


@dataclass
class EvaluationConfig:
    every: int | None = option("steps between evaluations in training; null: only at the end", may_change=True)
    tokens: int = option("held-out tokens that are evaluated")
    batch: int = option("sequences a forward pass", 16, may_change=True)
    diagnostics_tokens: int = option("held-out tokens of the depth diagnostics", 1_000_000, may_change=True)


@dataclass
class InstrumentsConfig:
    log: int = option("steps between lines of metrics.jsonl", 10, may_change=True)
    gradients: int | None = option("steps between gradient norms per block; null: off", 100, may_change=True)
    depth: int | None = option("steps between norms of h per site and the newest source's share; null: off", 500, may_change=True)
    ranks: int | None = option("steps between counts of each rank's bytes sent and peak memory; null: off", None, may_change=True)


@dataclass
class LoggerConfig:
    name: LoggerName = option("where metrics go besides metrics.jsonl", LoggerName.none, may_change=True)
    project: str = option("W&B project", "lrattnres", may_change=True)
    entity: str | None = option("W&B entity; null: your default", None, may_change=True)


@dataclass
class ParallelConfig:
    mode: ParallelMode = option(
        "how weights, gradients and moments lie on the ranks: none (one process), ddp (whole on each), fsdp (in as many "
        "shards as ranks), hsdp (in shard_degree shards); auto: none for one process, else fsdp",
        ParallelMode.auto,
        may_change=True,
    )
    shard_degree: int | None = option("ranks that share one copy of the weights, for hsdp; null otherwise", None, may_change=True)
    reshard: bool = option("free gathered weights after the forward pass, and gather them once more", True, may_change=True)
    prefetch: int = option("units (pairs of sub-layers) whose weights are gathered ahead of time", 1, may_change=True)
    timeout: float = option("seconds after which a rank that does not answer is given up", 600.0, may_change=True)


@dataclass
class ClusterConfig:
    requeue: bool = option(
        "when a signal stops a SLURM job: save, and put the job back into the queue",
        False,
        may_change=True,
    )


@dataclass
class TrainConfig:
    name: str = option("name of the run folder; it follows from the choices unless given")
    runs: str = option("folder that holds the run folders", "runs", may_change=True)
    resume: str = option(
        "auto: continue where the run stopped; none: refuse an existing run; STEP: from that checkpoint", "auto", may_change=True
    )
    seed: int = option("seed of initial weights and data order", 0)
    steps: int = option("optimizer steps of the whole run")
    global_batch: int = option("sequences a step, and the number of data streams")
    micro_batch: int = option("sequences a forward pass", may_change=True)
    z_loss: float = option("weight of the mean squared logsumexp", 1e-5)
    documents: bool = option("attention stays inside a document", True)
    max_bad_steps: int = option("non-finite steps in a row that stop the run", 10, may_change=True)
    device: Device = option("where to train; auto: a GPU if there is one", may_change=True)
    precision: Precision = option("arithmetic of the model; weights and optimizer are float32")
    attention: AttentionBackend = option("attention kernel; auto: what runs here", AttentionBackend.auto, may_change=True)
    kernels: Kernels = option(
        "depth attention; auto: triton on a GPU, else compiled where compile is on", Kernels.auto, may_change=True
    )
    compile: Compile = option("torch.compile: off, the whole model, or each sub-layer", Compile.off, may_change=True)
    ac: AC = option(
        "activation checkpointing: none, selective (sub-layers are recomputed, what depth reads saved stays), full (reads too)",
        AC.none,
        may_change=True,
    )
    threads: int | None = option("CPU threads; null: torch's choice", None, may_change=True)
    model: ModelConfig = option("the transformer", ModelConfig)
    data: DataConfig = option("the corpus", DataConfig)
    tokenizer: TokenizerConfig = option("the tokenizer", TokenizerConfig)
    optimizer: OptimizerConfig = option("Muon, Adam and their schedule", OptimizerConfig)
    checkpoint: CheckpointConfig = option("what is kept", CheckpointConfig)
    evaluation: EvaluationConfig = option("held-out loss and diagnostics", EvaluationConfig)
    instruments: InstrumentsConfig = option("what is measured in training", InstrumentsConfig)
    logger: LoggerConfig = option("metrics besides the JSON lines", LoggerConfig)
    parallel: ParallelConfig = option("one run on many ranks", ParallelConfig)
    cluster: ClusterConfig = option("what a queue of jobs needs to know", ClusterConfig)


@dataclass
class EvalConfig:
    run: str = option("run folder, or one checkpoint inside it")
    step: int | None = option("checkpoint to evaluate; null: the newest complete one", None)
    tokens: int | None = option("held-out tokens; null: as the run has it", None)
    batch: int | None = option("sequences a forward pass; null: as the run has it", None)
    diagnostics: bool = option("also measure where each site reads, as JSON and pictures", False)
    diagnostics_tokens: int | None = option("held-out tokens of the diagnostics; null: as the run has it", None)
    device: Device = option("where to evaluate", Device.auto)
    precision: Precision | None = option("arithmetic; null: as the run has it", None)
    attention: AttentionBackend = option("attention kernel", AttentionBackend.auto)
    kernels: Kernels = option("depth attention; auto: triton on a GPU, else reference", Kernels.auto)
    threads: int | None = option("CPU threads; null: torch's choice", None)
    cache: str | None = option("folder for prepared corpora; null: as the run has it", None)


@dataclass
class TokenizeConfig:
    out: str = option("folder of the shards; one that was left unfinished is continued")
    workers: int = option("processes that tokenize", 1)
    shard_mb: int = option("MiB of text in a shard, at least", 256)
    data: DataConfig = option("the corpus", DataConfig)
    tokenizer: TokenizerConfig = option("the tokenizer", TokenizerConfig)


def defaults(schema: type) -> dict[str, Any]:
    """The schema as a plain tree: defaults where there are some, `???` where `configs/` must speak."""
    return OmegaConf.to_container(OmegaConf.structured(schema), enum_to_str=True)  # type: ignore[return-value]


def fields_of(schema: type, prefix: str = "") -> dict[str, tuple[Any, dict[str, Any]]]:
    """Dotted key -> (type, metadata of `option`) of every leaf, in the order of the schema."""
    leaves: dict[str, tuple[Any, dict[str, Any]]] = {}
    hints = get_type_hints(schema)
    for item in dataclasses.fields(schema):
        key, kind = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(kind):
            leaves |= fields_of(kind, key + ".")  # type: ignore[arg-type]
        else:
            leaves[key] = (kind, dict(item.metadata))
    return leaves


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a nested dictionary."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[prefix + str(key)] = value
    return leaves


def plain(config: Any) -> dict[str, Any]:
    """A dataclass as nested dictionaries of plain values, enums by name: what is written to a run folder."""
    return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)  # type: ignore[return-value]


def expected(kind: Any) -> str:
    """What a value of this type may be, in words."""
    options = getattr(kind, "__args__", (kind,))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    parts = [
        "one of " + ", ".join(member.name for member in part)
        if isinstance(part, type) and issubclass(part, Enum)
        else words[part]
        for part in options
    ]
    return " or ".join(parts)


def parse(schema: type[T], tree: dict[str, Any]) -> T:
    """A plain tree as an instance of `schema`.

    Raises ConfigError with every unknown key, wrong type and missing value at once.
    """
    leaves, faults = fields_of(schema), []
    target = OmegaConf.structured(schema)
    given = flatten(tree)
    for key, value in given.items():
        if key not in leaves:
            close = difflib.get_close_matches(key, leaves, n=1) or difflib.get_close_matches(
                key.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.5
            )
            faults.append(f"{key}={value}: no such key" + (f"; did you mean {close[0]}?" if close else ""))
        elif value == MISSING:
            continue
        else:
            fault = _assign(target, key, value, leaves[key][0])
            faults += [fault] if fault else []
    for key in leaves:
        if given.get(key, MISSING) == MISSING and OmegaConf.is_missing(*_parent(target, key)):
            faults.append(f"{key}: not set; write {key}=… ({expected(leaves[key][0])}: {leaves[key][1]['help']})")
    if faults:
        raise ConfigError(faults)
    return OmegaConf.to_object(target)  # type: ignore[return-value]


def _parent(target: Any, key: str) -> tuple[Any, str]:
    *path, last = key.split(".")
    for name in path:
        target = target[name]
    return target, last


def _assign(target: Any, key: str, value: Any, kind: Any) -> str | None:
    """Sets one leaf; returns what is wrong with the value, if anything. Texts are not taken for numbers."""
    kinds = getattr(kind, "__args__", (kind,))
    text_for_number = isinstance(value, str) and str not in kinds and not any(issubclass(part, Enum) for part in kinds)
    number_for_text = str in kinds and isinstance(value, (int, float, bool))
    truth_for_number = isinstance(value, bool) and bool not in kinds
    null = value is None and type(None) not in kinds
    if not (text_for_number or (truth_for_number and not number_for_text) or null):
        try:
            OmegaConf.update(target, key, str(value) if number_for_text else value)
            return None
        except OmegaConfBaseException:
            pass
    hint = f"; write {key}=null" if str(value).lower() in ("none", "null", "~") and type(None) in kinds else ""
    hint = hint or ("; write true or false" if kinds == (bool,) else "")
    return f"{key}={value}: must be {expected(kind)}{hint}"
