"""The settings of the commands for a trained model: generate, inspect_text, export and convert."""

from __future__ import annotations

from dataclasses import dataclass, field

from lrattnres.config.model import Routing
from lrattnres.config.run import Device, Kernels, Precision
from lrattnres.config.schema import option


@dataclass
class GenerateConfig:
    run: str = option("run folder, one checkpoint inside it, or an exported model")
    prompt: str = option(
        "text to continue, taken as it is; -: standard input; empty: a document from its beginning"
    )
    lines: bool = option("every line of the prompt is a prompt of its own", False)
    tokens: int | None = option(
        "tokens of a continuation, at most; null: as many as the context allows", None
    )
    samples: int = option("continuations of each prompt", 1)
    seed: int = option("seed of all random choices", 0)
    temperature: float = option("logits are divided by it; 0: always the most likely token", 1.0)
    top_k: int | None = option("choose among the k most likely tokens; null: among all", None)
    top_p: float | None = option(
        "then among the fewest that together have this probability, 0..1; null: among all", None
    )
    min_p: float | None = option(
        "then among those at least this many times as likely as the likeliest, 0..1; null: all",
        None,
    )
    stop: list[str] = field(
        default_factory=list,
        metadata={
            "help": "text that ends a continuation, and is left out; may be given several times",
            "may_change": False,
        },
    )
    end: bool = option(
        "end-of-text ends a continuation; false: the next document follows, marked as <|endoftext|>",
        True,
    )
    echo: bool = option("write the prompt in front of its continuation", False)
    json: bool = option(
        "one JSON object a continuation: prompt, sample, text, tokens, finish (end, stop or length)",
        False,
    )
    batch: int = option("continuations at a time", 16)
    step: int | None = option("checkpoint to use; null: the newest complete one", None)
    device: Device = option("where to compute", Device.auto)
    precision: Precision | None = option("arithmetic; null: as the run has it", None)
    kernels: Kernels = option(
        "depth attention over a prompt; auto: triton on a GPU, else reference", Kernels.auto
    )
    threads: int | None = option("CPU threads; null: torch's choice", None)


@dataclass
class InspectConfig:
    run: str = option("run folder, one checkpoint inside it, or an exported model")
    text: str | None = option("text to look at, taken as it is; -: standard input", None)
    file: str | None = option("file with the text, in UTF-8, instead of text", None)
    out: str | None = option("folder of what is written; null: inspection/ in the run folder", None)
    sites: str | None = option(
        "sites of the picture over tokens, such as 2,7,head; null: six, spread over the depth", None
    )
    first: int = option(
        "first token of that picture, from 0: the end-of-text in front of the text", 0
    )
    shown: int = option("tokens of that picture", 64)
    step: int | None = option("checkpoint to use; null: the newest complete one", None)
    device: Device = option("where to compute", Device.auto)
    precision: Precision | None = option("arithmetic; null: as the run has it", None)
    threads: int | None = option("CPU threads; null: torch's choice", None)


@dataclass
class ExportConfig:
    run: str = option("run folder, or one checkpoint inside it")
    out: str = option("folder that is made; one that has something in it is refused")
    step: int | None = option("checkpoint to export; null: the newest complete one", None)


@dataclass
class VariantConfig:
    residual: str = option("residual path of the new model: a row of the table in docs/paths.md")
    rank: int | None = option("width r of a routing key, where the path has one of its own", None)
    blocks: int | None = option("number N of depth blocks; null: every sub-layer is a source", None)
    routing: Routing | None = option("how the mixture is used; null: as published", None)
    gate: bool = option("a gate for each read, zero at the start (model.gate of a run)", False)


@dataclass
class ConvertConfig:
    source: str = option(
        "folder of a Llama or Qwen3 model in Hugging Face format, or one that scripts/export.py made"
    )
    out: str = option("folder that is made; one that has something in it is refused")
    context: int | None = option("window length; null: as the given model has it", None)
    seed: int = option(
        "seed of the weights that the given model lacks: queries are zero, the key rows of projected keys are not",
        0,
    )
    model: VariantConfig = option("the new residual path", VariantConfig)
