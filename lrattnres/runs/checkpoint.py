"""Checkpoints: complete or absent, verified before use, and safe to open from any source.

    checkpoints/step_000040/
        manifest.json                 format, step, details; size and SHA-256 of every other file
        .metadata                     of torch.distributed.checkpoint (DCP): an entry "model.NAME"
                                      for each tensor
        __0_0.distcp  __1_0.distcp    what each rank wrote

A save writes the hidden folder `.step_000040.partial`, waits until it is on the disk, and renames
it last. So what has a final name was complete once; the manifest tells whether it still is. Other
hidden folders:

    .step_000040.replaced       the old one, while a new one gets its name
    .step_000040.superseded     later than the step from which the run was told to continue; it
                                stays until the next save is complete
    .step_000040.damaged        it could not be read; it is never removed
    .step_000040.removed        about to be deleted
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from lrattnres.distributed.ranks import Ranks
from lrattnres.runs.errors import CheckpointError, listed
from lrattnres.runs.files import sync
from lrattnres.runs.manifest import verified_manifest, write_manifest
from lrattnres.runs.tensors import (
    Reader,
    State,
    differences,
    errors_in,
    explained,
    named_tensors,
    read_tensors,
    snapshot,
    write_tensors,
)

__all__ = ["Checkpoint", "CheckpointError", "Checkpoints", "State"]


class Checkpoint:
    """One complete checkpoint, whose files have just been compared with its manifest.

    Made by all ranks together.

    Attributes:
        path: Its folder.
        step: The number of steps done.
        details: What `save` was given, from the manifest.
    """

    step: int
    path: Path
    details: dict[str, Any]

    def __init__(self, path: Path, step: int, ranks: Ranks):
        """Verifies the checkpoint. Collective.

        Args:
            path: Its folder.
            step: Of which it must be.
            ranks: The ranks that read it.

        Raises:
            CheckpointError: Names the folder and the first error in it.
        """
        manifest = verified_manifest(path, step, ranks)
        self.path, self.step, self.details = path, step, manifest["details"]
        self._files, self._ranks = frozenset(manifest["files"]), ranks

    def keys(self, group: str) -> list[str]:
        """The keys under a top-level name, sorted; none if there is no such name. Not collective.

        The caller decides what to do with the values of ranks that do not exist any more.

        Raises:
            CheckpointError: The description of the tensors cannot be read.
        """
        with explained(f"{self.path}: cannot be read", self._ranks):
            saved = [
                name.partition(".") for name in self._reader().read_metadata().state_dict_metadata
            ]
            return sorted(key for name, _, key in saved if name == group)

    def load(self, state: State) -> None:
        """Copies the saved values into tensors, bit by bit. Collective.

        Top-level names of the checkpoint that no rank's `state` has are not read.

        Args:
            state: Top-level name -> key -> tensor. A tensor may be on any device, and whole or
                sharded, however it was saved. Keys, shapes and dtypes inside a top-level name must
                be the saved ones. Keys that another rank gives may be left out.

        Raises:
            CheckpointError: Lists every difference; then no tensor was changed.
        """
        reader, ranks = self._reader(), self._ranks

        def check() -> tuple[set[str], set[str]]:
            self._refuse(errors_in(state))
            return set(named_tensors(state)), set(state)

        try:
            with explained(f"{self.path}: cannot be read", ranks):
                wanted = ranks.collect(check)
                names, groups = (set().union(*parts) for parts in zip(*wanted, strict=True))
                ranks.all_succeed(
                    lambda: self._refuse(differences(state, reader.read_metadata(), names, groups))
                )
                ranks.all_succeed(lambda: read_tensors(reader, state))
        except CheckpointError as error:
            if self.path.exists():
                raise
            raise CheckpointError(
                f"{self.path}: removed while it was read, by a training that still runs; the same "
                "command finds a newer one"
            ) from error

    def _refuse(self, errors: list[str]) -> None:
        if errors:
            raise CheckpointError(f"{self.path} does not fit:\n" + listed(errors))

    def _reader(self) -> Reader:
        return Reader(self.path, self._files)


class Checkpoints:
    """The checkpoints of one run.

    One process writes them at a time, or all ranks of a job together. Methods that are collective
    must be called by all ranks at the same point; what fails on one rank fails on all. A single
    process can read what any number of ranks wrote.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        ranks: Ranks | None = None,
        asynchronous: bool = False,
    ):
        """Notes the settings; no file is touched yet.

        Args:
            folder: `checkpoints` of the run folder.
            keep_last: How many of the newest are kept, at least 1.
            keep_every: Those at multiples of this step are kept too; None: no others.
            ranks: The ranks of the job, with a process group of their own (`Ranks.apart`); None: a
                single process.
            asynchronous: Whether `save` returns as soon as it has a copy in host memory.

        Raises:
            CheckpointError: A number is below 1.
        """
        for name, value in {"keep_last": keep_last, "keep_every": keep_every}.items():
            if value is not None and value < 1:
                raise CheckpointError(f"checkpoint.{name}={value}: must be at least 1")
        self.folder, self.keep_last, self.keep_every = Path(folder), keep_last, keep_every
        self._ranks = ranks or Ranks()
        self._background = (
            ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        )
        self._pending: Future[Path] | None = None
        self._passed_over: set[int] = set()

    def save(self, step: int, state: State, details: dict[str, Any]) -> Path:
        """Writes the checkpoint of a step; an older one of this step is replaced. Collective.

        Afterwards it removes superseded checkpoints, and older ones that the settings do not keep.
        The one just written always stays.

        Args:
            step: At least 0.
            state: Top-level name -> key -> tensor. DTensors are saved as the tensors whose shards
                they are. A plain tensor is saved once, and must be the same on every rank that has
                its key. A value of one rank needs a key with the rank in it, like "cpu.rank3".
            details: Kept in the manifest (those of rank 0); JSON must give them back unchanged.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: A value is no tensor or differs between ranks, or a rank cannot write.
                Then nothing of this save remains, and earlier checkpoints are unchanged. A save in
                the background raises it once, at the next `save` or `wait`.
        """
        self.wait()
        self._ranks.all_succeed(lambda: self._check(step, state, details))
        if self._background is None:
            return self._write(step, state, details)
        what = f"{self.folder / _name(step)} is not written: its copy in host memory"
        with explained(what, self._ranks):
            copy = self._ranks.all_succeed(lambda: snapshot(state))
        self._pending = self._background.submit(
            self._write, step, copy, json.loads(json.dumps(details))
        )
        return self.folder / _name(step)

    def wait(self) -> None:
        """Waits for the save in the background, if there is one.

        Raises:
            CheckpointError: It failed. The error is raised once.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising; nothing is verified.

        Raises:
            CheckpointError: The folder is a file, or a link to nothing.
        """
        return sorted({step for step, _, ending in self._entries() if ending in ("", "replaced")})

    def superseded(self) -> list[int]:
        """Steps whose checkpoints are set aside until the next save is complete, rising."""
        return sorted({step for step, _, ending in self._entries() if ending == "superseded"})

    def newest(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest complete checkpoint; None if there is none. Collective.

        Args:
            report: Gets a sentence for each newer one that is broken, and for each unfinished save.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        self.wait()
        with explained(f"{self.folder}: cannot be read", self._ranks):
            complete, unfinished = self._ranks.of_first(self._found)
        for step in sorted(complete | unfinished, reverse=True):
            if step in unfinished:
                report(
                    f"{self._hidden(step, 'partial')}: unfinished, its save was cut short (or "
                    "still goes on); passed over"
                )
                continue
            try:
                return self.at(step)
            except CheckpointError as error:
                if not self._ranks.of_first(partial(os.path.lexists, self._path(step))):
                    return self.newest(report)  # the training that still runs removed it
                self._passed_over.add(step)
                report(
                    f"{error}; passed over (and renamed to {self._hidden(step, 'damaged').name} if "
                    "training goes on)"
                )
        return None

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of a step, also a superseded one. Collective.

        Raises:
            CheckpointError: There is none (the message lists the steps there are), or it is broken.
        """
        self.wait()

        def find() -> Path:
            there = sorted({*self.steps(), *self.superseded()})
            if step not in there:
                raise CheckpointError(
                    f"{self.folder}: no checkpoint of step {step}; there are: "
                    + (", ".join(map(str, there)) or "none")
                )
            return self._path(step)

        return Checkpoint(self._ranks.of_first(find), step, self._ranks)

    def rewind(self, step: int) -> list[int]:
        """Sets aside the checkpoints after a step. Not collective: one process calls it.

        A run that continues from `step` writes these steps anew, so the old ones must not be taken
        for the newest later. They are removed when the next save is complete; until then `at` finds
        them. One that `newest` could not read becomes `.step_NNNNNN.damaged` and stays: another
        machine may read it.

        Returns:
            The steps that are set aside until the next save, rising.

        Raises:
            CheckpointError: A folder cannot be renamed.
        """
        self.wait()
        later = [other for other in self.steps() if other > step]
        what = f"{self.folder}: checkpoints after step {step} cannot be set aside"
        with explained(what, self._ranks):
            for other in later:
                ending = "damaged" if other in self._passed_over else "superseded"
                aside = self._hidden(other, ending)
                _delete(aside)
                self._path(other).rename(aside)
            if step in self.superseded() and step not in self.steps():
                self._path(step).rename(self.folder / _name(step))
        return [other for other in later if other not in self._passed_over]

    def _check(self, step: int, state: State, details: dict[str, Any]) -> None:
        errors = errors_in(state) + _unfaithful(details)
        if errors:
            raise CheckpointError(f"{self.folder / _name(step)} is not written:\n" + listed(errors))

    def _write(self, step: int, state: State, details: dict[str, Any]) -> Path:
        """Writes a checkpoint, in the background or not.

        Every line is for all ranks, and fails on all or on none.
        """
        unfinished, ranks = self._hidden(step, "partial"), self._ranks
        what = f"{unfinished}: the checkpoint of step {step} is not written"
        what += ", earlier ones are as they were"
        try:
            with explained(what, ranks):
                ranks.of_first(lambda: self._begin(unfinished))
                write_tensors(unfinished, state, ranks)
                write_manifest(unfinished, step, details, ranks)
                ranks.of_first(lambda: self._install(unfinished, step))
        finally:
            if ranks.first:
                shutil.rmtree(unfinished, ignore_errors=True)
        path = self.folder / _name(step)
        with explained(f"{path} is written, but older checkpoints cannot be removed", ranks):
            ranks.of_first(lambda: self._prune(step))
        return path

    def _begin(self, unfinished: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        unfinished.mkdir()

    def _found(self) -> tuple[set[int], set[int]]:
        """Steps that have a checkpoint, and steps that have only an unfinished one."""
        complete = set(self.steps())
        return complete, {
            step for step, _, ending in self._entries() if ending == "partial"
        } - complete

    def _entries(self) -> Iterator[tuple[int, Path, str]]:
        """(step, path, ending) of every folder with a name as above; "" for a final name."""
        if not self.folder.is_dir():
            if os.path.lexists(self.folder):
                raise CheckpointError(
                    f"{self.folder}: not a folder, or a link to one that is not there; restore it, "
                    "or remove it to start from the beginning"
                )
            return
        for path in self.folder.iterdir():
            match = re.fullmatch(
                r"step_(\d{6,})|\.step_(\d{6,})\.(partial|replaced|superseded|removed)", path.name
            )
            if match:
                yield int(match[1] or match[2]), path, match[3] or ""

    def _hidden(self, step: int, ending: str) -> Path:
        return self.folder / f".{_name(step)}.{ending}"

    def _path(self, step: int) -> Path:
        """Where the checkpoint of a step is.

        It may be set aside, by `rewind` or by a process that was killed in `_install`.
        """
        places = [self.folder / _name(step)]
        places += [self._hidden(step, ending) for ending in ("replaced", "superseded")]
        return next((path for path in places if os.path.lexists(path)), places[0])

    def _install(self, unfinished: Path, step: int) -> None:
        """Gives a complete folder its final name.

        Until then the old one has a name under which it is found.
        """
        path, aside = self.folder / _name(step), self._hidden(step, "replaced")
        if os.path.lexists(path):
            path.rename(aside)
        unfinished.rename(path)
        sync(self.folder)
        _delete(aside)

    def _remove(self, path: Path, step: int) -> None:
        """Renames before it deletes: a folder that is half deleted must not look damaged."""
        hidden = self._hidden(step, "removed")
        _delete(hidden)
        path.rename(hidden)
        _delete(hidden)

    def _prune(self, written: int) -> None:
        """Removes superseded checkpoints, and old ones that the settings do not keep."""
        for step in self.superseded():
            self._remove(self._hidden(step, "superseded"), step)
        steps = self.steps()
        kept = {
            written,
            *steps[-self.keep_last :],
            *(step for step in steps if self.keep_every and step % self.keep_every == 0),
        }
        for step in set(steps) - kept:
            self._remove(self._path(step), step)

    def _sweep(self) -> None:
        """Deletes what killed processes left behind, but never the only copy of a checkpoint."""
        for step, path, ending in list(self._entries()):
            if ending in ("partial", "removed") or (
                ending == "replaced" and self._path(step) != path
            ):
                _delete(path)


def _delete(path: Path) -> None:
    """Deletes a file, folder or link, if it is there; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _unfaithful(details: dict[str, Any]) -> list[str]:
    """What keeps details from being stored as JSON, a sentence each."""
    try:
        if json.loads(json.dumps(details, allow_nan=False)) == details:
            return []
        return [
            f"details={details!r}: JSON gives something else back; write lists, and texts as keys"
        ]
    except (TypeError, ValueError) as error:
        return [f"details={details!r}: cannot be written as JSON: {error}"]
