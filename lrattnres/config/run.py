"""The typed schema of a run, of an evaluation and of tokenizing.

Every value lives in exactly one place: what describes an experiment (sizes, corpora, learning rates) stands in
`configs/`, and those fields have no default here; what hardly ever changes has its default here, the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lrattnres.config.model import ModelConfig
from lrattnres.config.schema import option


class CorpusName(Enum):
    docstrings = "docstrings"
    files = "files"
    ultra_fineweb = "ultra_fineweb"
    tokens = "tokens"


class TokenizerName(Enum):
    bytes = "bytes"
    cl100k_base = "cl100k_base"
    gpt2 = "gpt2"
    pretrained = "pretrained"


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
class DataConfig:
    corpus: CorpusName = option("which corpus is read")
    root: str | None = option(
        "where it lies: a file, folder or glob (files); a folder, http(s)://, s3:// or hf:// prefix (ultra_fineweb; null: the "
        "hub); a folder of shards (tokens)",
        None,
    )
    revision: str | None = option(
        "git revision of the hub's data set; null: the newest, kept for the whole run", None
    )
    column: str = option("name of the text column or JSON key", "text")
    holdout: float = option(
        "share of documents held out, chosen by a hash of their content, between 0 and 1"
    )
    min_score: float | None = option(
        "least value of the column `score` (ultra_fineweb); null: every row", None
    )
    max_files: int | None = option(
        "only the first files of the listing (ultra_fineweb); null: all", None
    )
    max_tokens: int | None = option(
        "token budget: the first groups that hold this many (tokens, scripts/tokenize_corpus.py); null: all",
        None,
    )
    deduplicate: bool = option(
        "leave out later copies of a text (docstrings, files, tokens)", False
    )
    cache: str | None = option(
        "folder for prepared corpora and held-out tokens; null: $XDG_CACHE_HOME/lrattnres or ~/.cache/lrattnres",
        None,
        may_change=True,
    )
    workers: int = option(
        "threads that read and tokenize ahead; 0: in the training thread", 2, may_change=True
    )
    ahead: int = option("batches that they keep ready", 8, may_change=True)
    memory: float = option(
        "GiB that the row groups of a streamed corpus may take", 32.0, may_change=True
    )
    timeout: float = option(
        "seconds without an answer after which a remote read is tried again", 30.0, may_change=True
    )
    retries: int = option(
        "further tries of a read, each after twice the pause (1, 2, 4 … 60 s)", 8, may_change=True
    )
    # May change although the data depend on it: a run that stopped at a broken file must be able to go on. It is counted.
    skip_unreadable: bool = option(
        "pass over row groups that stay unreadable, and count them", False, may_change=True
    )


@dataclass
class TokenizerConfig:
    name: TokenizerName = option(
        "how text becomes tokens; pretrained: by the tokenizer.json in path"
    )
    path: str | None = option(
        "folder with the tokenizer.json of a pretrained model; null otherwise", None
    )
    separator: int | None = option("its token that opens a document; null otherwise", None)


@dataclass
class OptimizerConfig:
    name: str = option(
        "which optimizer; muon_adam: Muon on matrices, Adam on the rest", "muon_adam"
    )
    muon_lr: float = option("peak learning rate of Muon: every matrix inside the blocks")
    adam_lr: float = option("peak learning rate of Adam: embedding, head and queries")
    routing_lr: float | None = option(
        "peak learning rate of what Adam owns in the residual path; null: adam_lr", None
    )
    warmup: int = option("steps of linear warm-up")
    warmdown: float = option("share of all steps spent on the linear warm-down, 0..1", 0.2)
    final: float = option("learning rate at the last step, as a share of the peak", 0.1)
    momentum: float = option("Nesterov momentum of Muon", 0.95)
    momentum_low: float = option("momentum at the first and the last step", 0.85)
    momentum_rise: int = option("steps over which the momentum rises to its value; 0: no rise")
    momentum_fall: int = option("last steps over which it falls back; 0: no fall")
    muon_weight_decay: float = option("decoupled weight decay of Muon", 0.1)
    cautious: bool = option("decay a weight only where its update has the same sign", True)
    orthogonalizer: Orthogonalizer = option(
        "coefficients of the orthogonalising iteration", Orthogonalizer.polar_express
    )
    iterations: int = option("steps of the orthogonalising iteration", 5)
    adam_beta1: float = option("Adam's decay of the first moment", 0.9)
    adam_beta2: float = option("Adam's decay of the second moment", 0.95)
    adam_eps: float = option("Adam's epsilon", 1e-8)
    clip: float | None = option("largest norm of the whole gradient; null: no clipping", 1.0)


@dataclass
class CheckpointConfig:
    every: int = option("steps between checkpoints", may_change=True)
    keep_last: int = option("newest checkpoints that are kept, at least 1", 2, may_change=True)
    keep_every: int | None = option(
        "checkpoints at multiples of this step are kept for good", None, may_change=True
    )
    asynchronous: bool = option(
        "training goes on from a copy in host memory while it is written", False, may_change=True
    )


@dataclass
class EvaluationConfig:
    every: int | None = option(
        "steps between evaluations in training; null: only at the end", may_change=True
    )
    tokens: int = option("held-out tokens that are evaluated")
    batch: int = option("sequences a forward pass", 16, may_change=True)
    diagnostics_every: int | None = option(
        "steps between depth diagnostics in training, which come after the last step too; null: off",
        None,
        may_change=True,
    )
    diagnostics_tokens: int = option(
        "held-out tokens of the depth diagnostics", 1_000_000, may_change=True
    )


@dataclass
class InstrumentsConfig:
    log: int = option("steps between lines of metrics.jsonl", 10, may_change=True)
    gradients: int | None = option(
        "steps between gradient norms per block; null: off", 100, may_change=True
    )
    depth: int | None = option(
        "steps between norms of h per site and the newest source's share; null: off",
        500,
        may_change=True,
    )
    ranks: int | None = option(
        "steps between counts of each rank's bytes sent and peak memory; null: off",
        None,
        may_change=True,
    )


@dataclass
class LoggerConfig:
    name: LoggerName = option(
        "where metrics go besides metrics.jsonl", LoggerName.none, may_change=True
    )
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
    shard_degree: int | None = option(
        "ranks that share one copy of the weights, for hsdp; null otherwise", None, may_change=True
    )
    reshard: bool = option(
        "free gathered weights after the forward pass, and gather them once more",
        True,
        may_change=True,
    )
    prefetch: int = option(
        "units (pairs of sub-layers) whose weights are gathered ahead of time", 1, may_change=True
    )
    timeout: float = option(
        "seconds after which a rank that does not answer is given up", 600.0, may_change=True
    )


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
        "auto: continue where the run stopped; none: refuse an existing run; STEP: from that checkpoint",
        "auto",
        may_change=True,
    )
    seed: int = option("seed of initial weights and data order", 0)
    initial: str | None = option(
        "folder made by scripts/export.py or convert.py: its weights start the run, and it decides all of model; null: drawn",
        None,
    )
    steps: int = option("optimizer steps of the whole run")
    global_batch: int = option("sequences a step, and the number of data streams")
    micro_batch: int = option("sequences a forward pass", may_change=True)
    match: str | None = option(
        "compare at equal parameters (the MLP's width changes), tokens or compute (steps change)",
        None,
    )
    match_to: str | None = option(
        "residual path of the same configuration that `match` compares with", None
    )
    z_loss: float = option("weight of the mean squared logsumexp", 1e-5)
    documents: bool = option("attention stays inside a document", True)
    max_bad_steps: int = option("non-finite steps in a row that stop the run", 10, may_change=True)
    device: Device = option("where to train; auto: a GPU if there is one", may_change=True)
    precision: Precision = option("arithmetic of the model; weights and optimizer are float32")
    attention: AttentionBackend = option(
        "attention kernel; auto: what runs here", AttentionBackend.auto, may_change=True
    )
    kernels: Kernels = option(
        "depth attention; auto: triton on a GPU, else compiled where compile is on",
        Kernels.auto,
        may_change=True,
    )
    compile: Compile = option(
        "torch.compile: off, the whole model, or each sub-layer", Compile.off, may_change=True
    )
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
    run: str = option("run folder, one checkpoint inside it, or an exported model")
    step: int | None = option("checkpoint to evaluate; null: the newest complete one", None)
    strict: bool = option(
        "refuse where a newer checkpoint is damaged; false: pass it over, and record that", True
    )
    tokens: int | None = option("held-out tokens; null: as the run has it", None)
    batch: int | None = option("sequences a forward pass; null: as the run has it", None)
    diagnostics: bool = option("also measure where each site reads, as JSON and pictures", False)
    diagnostics_tokens: int | None = option(
        "held-out tokens of the diagnostics; null: as the run has it", None
    )
    device: Device = option("where to evaluate", Device.auto)
    precision: Precision | None = option("arithmetic; null: as the run has it", None)
    attention: AttentionBackend = option("attention kernel", AttentionBackend.auto)
    kernels: Kernels = option(
        "depth attention; auto: triton on a GPU, else reference", Kernels.auto
    )
    threads: int | None = option("CPU threads; null: torch's choice", None)
    cache: str | None = option("folder for prepared corpora; null: as the run has it", None)
    downstream: list[str] | None = option(
        "tasks of lm-evaluation-harness, such as [hellaswag,piqa], that are measured instead of the held-out loss",
        None,
    )
    tasks: str | None = option("folder of task files of your own, for downstream", None)
    limit: int | None = option("only the first documents of each downstream task; null: all", None)


@dataclass
class TokenizeConfig:
    out: str = option("folder of the shards; one that was left unfinished is continued")
    workers: int = option("processes that tokenize", 1)
    shard_mb: int = option("MiB of text in a shard, at least", 256)
    data: DataConfig = option("the corpus", DataConfig)
    tokenizer: TokenizerConfig = option("the tokenizer", TokenizerConfig)
