"""Tensors to files and back by torch.distributed.checkpoint (DCP), without what in it is unsafe, silent or unclear."""

from __future__ import annotations

import pickle
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from lrattnres.distributed.crew import CheckpointError, Crew, RankError, reason
from lrattnres.distributed.ranks import network_failed
from lrattnres.runs.manifest import MANIFEST

State = dict[str, dict[str, torch.Tensor]]


def write_tensors(path: Path, state: State, crew: Crew) -> None:
    """Every rank's part of a state into the folder, which is there. Collective.

    A tensor that several ranks have whole, or the same shard of, is written once. Raises RankError if it is not the
    same everywhere, CheckpointException for what DCP met on any rank.
    """
    groups = {name: dict(group) for name, group in state.items() if group}
    if crew.world > 1:
        _check_equal(groups, crew)
    save(
        groups, storage_writer=Writer(path, crew), process_group=crew.group, no_dist=crew.world == 1
    )


def read_tensors(reader: Reader, state: State) -> None:
    """This rank's part of a checkpoint into the given tensors; each rank reads for itself."""
    load(
        {name: dict(group) for name, group in state.items() if group},
        storage_reader=reader,
        no_dist=True,
    )


def snapshot(state: State) -> State:
    """A copy on the host, which does not change when training goes on."""
    return {
        name: {key: value.detach().to("cpu", copy=True) for key, value in group.items()}
        for name, group in state.items()
    }


def faults_of(state: Mapping[str, Any]) -> list[str]:
    """What keeps a state from being saved or loaded into."""
    faults = []
    for name, group in state.items():
        if not isinstance(group, Mapping) or "." in name:
            faults.append(f"{name}: must be a dictionary of tensors, under a name without a dot")
            continue
        for key, value in group.items():
            if not isinstance(value, torch.Tensor):
                faults.append(
                    f"{name}.{key}={value!r}: not a tensor; write torch.tensor({value!r})"
                )
            elif value.is_meta:
                faults.append(f"{name}.{key}: on the meta device, without values")
    return faults


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Any failure inside becomes a CheckpointError that begins with `what`; an interrupt stays an interrupt.

    DCP wraps whatever happens, a keyboard interrupt too, into a BaseException of its own, and warns that there is no
    process group, which is what we ask for.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled", category=UserWarning
            )
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
    said = fault if isinstance(fault, RankError) else reason(fault)
    gone = "another rank is gone, or did not answer in time: " if network_failed(fault) else ""
    raise CheckpointError(f"{what}: {gone}{said}") from fault


def listed(faults: list[str]) -> str:
    """One fault a line."""
    return "\n".join(f"  - {fault}" for fault in faults)


def differences(state: State, metadata: Metadata, names: set[str], groups: set[str]) -> list[str]:
    """Every name, shape and dtype in which the wanted part of a checkpoint differs from `state`.

    `names` and `groups` are what all ranks want: a key that belongs to one rank is unwanted by the others.
    """
    saved = metadata.state_dict_metadata
    wanted = named_tensors(state)
    faults = [f"{key}: not in the checkpoint" for key in wanted if key not in saved]
    faults += [
        f"{key}: in the checkpoint, but not wanted"
        for key in saved.keys() - names
        if key.split(".")[0] in groups
    ]
    for key in wanted.keys() & saved.keys():
        there, here = saved[key], wanted[key]
        assert isinstance(there, TensorStorageMetadata)  # the reader has refused all else
        if (there.size, there.properties.dtype) != (here.shape, here.dtype):
            faults.append(
                f"{key}: {there.properties.dtype} {tuple(there.size)} in the checkpoint, {here.dtype} {tuple(here.shape)} wanted"
            )
    return sorted(faults)


def named_tensors(state: State) -> dict[str, torch.Tensor]:
    """ "GROUP.KEY" -> tensor, as DCP names them."""
    return {f"{name}.{key}": value for name, group in state.items() for key, value in group.items()}


def _check_equal(state: State, crew: Crew) -> None:
    """Raises RankError for tensors of one name that are not the same where DCP would write only one of them."""
    first_seen: dict[str, tuple[int, str]] = {}
    faults = []
    for rank, prints in enumerate(crew.share(lambda: _fingerprints(state))):
        for name, fingerprint in prints.items():
            before, known = first_seen.setdefault(name, (rank, fingerprint))
            if fingerprint != known:
                faults.append(
                    f"{name}: differs between rank {before} and rank {rank}; a value of one rank needs a key of its own, "
                    "with the rank in it"
                )
    if faults:
        raise RankError("not the same on all ranks:\n" + listed(sorted(faults)))


def _fingerprints(state: State) -> dict[str, str]:
    """Shape, dtype and CRC-32 of what this rank holds of every tensor that is, or may be, elsewhere too."""
    prints = {}
    for name, tensor in named_tensors(state).items():
        if isinstance(tensor, DTensor):
            if not any(placement.is_replicate() for placement in tensor.placements):
                continue
            place = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
            name += (
                f" (shard {[index for placement, index in place if not placement.is_replicate()]})"
            )
            tensor = tensor.to_local()
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        prints[name] = f"{tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(content):08x}"
    return prints


class Writer(FileSystemWriter):
    def __init__(self, path: Path, crew: Crew):
        super().__init__(path)
        self._crew = crew

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Names the rank and the reason while they are known: on the way to the others an exception loses its causes."""
        try:
            return super().write_data(*args, **kwargs)
        except Exception as fault:
            raise self._crew.named(fault) from fault

    def storage_meta(self) -> StorageMeta:
        """Without the path of the folder, which is renamed, and which a reader would have to unpickle."""
        return StorageMeta(save_id=self.save_id)


class Reader(FileSystemReader):
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
            foreign = [
                name for name, entry in entries.items() if type(entry) is not TensorStorageMetadata
            ]
            elsewhere = {place.relative_path for place in storage.values()} - self._files
            transformed = [
                index.fqn for index, place in storage.items() if place.transform_descriptors
            ]
        except CheckpointError as fault:
            raise CheckpointError(f"{path}: {fault}") from None
        except (
            Exception
        ) as fault:  # bytes that are no pickle of ours can make `load` raise anything
            raise CheckpointError(
                f"{path}: not the description of a checkpoint: {fault!r}"
            ) from fault
        faults = [f"{name}: not a tensor" for name in foreign] + [
            f"{name}: compressed" for name in transformed
        ]
        faults += [f"refers to {name}, which is not in {MANIFEST}" for name in sorted(elsewhere)]
        if faults:
            raise CheckpointError(f"{path} is refused:\n" + listed(faults))
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
        raise CheckpointError(
            f"wants {module}.{name}, which has no place in a checkpoint; the file is not opened"
        )
