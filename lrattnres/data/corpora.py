"""The corpora by name."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lrattnres.config import CorpusName, DataConfig
from lrattnres.data.bins import BinTokens
from lrattnres.data.docstrings import SHORTEST, installed_sources, read_docstrings
from lrattnres.data.documents import Corpus, Documents, EncodedCorpus
from lrattnres.data.errors import DataError
from lrattnres.data.listing import Listing
from lrattnres.data.parquet import ParquetCorpus, list_corpus
from lrattnres.data.prepared import Source, open_prepared
from lrattnres.data.readers import find_files, read_file
from lrattnres.data.shards import INDEX, TokenShards
from lrattnres.data.stores import open_store
from lrattnres.data.tokenizers import Tokenizer

ULTRA_FINEWEB = "hf://datasets/openbmb/Ultra-FineWeb/data/ultrafineweb_en"


def open_documents(
    config: DataConfig,
    tokenizer: Tokenizer,
    pinned: Mapping[str, Any] | None = None,
    *,
    fresh: bool = False,
) -> Documents:
    """What `data` describes, as tokens; see `open_corpus`."""
    if config.corpus is not CorpusName.tokens:
        return EncodedCorpus(open_corpus(config, pinned, fresh=fresh), tokenizer)
    root = Path(config.root or "").expanduser()
    if not (root / INDEX).exists() and any(root.glob("*.bin")):
        if config.max_tokens is not None or config.deduplicate:
            raise DataError(
                f"data.root={root}: headerless .bin files know no data.max_tokens and no "
                "data.deduplicate"
            )
        return BinTokens(root, tokenizer)
    return TokenShards(
        root, tokenizer, max_tokens=config.max_tokens, deduplicate=config.deduplicate
    )


def open_corpus(
    config: DataConfig, pinned: Mapping[str, Any] | None = None, *, fresh: bool = False
) -> Corpus:
    """The texts that `data` describes.

    Docstrings and files are prepared in the cache folder by the first call; later ones only open
    it. Where many processes start together, let one of them call first.

    Args:
        config: the settings `data`.
        pinned: the listing that a run took of its corpus when it started, if it has one. It holds,
            and the store is not asked again. Only a folder of this machine is looked through, which
            costs next to nothing and tells at once what changed; elsewhere a file that is gone or
            changed is found out when its turn comes.
        fresh: `pinned` was listed just now by another process, and holds for a folder, too.

    Raises:
        DataError: with the key or file that is wrong.
        UnreadableError: the store cannot be listed.
    """
    if config.corpus is CorpusName.tokens:
        raise DataError(
            "data.corpus=tokens: has no texts; write data=ultra_fineweb, data=files or "
            "data=docstrings"
        )
    if config.corpus is CorpusName.ultra_fineweb:
        return _ultra_fineweb(config, pinned, fresh)
    corpus = open_prepared(_SOURCES[config.corpus](config), cache_folder(config.cache))
    if config.deduplicate:
        corpus.deduplicate()
    return corpus


def cache_folder(cache: str | None) -> Path:
    """`data.cache`, else the folder `lrattnres` in $XDG_CACHE_HOME or ~/.cache."""
    if cache is not None:
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lrattnres"


def _docstrings(config: DataConfig) -> Source:
    folders = installed_sources()
    versions = [
        f"python {platform.python_version()}",
        f"torch {version('torch')}",
        f"from {SHORTEST} characters",
    ]
    return Source(
        "docstrings",
        [*versions, *map(str, folders)],
        lambda: read_docstrings(folders),
        f"data.corpus=docstrings: no documentation found in {', '.join(map(str, folders))}; "
        "write data=files",
    )


def _files(config: DataConfig) -> Source:
    name = config.corpus.name
    if config.root is None:
        raise DataError(
            f"data.root=null: {name} needs your texts; write data.root=FILE, FOLDER or a quoted "
            "glob"
        )
    files = find_files(config.root)
    stats = [(str(path.resolve()), path.stat()) for path in files]

    def documents() -> Iterator[str | None]:
        for path in files:
            yield from read_file(path, config.column)

    return Source(
        name,
        [config.column, *(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)],
        documents,
        f"data.root={config.root}: {len(files)} files and not one text in "
        f"data.column={config.column}",
    )


def _ultra_fineweb(
    config: DataConfig, pinned: Mapping[str, Any] | None, fresh: bool
) -> ParquetCorpus:
    root, column, min_score = config.root or ULTRA_FINEWEB, config.column, config.min_score
    known = Listing.read(pinned) if pinned else None
    revision = config.revision or (known.revision if known else None)
    store = open_store(root, timeout=config.timeout, retries=config.retries, revision=revision)
    holds = fresh or not store.local or config.skip_unreadable
    if known is None or known.root != store.root or not holds:
        known = list_corpus(
            store, column=column, scored=min_score is not None, max_files=config.max_files
        )
    return ParquetCorpus(config.corpus.name, store, known, column=column, min_score=min_score)


_SOURCES: dict[CorpusName, Callable[[DataConfig], Source]] = {
    CorpusName.docstrings: _docstrings,
    CorpusName.files: _files,
}
