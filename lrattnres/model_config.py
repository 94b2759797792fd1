"""The model's part of the schema: sizes, and how its residual path is made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lrattnres.schema import option


class Routing(Enum):
    replace = "replace"
    add = "add"


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
