"""Checkpoints: complete or absent, verified before they are used, and safe to open whoever wrote them.

    checkpoints/step_000040/
        manifest.json                 format, step, details, and size and SHA-256 of every other file
        .metadata  __0_0.distcp       torch.distributed.checkpoint (DCP): one entry "model.NAME" for each tensor

A save goes to the hidden sibling `.step_000040.partial`, is brought to the disk, and only then gets its name. What is
found under a final name was therefore complete once; the manifest tells whether it still is.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from lrattnres.runs.files import sync, write_atomic

State = dict[str, dict[str, torch.Tensor]]

FORMAT = 1
MANIFEST = "manifest.json"


class CheckpointError(Exception):
    """A checkpoint that cannot be written, is damaged, or does not fit; `str` names the path and every fault."""


class Checkpoint:
    """One complete checkpoint whose files have just been compared with its manifest.

    Raises CheckpointError that names the folder and the first thing that is wrong with it.
    """

    step: int
    path: Path
    details: dict[str, Any]

    def __init__(self, path: Path, step: int):
        manifest = _verified_manifest(path, step)
        self.path, self.step, self.details = path, step, manifest["details"]
        self._files = frozenset(manifest["files"])

    def load(self, state: State) -> None:
        """Copies the saved values into the given tensors, bit by bit; each may lie on any device.

        Top-level names of the checkpoint that `state` leaves out are not read. Inside a given one, names, shapes and
        dtypes must be the saved ones: CheckpointError lists every difference, and no tensor is touched.
        """
        reader = _Reader(self.path, self._files)
        with _explained(f"{self.path}: cannot be read"):
            faults = _faults(state) or _differences(state, reader.read_metadata())
            if faults:
                raise CheckpointError(f"{self.path} does not fit:\n" + _listed(faults))
            load_tensors({name: dict(group) for name, group in state.items() if group}, storage_reader=reader, no_dist=True)


class Checkpoints:
    """The checkpoints of one run, written by one process at a time."""

    def __init__(self, folder: Path, *, keep_last: int = 2, keep_every: int | None = None):
        """Keeps the newest `keep_last` checkpoints, and those at multiples of `keep_every`. Touches no file."""
        for name, value in {"keep_last": keep_last, "keep_every": keep_every}.items():
            if value is not None and value < 1:
                raise CheckpointError(f"checkpoint.{name}={value}: must be at least 1")
        self.folder, self.keep_last, self.keep_every = Path(folder), keep_last, keep_every

    def save(self, step: int, state: State, details: dict[str, Any]) -> Path:
        """Writes the checkpoint of `step` and returns its folder; one that was there before is replaced.

        `details` is kept in the manifest and must survive JSON unchanged. Afterwards older checkpoints are removed, as
        the constructor says, but never the one just written. Raises CheckpointError when a value is no tensor, or the
        disk refuses (then nothing of this save remains, and what was there before still is).
        """
        faults = _faults(state) + _unfaithful(details)
        if faults:
            raise CheckpointError(f"{self.folder / _name(step)} is not written:\n" + _listed(faults))
        partial = self._hidden(step, "partial")
        try:
            with _explained(f"{partial}: the checkpoint of step {step} is not written, earlier ones are as they were"):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._sweep()
                partial.mkdir()
                groups = {name: dict(group) for name, group in state.items() if group}
                save_tensors(groups, storage_writer=_Writer(partial), no_dist=True)
                _write_manifest(partial, step, details)
                path = self._install(partial, step)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        with _explained(f"{path} is written, but older checkpoints cannot be removed"):
            self._prune(step)
        return path

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising; nothing is verified."""
        return sorted({step for step, _, ending in self._entries() if ending in ("", "replaced")})

    def newest(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest complete checkpoint, None where there is none. Each newer one that is broken, and each save that
        was cut short, is passed over, and `report` gets a line with its path and what is wrong.
        """
        complete = set(self.steps())
        unfinished = {step for step, _, ending in self._entries() if ending == "partial"} - complete
        for step in sorted(complete | unfinished, reverse=True):
            if step in unfinished:
                report(f"{self._hidden(step, 'partial')}: unfinished, its save was cut short (or still goes on); passed over")
                continue
            try:
                return self.at(step)
            except CheckpointError as fault:
                report(f"{fault}; passed over")
        return None

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of `step`. Raises CheckpointError that lists the steps there are, or says what is broken."""
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.folder}: no checkpoint of step {step}; there are: {there}")
        return Checkpoint(self._path(step), step)

    def rewind(self, step: int) -> list[int]:
        """Removes the checkpoints after `step` and returns their steps: once a run goes on from `step`, they belong to
        a past that did not happen, and must not be taken for its newest ones later.
        """
        gone = [later for later in self.steps() if later > step]
        with _explained(f"{self.folder}: checkpoints after step {step} cannot be removed"):
            for later in gone:
                self._remove(later)
        return gone

    def _entries(self) -> Iterator[tuple[int, Path, str]]:
        """(step, path, ending) of every folder with a name of ours; the ending is empty for a final name."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = re.fullmatch(r"step_(\d{6,})|\.step_(\d{6,})\.(partial|replaced|removed)", path.name)
            if match:
                yield int(match[1] or match[2]), path, match[3] or ""

    def _hidden(self, step: int, ending: str) -> Path:
        return self.folder / f".{_name(step)}.{ending}"

    def _path(self, step: int) -> Path:
        """Where the checkpoint of a step lies: set aside if a process was killed between the renames of `_install`."""
        path = self.folder / _name(step)
        return path if path.exists() else self._hidden(step, "replaced")

    def _install(self, partial: Path, step: int) -> Path:
        """Gives a complete folder its final name. The old one keeps a name under which it is found until then."""
        path, aside = self.folder / _name(step), self._hidden(step, "replaced")
        if path.exists():
            path.rename(aside)
        partial.rename(path)
        sync(self.folder)
        if aside.exists():
            shutil.rmtree(aside)
        return path

    def _remove(self, step: int) -> None:
        """Renamed first: a folder that is half deleted must not look like a damaged checkpoint."""
        hidden = self._hidden(step, "removed")
        if hidden.exists():
            shutil.rmtree(hidden)
        self._path(step).rename(hidden)
        shutil.rmtree(hidden)

    def _prune(self, written: int) -> None:
        steps = self.steps()
        kept = {written, *steps[-self.keep_last :], *(step for step in steps if self.keep_every and step % self.keep_every == 0)}
        for step in set(steps) - kept:
            self._remove(step)

    def _sweep(self) -> None:
        """Clears away what processes that were killed left behind, but not the only copy of a checkpoint."""
        for step, path, ending in list(self._entries()):
            if ending in ("partial", "removed") or (ending == "replaced" and self._path(step) != path):
                shutil.rmtree(path)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Without the path of the folder, which is renamed, and which a reader would have to unpickle."""
        return StorageMeta(save_id=self.save_id)


class _Reader(FileSystemReader):
    """DCP's reader without its one unsafe spot. Tensors are read by `torch.load(weights_only=True)` already, but
    `.metadata` is a pickle, and entries that are no tensors would be unpickled as they come.
    """

    def __init__(self, path: Path, files: frozenset[str]):
        super().__init__(path)
        self._files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises CheckpointError for whatever is not a description of tensors in files of the manifest."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            entries, storage = metadata.state_dict_metadata, metadata.storage_data
            foreign = [name for name, entry in entries.items() if type(entry) is not TensorStorageMetadata]
            elsewhere = {place.relative_path for place in storage.values()} - self._files
            transformed = [index.fqn for index, place in storage.items() if place.transform_descriptors]
        except CheckpointError as fault:
            raise CheckpointError(f"{path}: {fault}") from None
        except Exception as fault:  # bytes that are no pickle of ours can make `load` raise anything
            raise CheckpointError(f"{path}: not the description of a checkpoint: {fault!r}") from fault
        faults = [f"{name}: not a tensor" for name in foreign] + [f"{name}: compressed" for name in transformed]
        faults += [f"refers to {name}, which is not in {MANIFEST}" for name in sorted(elsewhere)]
        if faults:
            raise CheckpointError(f"{path} is refused:\n" + _listed(faults))
        return metadata


_METADATA_CLASSES = (
    *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata"),
    *("TensorStorageMetadata", "TensorProperties", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
_UNPICKLED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only what DCP's own description of tensors is made of: anything else could run code."""
        if (module, name) in _UNPICKLED:
            return super().find_class(module, name)
        raise CheckpointError(f"wants {module}.{name}, which has no place in a checkpoint; the file is not opened")


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Any failure inside becomes a CheckpointError that begins with `what`; an interrupt stays an interrupt.

    DCP wraps whatever happens, a keyboard interrupt too, into a BaseException of its own, and warns that there is no
    process group, which is what we ask for.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
        return
    except CheckpointError:
        raise
    except CheckpointException as wrapped:
        fault = next(iter(wrapped.failures.values()))[0]
    except Exception as plain:
        fault = plain
    if not isinstance(fault, Exception) or isinstance(fault, CheckpointError):
        raise fault
    # The serializer answers a full disk with an error about itself; what the system said is further up the chain.
    cause = next((error for error in _chain(fault) if isinstance(error, OSError)), fault)
    raise CheckpointError(f"{what}: {cause}") from fault


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _listed(faults: list[str]) -> str:
    return "\n".join(f"  - {fault}" for fault in faults)


def _faults(state: Mapping[str, Any]) -> list[str]:
    """What keeps a state from being saved or loaded into."""
    faults = []
    for name, group in state.items():
        if not isinstance(group, Mapping) or "." in name:
            faults.append(f"{name}: must be a dictionary of tensors, under a name without a dot")
            continue
        for key, value in group.items():
            if not isinstance(value, torch.Tensor):
                faults.append(f"{name}.{key}={value!r}: not a tensor; write torch.tensor({value!r})")
            elif value.is_meta:
                faults.append(f"{name}.{key}: on the meta device, without values")
    return faults


def _unfaithful(details: dict[str, Any]) -> list[str]:
    try:
        if json.loads(json.dumps(details, allow_nan=False)) == details:
            return []
        return [f"details={details!r}: JSON gives something else back; write lists, and texts as keys"]
    except (TypeError, ValueError) as fault:
        return [f"details={details!r}: cannot be written as JSON: {fault}"]


def _differences(state: State, metadata: Metadata) -> list[str]:
    """Every name, shape and dtype in which the wanted part of a checkpoint differs from `state`."""
    saved = metadata.state_dict_metadata
    wanted = {f"{name}.{key}": value for name, group in state.items() for key, value in group.items()}
    faults = [f"{key}: not in the checkpoint" for key in wanted if key not in saved]
    faults += [f"{key}: in the checkpoint, but not wanted" for key in saved if key not in wanted and key.split(".")[0] in state]
    for key in wanted.keys() & saved.keys():
        there, here = saved[key], wanted[key]
        assert isinstance(there, TensorStorageMetadata)  # the reader has refused all else
        if (there.size, there.properties.dtype) != (here.shape, here.dtype):
            faults.append(
                f"{key}: {there.properties.dtype} {tuple(there.size)} in the checkpoint, {here.dtype} {tuple(here.shape)} wanted"
            )
    return sorted(faults)


def _write_manifest(folder: Path, step: int, details: dict[str, Any]) -> None:
    """Written last; `sha256` is that of the manifest itself without this key, so that no flipped bit goes unseen."""
    files = {}
    for path in sorted(folder.iterdir()):
        sync(path)
        files[path.name] = {"size": path.stat().st_size, "sha256": _hash(path)}
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, "details": details, "files": files}
    manifest["sha256"] = _own_hash(manifest)
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _verified_manifest(folder: Path, step: int) -> dict[str, Any]:
    """The manifest of a folder. Raises CheckpointError at the first thing that is not as it says."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {manifest['format']}, this version reads {FORMAT}; use the one that wrote it")
        if manifest["sha256"] != _own_hash(manifest) or manifest["step"] != step:
            raise CheckpointError(f"{path}: damaged, or of another folder: it was not written like this for step {step}")
        for name, entry in manifest["files"].items():
            file = folder / name
            if file.parent != folder:
                raise CheckpointError(f"{path}: lists {name}, which lies elsewhere")
            if not file.is_file():
                raise CheckpointError(f"{file}: missing")
            if file.stat().st_size != entry["size"]:
                raise CheckpointError(f"{file}: {file.stat().st_size} bytes, but {MANIFEST} says {entry['size']}")
            if _hash(file) != entry["sha256"]:
                raise CheckpointError(f"{file}: damaged, its SHA-256 is not the one in {MANIFEST}")
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise CheckpointError(f"{path}: unreadable: {fault!r}") from fault
    return manifest


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_hash(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
