"""Tensors to files and back, by torch.distributed.checkpoint (DCP).

What is unsafe, silent or unclear in DCP is put right here.
"""

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

from lrattnres.distributed.ranks import RankError, Ranks, causes, network_failed
from lrattnres.runs.errors import CheckpointError, listed
from lrattnres.runs.manifest import MANIFEST

State = dict[str, dict[str, torch.Tensor]]


def write_tensors(path: Path, state: State, ranks: Ranks) -> None:
    """Writes every rank's part of a state into a folder that exists. Collective.

    A tensor that several ranks have whole, or of which they have the same shard, is written once.

    Args:
        path: The folder.
        state: Top-level name -> key -> tensor.
        ranks: The ranks that write.

    Raises:
        RankError: Such a tensor is not the same on all of them.
        CheckpointException: DCP failed on a rank.
    """
    groups = {name: dict(group) for name, group in state.items() if group}
    if ranks.world > 1:
        _check_equal(groups, ranks)
    save(
        groups,
        storage_writer=Writer(path, ranks),
        process_group=ranks.process_group,
        no_dist=ranks.world == 1,
    )


def read_tensors(reader: Reader, state: State) -> None:
    """Reads this rank's part of a checkpoint into tensors; each rank reads for itself.

    Args:
        reader: Of the checkpoint.
        state: Top-level name -> key -> tensor to copy into.
    """
    load(
        {name: dict(group) for name, group in state.items() if group},
        storage_reader=reader,
        no_dist=True,
    )


def snapshot(state: State) -> State:
    """A copy in host memory, which does not change while training continues."""
    return {
        name: {key: value.detach().to("cpu", copy=True) for key, value in group.items()}
        for name, group in state.items()
    }


def errors_in(state: Mapping[str, Any]) -> list[str]:
    """What keeps a state from being saved or loaded into, a sentence each."""
    errors = []
    for name, group in state.items():
        if not isinstance(group, Mapping) or "." in name:
            errors.append(f"{name}: must be a dictionary of tensors, under a name without a dot")
            continue
        for key, value in group.items():
            if not isinstance(value, torch.Tensor):
                errors.append(
                    f"{name}.{key}={value!r}: not a tensor; write torch.tensor({value!r})"
                )
            elif value.is_meta:
                errors.append(f"{name}.{key}: on the meta device, without values")
    return errors


@contextmanager
def explained(what: str, ranks: Ranks) -> Iterator[None]:
    """A context in which any exception becomes a CheckpointError; an interrupt stays an interrupt.

    DCP wraps everything, also a keyboard interrupt, into a BaseException of its own. It also warns
    that there is no process group, which is intended here.

    Args:
        what: Beginning of the message.
        ranks: The ranks that take part.

    Raises:
        CheckpointError: Something inside raised an exception.
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
        error: BaseException = next(iter(wrapped.failures.values()))[0]
    except Exception as plain:
        error = plain
    if not isinstance(error, Exception) or isinstance(error, CheckpointError):
        raise error
    gone = "another rank is gone, or did not answer in time: " if network_failed(error) else ""
    raise CheckpointError(f"{what}: {gone}{ranks.words(reason(error))}") from error


def reason(error: BaseException) -> BaseException:
    """The error of the operating system behind an error, if there is one.

    DCP answers a full disk with an error about itself.
    """
    if isinstance(error, RankError):
        return error
    return next((cause for cause in causes(error) if isinstance(cause, OSError)), error)


def differences(state: State, metadata: Metadata, names: set[str], groups: set[str]) -> list[str]:
    """Every name, shape and dtype in which `state` differs from a checkpoint, sorted.

    Args:
        state: What this rank wants.
        metadata: The description of the checkpoint.
        names: The tensors that all ranks together want.
        groups: The top-level names that all ranks together want.
    """
    saved = metadata.state_dict_metadata
    wanted = named_tensors(state)
    errors = [f"{key}: not in the checkpoint" for key in wanted if key not in saved]
    errors += [
        f"{key}: in the checkpoint, but not wanted"
        for key in saved.keys() - names
        if key.split(".")[0] in groups
    ]
    for key in wanted.keys() & saved.keys():
        there, here = saved[key], wanted[key]
        assert isinstance(there, TensorStorageMetadata)  # `Reader` refuses everything else
        if (there.size, there.properties.dtype) != (here.shape, here.dtype):
            errors.append(
                f"{key}: {there.properties.dtype} {tuple(there.size)} in the checkpoint, "
                f"{here.dtype} {tuple(here.shape)} wanted"
            )
    return sorted(errors)


def named_tensors(state: State) -> dict[str, torch.Tensor]:
    """ "GROUP.KEY" -> tensor, as DCP names them."""
    return {f"{name}.{key}": value for name, group in state.items() for key, value in group.items()}


def _check_equal(state: State, ranks: Ranks) -> None:
    """Checks tensors of which DCP would write only one rank's copy.

    Raises:
        RankError: Tensors of one name are not the same.
    """
    first_seen: dict[str, tuple[int, str]] = {}
    errors = []
    for rank, prints in enumerate(ranks.collect(lambda: _fingerprints(state))):
        for name, fingerprint in prints.items():
            before, known = first_seen.setdefault(name, (rank, fingerprint))
            if fingerprint != known:
                errors.append(
                    f"{name}: differs between rank {before} and rank {rank}; a value of one rank "
                    "needs a key of its own, with the rank in it"
                )
    if errors:
        raise RankError("not the same on all ranks:\n" + listed(sorted(errors)))


def _fingerprints(state: State) -> dict[str, str]:
    """Shape, dtype and CRC-32 of every tensor that other ranks may have too, by name."""
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
    """DCP's writer of files into a folder.

    Args:
        path: The folder.
        ranks: The ranks that write.
    """

    def __init__(self, path: Path, ranks: Ranks):
        super().__init__(path)
        self._ranks = ranks

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Puts the rank and the reason into an error: DCP does not tell the other ranks."""
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            raise RankError(self._ranks.words(reason(error))) from error

    def storage_meta(self) -> StorageMeta:
        """Leaves out the path of the folder, which is renamed, and which needs unpickling."""
        return StorageMeta(save_id=self.save_id)


class Reader(FileSystemReader):
    """DCP's reader without its one unsafe part.

    DCP reads tensors by `torch.load(weights_only=True)`. But it unpickles `.metadata`, and entries
    that are no tensors, without restrictions.

    Args:
        path: The folder.
        files: Names of the files in the manifest; no other is read.
    """

    def __init__(self, path: Path, files: frozenset[str]):
        super().__init__(path)
        self._files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description of the tensors.

        Raises:
            CheckpointError: It is not valid, or describes something else than tensors in files of
                the manifest.
        """
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
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except Exception as error:  # arbitrary bytes can make the unpickler raise anything
            raise CheckpointError(
                f"{path}: not the description of a checkpoint: {error!r}"
            ) from error
        errors = [f"{name}: not a tensor" for name in foreign] + [
            f"{name}: compressed" for name in transformed
        ]
        errors += [f"refers to {name}, which is not in {MANIFEST}" for name in sorted(elsewhere)]
        if errors:
            raise CheckpointError(f"{path} is refused:\n" + listed(errors))
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
        """Allows only the classes of DCP's description of tensors: others could run code."""
        if (module, name) in _UNPICKLED:
            return super().find_class(module, name)
        raise CheckpointError(
            f"wants {module}.{name}, which has no place in a checkpoint; the file is not opened"
        )
