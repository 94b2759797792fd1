"""The corpora by name, and which of their documents are held out."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np

from lrattnres.config import CorpusName, DataConfig
from lrattnres.data.docstrings import SHORTEST, installed_sources, read_docstrings
from lrattnres.data.errors import DataError
from lrattnres.data.prepared import Source, open_prepared
from lrattnres.data.readers import find_files, read_file


class Corpus(Protocol):
    """Documents by index, none of them empty. Corpora with the same `fingerprint` hold the same documents in the same order."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def description(self) -> str:
        """One line for people: documents, megabytes, skipped rows."""

    @property
    def hashes(self) -> np.ndarray:
        """uint64 [documents]: `content_hash` of each text."""

    def __len__(self) -> int: ...
    def text(self, index: int) -> str: ...


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that `data` describes. The first call prepares it in the cache folder; later ones only open it.

    Where many processes start together, let one of them call first. Raises DataError with the key or file at fault.
    """
    return open_prepared(_SOURCES[config.corpus](config), cache_folder(config.cache))


def cache_folder(cache: str | None) -> Path:
    """`data.cache`, else the folder `lrattnres` in $XDG_CACHE_HOME or ~/.cache."""
    if cache is not None:
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lrattnres"


def split(corpus: Corpus, holdout: float) -> tuple[np.ndarray, np.ndarray]:
    """Indices (int64) of the training documents, in the order of the corpus, and of the held-out ones, by content hash.

    A document is held out iff its hash is below holdout * 2**64. This depends on its text alone, so copies of a text
    fall on the same side, and no seed or epoch moves one across.
    """
    if not 0 <= holdout <= 1:
        raise DataError(f"data.holdout={holdout}: must be a share between 0 and 1, such as 0.05")
    threshold = int(holdout * 2**64)
    held_out = corpus.hashes <= np.uint64(threshold - 1) if threshold else np.zeros(len(corpus), dtype=bool)
    chosen = np.flatnonzero(held_out)
    return np.flatnonzero(~held_out), chosen[np.argsort(corpus.hashes[chosen], kind="stable")]


def _docstrings(config: DataConfig) -> Source:
    folders = installed_sources()
    versions = [f"python {platform.python_version()}", f"torch {version('torch')}", f"from {SHORTEST} characters"]
    return Source(
        "docstrings",
        [*versions, *map(str, folders)],
        lambda: read_docstrings(folders),
        f"data.corpus=docstrings: no documentation found in {', '.join(map(str, folders))}; write data=files",
    )


def _files(config: DataConfig) -> Source:
    name = config.corpus.name
    if config.root is None:
        raise DataError(f"data.root=null: {name} needs your texts; write data.root=FILE, FOLDER or a quoted glob")
    files = find_files(config.root)
    stats = [(str(path.resolve()), path.stat()) for path in files]

    def documents() -> Iterator[str | None]:
        for path in files:
            yield from read_file(path, config.column)

    return Source(
        name,
        [config.column, *(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)],
        documents,
        f"data.root={config.root}: {len(files)} files and not one text in data.column={config.column}",
    )


def _ultra_fineweb(config: DataConfig) -> Source:
    if config.root is None or "://" in config.root:
        raise DataError(
            f"data.root={'null' if config.root is None else config.root}: this version cannot stream ultra_fineweb from "
            "the hub; write data.root=FOLDER with its parquet files, or experiment=demo for a run that needs no download"
        )
    return _files(config)


_SOURCES: dict[CorpusName, Callable[[DataConfig], Source]] = {
    CorpusName.docstrings: _docstrings,
    CorpusName.files: _files,
    CorpusName.ultra_fineweb: _ultra_fineweb,
}
