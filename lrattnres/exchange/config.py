"""The settings of scripts/export.py and scripts/convert.py."""

from __future__ import annotations

from dataclasses import dataclass

from lrattnres.config import Routing, option


@dataclass
class ExportConfig:
    run: str = option("run folder, or one checkpoint inside it")
    out: str = option("folder that is made; one that has something in it is refused")
    step: int | None = option("checkpoint to export; null: the newest complete one", None)


@dataclass
class VariantConfig:
    residual: str = option("residual path of the new model: a row of the table of variants")
    rank: int | None = option("width r of a routing key, where the variant has one of its own", None)
    blocks: int | None = option("number N of depth blocks; null: every sub-layer is a source", None)
    routing: Routing | None = option("how the mixture is used; null: as published", None)
    gate: bool = option("a gate for each read, zero at the start (model.gate of a run)", False)


@dataclass
class ConvertConfig:
    source: str = option("folder of a Llama or Qwen3 model in Hugging Face format, or one that scripts/export.py made")
    out: str = option("folder that is made; one that has something in it is refused")
    context: int | None = option("window length; null: as the given model has it", None)
    seed: int = option(
        "seed of the weights that the given model lacks: queries are zero, the key rows of projected keys are not", 0
    )
    model: VariantConfig = option("the new residual path", VariantConfig)
