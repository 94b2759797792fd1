"""The settings of a run.

Each value stands in exactly one place. What describes an experiment (sizes, corpora, learning
rates) stands in `configs/`, and those fields have no default here; what hardly ever changes has its
default here, the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from lrattnres.config.data import DataConfig, TokenizerConfig
from lrattnres.config.machine import (
    AC,
    AttentionBackend,
    ClusterConfig,
    Compile,
    Device,
    Kernels,
    Loss,
    ParallelConfig,
    Precision,
    cpu_threads,
)
from lrattnres.config.model import ModelConfig
from lrattnres.config.schema import option


class Orthogonalizer(Enum):
    newton_schulz = "newton_schulz"
    polar_express = "polar_express"


class LoggerName(Enum):
    none = "none"
    wandb = "wandb"


SEEDS: dict[str, Any] = {"at_least": 0, "at_most": 2**63 - 1}
SEQUENCES: dict[str, Any] = {"at_least": 1, "at_most": 2**20}


def _every(help: str, *default: int | None) -> Any:
    """A number of steps from one record to the next."""
    return option(help, *default, at_least=1, may_change=True)


@dataclass
class OptimizerConfig:
    name: str = option(
        "which optimizer; muon_adam: Muon on matrices, Adam on the rest", "muon_adam"
    )
    muon_lr: float = option("peak learning rate of Muon: every matrix in the blocks", at_least=0)
    adam_lr: float = option("peak learning rate of Adam: embedding, head and queries", at_least=0)
    routing_lr: float | None = option(
        "peak learning rate of what Adam owns in the residual path; null: adam_lr",
        None,
        at_least=0,
    )
    warmup: int = option("steps of linear warm-up", at_least=0)
    warmdown: float = option(
        "share of all steps spent on the linear warm-down", 0.2, at_least=0, at_most=1
    )
    final: float = option(
        "learning rate at the last step, as a share of the peak", 0.1, at_least=0, at_most=1
    )
    momentum: float = option("Nesterov momentum of Muon", 0.95, at_least=0, at_most=0.9999)
    momentum_low: float = option(
        "momentum at the first and the last step", 0.85, at_least=0, at_most=0.9999
    )
    momentum_rise: int = option(
        "steps over which the momentum rises to its value; 0: no rise", at_least=0
    )
    momentum_fall: int = option("last steps over which it falls back; 0: no fall", at_least=0)
    muon_weight_decay: float = option("decoupled weight decay of Muon", 0.1, at_least=0)
    cautious: bool = option("decay a weight only where its update has the same sign", True)
    orthogonalizer: Orthogonalizer = option(
        "coefficients of the orthogonalising iteration", Orthogonalizer.polar_express
    )
    iterations: int = option("steps of the orthogonalising iteration", 5, at_least=1, at_most=20)
    adam_beta1: float = option("Adam's decay of the first moment", 0.9, at_least=0, at_most=0.9999)
    adam_beta2: float = option(
        "Adam's decay of the second moment", 0.95, at_least=0, at_most=0.99999
    )
    adam_eps: float = option("Adam's epsilon", 1e-8, at_least=1e-30)
    clip: float | None = option(
        "largest norm of the whole gradient; null: no clipping", 1.0, at_least=1e-12
    )


@dataclass
class CheckpointConfig:
    every: int = _every("steps between checkpoints")
    keep_last: int = option("newest checkpoints that are kept", 2, at_least=1, may_change=True)
    keep_every: int | None = _every("checkpoints at multiples of this step are kept for good", None)
    asynchronous: bool = option(
        "training goes on from a copy in host memory while it is written", False, may_change=True
    )


@dataclass
class EvaluationConfig:
    every: int | None = _every("steps between evaluations in training; null: only at the end")
    tokens: int = option("held-out tokens that are evaluated", at_least=1)
    tokens_in_training: int | None = option(
        "how many of them at most before the last step; null: all of them",
        None,
        at_least=1,
        may_change=True,
    )
    batch: int = option("sequences a forward pass", 16, **SEQUENCES, may_change=True)
    diagnostics_every: int | None = _every(
        "steps between depth diagnostics in training, which come after the last step too; "
        "null: off",
        None,
    )
    diagnostics_tokens: int = option(
        "held-out tokens of the depth diagnostics", 1_000_000, at_least=1, may_change=True
    )


@dataclass
class InstrumentsConfig:
    log: int = _every("steps between lines of metrics.jsonl", 10)
    gradients: int | None = _every("steps between gradient norms per block; null: off", 100)
    depth: int | None = _every(
        "steps between norms of h per site and the newest source's share; null: off", 500
    )
    ranks: int | None = _every(
        "steps between counts of each rank's bytes sent and peak memory; null: off", None
    )


@dataclass
class LoggerConfig:
    name: LoggerName = option(
        "where metrics go besides metrics.jsonl", LoggerName.none, may_change=True
    )
    project: str = option("W&B project", "lrattnres", may_change=True)
    entity: str | None = option("W&B entity; null: your default", None, may_change=True)


@dataclass
class TrainConfig:
    name: str = option("name of the run folder; it follows from the choices unless given")
    runs: str = option("folder that holds the run folders", "runs", may_change=True)
    resume: str = option(
        "auto: continue where the run stopped; none: refuse an existing run; STEP: from that "
        "checkpoint",
        "auto",
        may_change=True,
    )
    seed: int = option("seed of initial weights and data order", 0, **SEEDS)
    initial: str | None = option(
        "folder made by scripts/export.py or convert.py: its weights start the run, and it decides "
        "all of model; null: drawn",
        None,
    )
    steps: int = option("optimizer steps of the whole run", at_least=1)
    global_batch: int = option("sequences a step, and the number of data streams", **SEQUENCES)
    micro_batch: int = option("sequences a forward pass", **SEQUENCES, may_change=True)
    match: str | None = option(
        "compare at equal parameters (the MLP's width changes), tokens or compute (steps change)",
        None,
    )
    match_to: str | None = option(
        "residual path of the same configuration that `match` compares with", None
    )
    z_loss: float = option("weight of the mean squared logsumexp", 1e-5, at_least=0)
    documents: bool = option("attention stays inside a document", True)
    max_bad_steps: int = option(
        "non-finite steps in a row that stop the run", 10, at_least=1, may_change=True
    )
    device: Device = option("where to train; auto: a GPU if there is one", may_change=True)
    precision: Precision = option("arithmetic of the model; weights and optimizer are float32")
    attention: AttentionBackend = option(
        "attention kernel; auto: what runs here", AttentionBackend.auto, may_change=True
    )
    kernels: Kernels = option(
        "depth attention and streams; auto: triton on a GPU, else compiled where compile is on",
        Kernels.auto,
        may_change=True,
    )
    loss: Loss = option(
        "head and loss: by the logits of a whole forward pass, or chunked, some tokens at a time; "
        "auto: whole where the model is compiled and its logits are small, else chunked",
        Loss.auto,
        may_change=True,
    )
    compile: Compile = option(
        "torch.compile: off, the whole model, or each sub-layer", Compile.off, may_change=True
    )
    ac: AC = option(
        "activation checkpointing: none, selective (sub-layers are recomputed, what depth reads "
        "saved stays), full (reads too)",
        AC.none,
        may_change=True,
    )
    threads: int | None = cpu_threads(may_change=True)
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
