"""The model's part of the schema: sizes, and how its residual path is made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from lrattnres.config.schema import option


class Routing(Enum):
    replace = "replace"
    add = "add"


class LogitScale(Enum):
    none = "none"
    rsqrt = "rsqrt"


class BlockScale(Enum):
    sum = "sum"
    mean = "mean"
    sqrt = "sqrt"


class Sources(Enum):
    outputs = "outputs"
    states = "states"


class Mixing(Enum):
    softmax = "softmax"
    sigmoid = "sigmoid"
    scalars = "scalars"


class NormScope(Enum):
    head = "head"
    full = "full"


# Of a width or a count inside the model: beyond them nothing could be built.
COUNT: dict[str, Any] = {"at_least": 1, "at_most": 2**16}
LAYERS: dict[str, Any] = {"at_least": 1, "at_most": 2**12}
WIDTH: dict[str, Any] = {"at_least": 1, "at_most": 2**20}
TOKENS: dict[str, Any] = {"at_least": 1, "at_most": 2**27}


@dataclass
class DepthConfig:
    """Ablations of depth routing; the defaults are the published method (docs/ablations.md)."""

    key_norm: bool = option("keys are RMS-normalised before they are scored", True)
    logit_scale: LogitScale = option(
        "factor of the logits: none, or rsqrt: 1/sqrt(width of a head's key)", LogitScale.none
    )
    query_std: float = option(
        "standard deviation of the initial queries; 0: they are zero", 0.0, at_least=0
    )
    heads: int = option(
        "heads of the read; each scores with its slice of query and key, and mixes its slice of "
        "the values",
        1,
        **COUNT,
    )
    input_queries: bool = option(
        "add a projection of the newest source, zero at the start, to each site's query", False
    )
    block_scale: BlockScale = option(
        "a block's value: the sum of its n outputs, mean: over n, sqrt: over sqrt(n)",
        BlockScale.sum,
    )
    learned_scale: bool = option(
        "multiply the value of each source by a learned number, one at the start", False
    )
    null_source: bool = option(
        "a source more, whose value and logit are zero: a site may read nothing", False
    )
    embedding_source: bool = option("sites after the first may read the embedding", True)
    sources: Sources = option(
        "outputs (and sums of them), or states: o_0 + Σ o_i after each block", Sources.outputs
    )
    mixing: Mixing = option(
        "weights: softmax over the sources, sigmoid of each logit, or scalars (learned, without "
        "queries and keys)",
        Mixing.softmax,
    )
    window: int | None = option(
        "sources: the embedding and so many of the newest blocks; null: all", None, **COUNT
    )
    norm_scope: NormScope = option(
        "of several heads: each head's slice of a key is normalised by itself (head), or the key "
        "before it is cut (full)",
        NormScope.head,
    )


class QKNorm(Enum):
    plain = "plain"
    gains = "gains"
    none = "none"


class RopeKind(Enum):
    none = "none"
    linear = "linear"
    llama3 = "llama3"


@dataclass
class RopeScaling:
    """How a pretrained model's rotary frequencies were stretched beyond its first context."""

    kind: RopeKind = option(
        "none, linear (every frequency by factor), or llama3 (the slow ones by factor)",
        RopeKind.none,
    )
    factor: float = option("divisor of the frequencies", 1.0, at_least=1)
    low: float = option(
        "llama3: frequencies with fewer periods in the first context are divided",
        1.0,
        at_least=1e-9,
    )
    high: float = option(
        "llama3: those with more periods stay as they are, and between the two it is interpolated",
        4.0,
        at_least=1e-9,
    )
    first_context: int = option("llama3: window length of the first training", 8192, **TOKENS)


@dataclass
class ModelConfig:
    residual: str = option("residual path: a row of the table in docs/paths.md")
    rank: int | None = option(
        "width r of a routing key, 1..dim; null where the path has no key of its own"
    )
    blocks: Any = option(
        "number N of depth blocks, 1..2*layers, or how many sub-layers each has: [1,1,2,4]; "
        "null: every sub-layer is a source",
        kind=int | list[int] | None,
    )
    routing: Routing | None = option(
        "how the mixture is used: replace the stream or add to it; null: as published", None
    )
    path: dict[str, Any] = option("settings of the residual path of its own", dict)
    layers: int = option("number L of transformer blocks, each of two sub-layers", **LAYERS)
    dim: int = option("width d of the residual stream", **WIDTH)
    heads: int = option("attention heads; dim / heads must be even", **COUNT)
    mlp_width: int = option("width of the SwiGLU hidden layer", **WIDTH)
    context: int = option("window length in tokens", **TOKENS)
    vocabulary: int | None = option(
        "rows of embedding and head; null: the tokenizer's size", None, **TOKENS
    )
    rope_base: float = option("base of the rotary position embedding", 500_000.0, at_least=1)
    init_std: float = option(
        "standard deviation of every initial weight but queries (depth.query_std) and constants",
        0.02,
        at_least=0,
    )
    depth: DepthConfig = option("ablations of depth routing", DepthConfig)
    gate: bool = option(
        "each routed read comes in by a learned gate, zero at the start: the model begins as "
        "its baseline",
        False,
    )
    kv_heads: int | None = option(
        "heads of keys and values, a divisor of heads; null: as many as heads", None, **COUNT
    )
    head_dim: int | None = option(
        "width of a head; null: dim / heads", None, at_least=2, at_most=2**16
    )
    gains: bool = option("learned gains after the norms of sub-layers and head", False)
    qk_norm: QKNorm = option(
        "norm of queries and keys: plain, with learned gains, or none", QKNorm.plain
    )
    norm_eps: float = option(
        "epsilon of all norms but those of routing keys", 2.0**-23, at_least=0, at_most=0.1
    )
    tied: bool = option("head and embedding are one matrix", False)
    rope_scaling: RopeScaling = option(
        "stretched rotary frequencies of a pretrained model", RopeScaling
    )

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def value_heads(self) -> int:
        return self.kv_heads or self.heads
