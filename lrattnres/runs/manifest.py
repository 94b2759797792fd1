"""manifest.json: the size and hash of every file of a checkpoint, and a hash of itself.

So a single changed bit is noticed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from lrattnres.distributed.ranks import RankError, Ranks
from lrattnres.runs.errors import CheckpointError
from lrattnres.runs.files import sync, write_atomic

FORMAT = 1
MANIFEST = "manifest.json"


def write_manifest(folder: Path, step: int, details: dict[str, Any], ranks: Ranks) -> None:
    """Brings all files of a checkpoint to the disk, and writes the manifest last. Collective.

    Each rank reads the files that it wrote. `sha256` is the hash of the manifest without this key.

    Args:
        folder: Of the checkpoint, on storage that all ranks share.
        step: Of the checkpoint.
        details: Anything that JSON can hold.
        ranks: The ranks that wrote it.

    Raises:
        RankError: Rank 0 does not find a file as another rank wrote it.
        OSError: A file cannot be written.
    """
    mine = [*folder.glob(f"__{ranks.rank}_*"), *([folder / ".metadata"] if ranks.rank == 0 else [])]
    files = {
        name: entry
        for part in ranks.collect(lambda: _described(mine))
        for name, entry in part.items()
    }

    def write() -> None:
        for name, entry in files.items():
            if not (folder / name).is_file() or (folder / name).stat().st_size != entry["size"]:
                raise RankError(
                    f"{folder / name} is not here as it was written; all machines of a job must "
                    "share this folder"
                )
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "details": details,
            "files": dict(sorted(files.items())),
        }
        manifest["sha256"] = _own_hash(manifest)
        write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")

    ranks.of_first(write)


def verified_manifest(folder: Path, step: int, ranks: Ranks) -> dict[str, Any]:
    """The manifest of a checkpoint, after its files were compared with it. Collective.

    The files are divided among the ranks.

    Args:
        folder: Of the checkpoint.
        step: Of which it must be.
        ranks: The ranks that read it.

    Raises:
        CheckpointError: Names the first thing that is not as the manifest says.
    """
    manifest = ranks.of_first(lambda: _read(folder, step))
    names = sorted(manifest["files"])[ranks.rank :: ranks.world]
    ranks.all_succeed(lambda: _verify(folder, {name: manifest["files"][name] for name in names}))
    return manifest


def _described(paths: list[Path]) -> dict[str, dict[str, Any]]:
    for path in paths:
        sync(path)
    return {path.name: {"size": path.stat().st_size, "sha256": _hash(path)} for path in paths}


def _read(folder: Path, step: int) -> dict[str, Any]:
    """The manifest of a folder, after all checks that need no other file.

    Raises:
        CheckpointError: It is missing, damaged, or of another step.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: format {manifest['format']}, this version reads {FORMAT}; use the one "
                "that wrote it"
            )
        if manifest["sha256"] != _own_hash(manifest) or manifest["step"] != step:
            raise CheckpointError(
                f"{path}: damaged, or of another folder: it was not written like this for step "
                f"{step}"
            )
        for name, entry in manifest["files"].items():
            if (folder / name).parent != folder or set(entry) != {"size", "sha256"}:
                raise CheckpointError(
                    f"{path}: lists {name} with {entry}, which is no file of this folder"
                )
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: unreadable: {error!r}") from error
    return dict(manifest)


def _verify(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Compares files with their entries in the manifest.

    Raises:
        CheckpointError: Names the first file that differs.
    """
    for name, entry in files.items():
        file = folder / name
        try:
            if not file.is_file():
                raise CheckpointError(f"{file}: missing")
            if file.stat().st_size != entry["size"]:
                raise CheckpointError(
                    f"{file}: {file.stat().st_size} bytes, but {MANIFEST} says {entry['size']}"
                )
            if _hash(file) != entry["sha256"]:
                raise CheckpointError(f"{file}: damaged, its SHA-256 is not the one in {MANIFEST}")
        except OSError as error:
            raise CheckpointError(f"{file}: unreadable: {error!r}") from error


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_hash(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
