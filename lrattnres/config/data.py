"""The corpus and the tokenizer: which texts, and how they become tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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


@dataclass
class DataConfig:
    corpus: CorpusName = option("which corpus is read")
    root: str | None = option(
        "where it lies: a file, folder or glob (files); a folder, http(s)://, s3:// or hf:// "
        "prefix (ultra_fineweb; null: the hub); a folder of shards (tokens)",
        None,
    )
    revision: str | None = option(
        "git revision of the hub's data set; null: the newest, kept for the whole run", None
    )
    column: str = option("name of the text column or JSON key", "text")
    holdout: float = option(
        "share of documents held out, chosen by a hash of their content", above=0, below=1
    )
    min_score: float | None = option(
        "least value of the column `score` (ultra_fineweb); null: every row", None
    )
    max_files: int | None = option(
        "only the first files of the listing (ultra_fineweb); null: all", None, at_least=1
    )
    max_tokens: int | None = option(
        "token budget: the first groups that hold this many (tokens); null: all", None, at_least=1
    )
    deduplicate: bool = option(
        "leave out later copies of a text (docstrings, files, tokens)", False
    )
    cache: str | None = option(
        "folder for prepared corpora and held-out tokens; null: $XDG_CACHE_HOME/lrattnres or "
        "~/.cache/lrattnres",
        None,
        may_change=True,
    )
    workers: int = option(
        "threads that read and tokenize ahead; 0: in the training thread",
        2,
        at_least=0,
        at_most=256,
        may_change=True,
    )
    ahead: int = option(
        "batches that they keep ready", 8, at_least=1, at_most=65_536, may_change=True
    )
    memory: float = option(
        "GiB that the row groups of a streamed corpus may take", 32.0, at_least=0, may_change=True
    )
    timeout: float = option(
        "seconds without an answer after which a remote read is tried again",
        30.0,
        at_least=0.001,
        at_most=10**6,
        may_change=True,
    )
    retries: int = option(
        "further tries of a read, each after twice the pause (1, 2, 4 … 60 s)",
        8,
        at_least=0,
        at_most=100,
        may_change=True,
    )
    # May change although the data depend on it: a run that stopped at a broken file must be able
    # to go on. It is counted.
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
    separator: int | None = option(
        "its token that opens a document; null otherwise", None, at_least=0
    )


@dataclass
class TokenizeConfig:
    """Of `lrattnres tokenize`."""

    out: str = option("folder of the shards; one that was left unfinished is continued")
    workers: int = option("processes that tokenize", 1, at_least=1, at_most=4096)
    shard_mb: int = option("MiB of text in a shard, at least", 256, at_least=1, at_most=2**20)
    data: DataConfig = option("the corpus", DataConfig)
    tokenizer: TokenizerConfig = option("the tokenizer", TokenizerConfig)
