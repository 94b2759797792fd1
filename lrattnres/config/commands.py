"""The settings of the commands for a trained model: eval, generate, inspect, export, convert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lrattnres.config.machine import (
    AttentionBackend,
    Device,
    Kernels,
    Loss,
    Precision,
    cpu_threads,
)
from lrattnres.config.model import Routing
from lrattnres.config.schema import option
from lrattnres.config.training import SEEDS, SEQUENCES

RUN = "run folder, one checkpoint inside it, or an exported model"
ARITHMETIC = "arithmetic; null: as the run has it"
STRICT = "refuse where a newer checkpoint is damaged; false: pass it over, and record that"
NEW_FOLDER = "folder that is made; one that has something in it is refused"


def _step(use: str) -> Any:
    return option(f"checkpoint to {use}; null: the newest complete one", None, at_least=0)


@dataclass
class EvalConfig:
    run: str = option(RUN)
    step: int | None = _step("evaluate")
    strict: bool = option(STRICT, True)
    tokens: int | None = option("held-out tokens; null: as the run has it", None, at_least=1)
    batch: int | None = option(
        "sequences a forward pass; null: as the run has it", None, **SEQUENCES
    )
    diagnostics: bool = option("also measure where each site reads, as JSON and pictures", False)
    diagnostics_tokens: int | None = option(
        "held-out tokens of the diagnostics; null: as the run has it", None, at_least=1
    )
    device: Device = option("where to evaluate", Device.auto)
    precision: Precision | None = option(ARITHMETIC, None)
    attention: AttentionBackend = option("attention kernel", AttentionBackend.auto)
    kernels: Kernels = option(
        "depth attention and streams; auto: triton on a GPU, else reference", Kernels.auto
    )
    loss: Loss = option(
        "head and loss: by whole logits, or chunked, some tokens at a time; auto: chunked",
        Loss.auto,
    )
    threads: int | None = cpu_threads()
    cache: str | None = option("folder for prepared corpora; null: as the run has it", None)
    downstream: list[str] | None = option(
        "tasks of lm-evaluation-harness, such as [hellaswag,piqa], that are measured instead of "
        "the held-out loss",
        None,
    )
    tasks: str | None = option("folder of task files of your own, for downstream", None)
    limit: int | None = option(
        "only the first documents of each downstream task; null: all", None, at_least=1
    )


@dataclass
class GenerateConfig:
    run: str = option(RUN)
    prompt: str = option(
        "text to continue, taken as it is; -: standard input; empty: a document from its beginning"
    )
    lines: bool = option("every line of the prompt is a prompt of its own", False)
    tokens: int | None = option(
        "tokens of a continuation, at most; null: as many as the context allows", None, at_least=1
    )
    samples: int = option("continuations of each prompt", 1, **SEQUENCES)
    seed: int = option("seed of all random choices", 0, **SEEDS)
    temperature: float = option(
        "logits are divided by it; 0: always the most likely token", 1.0, at_least=0
    )
    top_k: int | None = option(
        "choose among the k most likely tokens; null: among all", None, at_least=1
    )
    top_p: float | None = option(
        "then among the fewest that together have this probability; null: among all",
        None,
        at_least=1e-12,
        at_most=1,
    )
    min_p: float | None = option(
        "then among those at least this many times as likely as the likeliest; null: all",
        None,
        at_least=0,
        at_most=1,
    )
    stop: list[str] = option(
        "text that ends a continuation, and is left out; may be given several times", list
    )
    end: bool = option(
        "end-of-text ends a continuation; false: the next document follows, marked as "
        "<|endoftext|>",
        True,
    )
    echo: bool = option("write the prompt in front of its continuation", False)
    json: bool = option(
        "one JSON object a continuation: prompt, sample, text, tokens, finish (end, stop or "
        "length)",
        False,
    )
    batch: int = option("continuations at a time", 16, **SEQUENCES)
    step: int | None = _step("use")
    device: Device = option("where to compute", Device.auto)
    precision: Precision | None = option(ARITHMETIC, None)
    kernels: Kernels = option(
        "depth attention over a prompt; auto: triton on a GPU, else reference", Kernels.auto
    )
    threads: int | None = cpu_threads()


@dataclass
class InspectConfig:
    run: str = option(RUN)
    text: str | None = option("text to look at, taken as it is; -: standard input", None)
    file: str | None = option("file with the text, in UTF-8, instead of text", None)
    out: str | None = option("folder of what is written; null: inspection/ in the run folder", None)
    sites: str | None = option(
        "sites of the picture over tokens, such as 2,7,head; null: six, spread over the depth", None
    )
    first: int = option(
        "first token of that picture, from 0: the end-of-text in front of the text", 0, at_least=0
    )
    shown: int = option("tokens of that picture", 64, at_least=1, at_most=512)
    step: int | None = _step("use")
    device: Device = option("where to compute", Device.auto)
    precision: Precision | None = option(ARITHMETIC, None)
    threads: int | None = cpu_threads()


@dataclass
class ExportConfig:
    run: str = option("run folder, or one checkpoint inside it")
    out: str = option(NEW_FOLDER)
    step: int | None = _step("export")
    strict: bool = option(STRICT, True)


@dataclass
class VariantConfig:
    residual: str = option("residual path of the new model: a row of the table in docs/paths.md")
    rank: int | None = option("width r of a routing key, where the path has one of its own", None)
    blocks: Any = option(
        "number N of depth blocks, or how many sub-layers each has; null: every sub-layer is a "
        "source",
        None,
        kind=int | list[int] | None,
    )
    path: dict[str, Any] = option("settings of the residual path of its own", dict)
    routing: Routing | None = option("how the mixture is used; null: as published", None)
    gate: bool = option("a gate for each read, zero at the start (model.gate of a run)", False)


@dataclass
class ConvertConfig:
    source: str = option(
        "folder of a Llama or Qwen3 model in Hugging Face format, or one that scripts/export.py "
        "made"
    )
    out: str = option(NEW_FOLDER)
    context: int | None = option(
        "window length; null: as the given model has it", None, at_least=1, at_most=2**27
    )
    seed: int = option(
        "seed of the weights that the given model lacks: queries are zero, the key rows of "
        "projected keys are not",
        0,
        **SEEDS,
    )
    model: VariantConfig = option("the new residual path", VariantConfig)
