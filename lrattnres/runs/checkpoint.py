"""Checkpoints: complete or absent, verified before they are used, and safe to open whoever wrote them.

    checkpoints/step_000040/
        manifest.json                 format, step, details, and size and SHA-256 of every other file
        .metadata                     torch.distributed.checkpoint (DCP): one entry "model.NAME" for each tensor
        __0_0.distcp  __1_0.distcp    what each rank wrote

A save goes to the hidden sibling `.step_000040.partial`, is brought to the disk, and only then gets its name. What is
found under a final name was therefore complete once; the manifest tells whether it still is.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from lrattnres.distributed.crew import CheckpointError, Crew
from lrattnres.runs.files import sync
from lrattnres.runs.manifest import verified_manifest, write_manifest
from lrattnres.runs.tensors import (
    Reader,
    State,
    differences,
    explained,
    faults_of,
    listed,
    named_tensors,
    read_tensors,
    snapshot,
    write_tensors,
)

__all__ = ["Checkpoint", "CheckpointError", "Checkpoints", "State"]


class Checkpoint:
    """One complete checkpoint whose files have just been compared with its manifest, by all ranks of `crew` together.

    Raises CheckpointError that names the folder and the first thing that is wrong with it.
    """

    step: int
    path: Path
    details: dict[str, Any]

    def __init__(self, path: Path, step: int, crew: Crew):
        manifest = verified_manifest(path, step, crew)
        self.path, self.step, self.details = path, step, manifest["details"]
        self._files, self._crew = frozenset(manifest["files"]), crew

    def keys(self, group: str) -> list[str]:
        """The keys under a top-level name, sorted; none where there is no such name.

        Not collective. It is the caller who decides about the values of ranks that were there and are no more.
        """
        with explained(f"{self.path}: cannot be read"):
            saved = [
                name.partition(".") for name in self._reader().read_metadata().state_dict_metadata
            ]
            return sorted(key for name, _, key in saved if name == group)

    def load(self, state: State) -> None:
        """Copies the saved values into the given tensors, bit by bit; each may lie on any device, whole or sharded,
        however it was when it was saved. Collective.

        Top-level names of the checkpoint that no rank's `state` has are not read. Inside a given one, names, shapes and
        dtypes must be the saved ones, but for keys that only another rank gives: CheckpointError lists every difference,
        and no tensor is touched.
        """
        reader, crew = self._reader(), self._crew

        def check() -> tuple[set[str], set[str]]:
            self._refuse(faults_of(state))
            return set(named_tensors(state)), set(state)

        with explained(f"{self.path}: cannot be read"):
            wanted = crew.share(check)
            names, groups = (set().union(*parts) for parts in zip(*wanted, strict=True))
            crew.share(
                lambda: self._refuse(differences(state, reader.read_metadata(), names, groups))
            )
            crew.share(lambda: read_tensors(reader, state))

    def _refuse(self, faults: list[str]) -> None:
        if faults:
            raise CheckpointError(f"{self.path} does not fit:\n" + listed(faults))

    def _reader(self) -> Reader:
        return Reader(self.path, self._files)


class Checkpoints:
    """The checkpoints of one run, written by one process at a time, or by the ranks of a job together.

    With a `group`, which must be the whole job, every rank makes one of these, and all call `save`, `wait`, `newest`,
    `at` and `load` at the same point; what fails on one fails on all. Without it a process is alone, be there a group or
    not, and can read what any number of ranks wrote.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        group: ProcessGroup | None = None,
        asynchronous: bool = False,
        timeout: float = 1800.0,
    ):
        """Keeps the newest `keep_last` checkpoints, and those at multiples of `keep_every`. Touches no file.

        `asynchronous`: `save` returns when it has a copy in host memory. Ranks that are further apart than `timeout`
        seconds give up.
        """
        for name, value in {"keep_last": keep_last, "keep_every": keep_every}.items():
            if value is not None and value < 1:
                raise CheckpointError(f"checkpoint.{name}={value}: must be at least 1")
        self.folder, self.keep_last, self.keep_every = Path(folder), keep_last, keep_every
        self._crew = Crew(group, timeout)
        self._background = (
            ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        )
        self._pending: Future[Path] | None = None
        self._passed_over: set[int] = set()

    def save(self, step: int, state: State, details: dict[str, Any]) -> Path:
        """Writes the checkpoint of `step` and returns its folder; one that was there before is replaced. Collective.

        DTensors are saved as what they are shards of. A plain tensor is saved once, and must be the same on every rank
        that has its key; give a value of one rank a key with the rank in it, like "cpu.rank3". `details` (those of rank
        0) are kept in the manifest and must survive JSON unchanged. Afterwards older checkpoints are removed, as the
        constructor says, but never the one just written.

        Raises CheckpointError when a value is no tensor, or not the same everywhere, or the disk refuses on any rank:
        then nothing of this save remains, and what was there before still is. An asynchronous one raises it at the next
        `save` or `wait`, after which it is forgotten.
        """
        self.wait()
        self._crew.share(lambda: self._check(step, state, details))
        if self._background is None:
            return self._write(step, state, details)
        with explained(f"{self.folder / _name(step)} is not written: its copy in host memory"):
            copy: State = {}
            self._crew.share(lambda: copy.update(snapshot(state)))
        self._pending = self._background.submit(
            self._write, step, copy, json.loads(json.dumps(details))
        )
        return self.folder / _name(step)

    def wait(self) -> None:
        """Returns when no save goes on any more. Raises CheckpointError if the last one failed, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising; nothing is verified."""
        return sorted({step for step, _, ending in self._entries() if ending in ("", "replaced")})

    def newest(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest complete checkpoint, None where there is none. Each newer one that is broken, and each save that
        was cut short, is passed over, and `report` gets a line with its path and what is wrong. Collective.
        """
        self.wait()
        complete, unfinished = self._crew.first(self._found)
        for step in sorted(complete | unfinished, reverse=True):
            if step in unfinished:
                report(
                    f"{self._hidden(step, 'partial')}: unfinished, its save was cut short (or still goes on); passed over"
                )
                continue
            try:
                return self.at(step)
            except CheckpointError as fault:
                self._passed_over.add(step)
                report(
                    f"{fault}; passed over (and renamed to {self._hidden(step, 'damaged').name} if training goes on)"
                )
        return None

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of `step`. Collective. Raises CheckpointError that lists the steps there are, or says what is
        broken.
        """
        self.wait()

        def find() -> Path:
            if step not in self.steps():
                there = ", ".join(map(str, self.steps())) or "none"
                raise CheckpointError(
                    f"{self.folder}: no checkpoint of step {step}; there are: {there}"
                )
            return self._path(step)

        return Checkpoint(self._crew.first(find), step, self._crew)

    def rewind(self, step: int) -> list[int]:
        """Removes the checkpoints after `step` and returns their steps: once a run goes on from `step`, they belong to
        a past that did not happen, and must not be taken for its newest ones later. One that `newest` passed over is only
        renamed, to `.step_NNNNNN.damaged`: what cannot be read from here may be whole. Not collective: one process does it.
        """
        self.wait()
        gone = [later for later in self.steps() if later > step]
        with explained(f"{self.folder}: checkpoints after step {step} cannot be removed"):
            for later in gone:
                if later in self._passed_over:
                    aside = self._hidden(later, "damaged")
                    shutil.rmtree(aside, ignore_errors=True)
                    self._path(later).rename(aside)
                else:
                    self._remove(later)
        return gone

    def _check(self, step: int, state: State, details: dict[str, Any]) -> None:
        faults = faults_of(state) + _unfaithful(details)
        if faults:
            raise CheckpointError(f"{self.folder / _name(step)} is not written:\n" + listed(faults))

    def _write(self, step: int, state: State, details: dict[str, Any]) -> Path:
        """All of a save, in the background or not. Every line is for all ranks, and fails on all or on none."""
        partial, crew = self._hidden(step, "partial"), self._crew
        try:
            with explained(
                f"{partial}: the checkpoint of step {step} is not written, earlier ones are as they were"
            ):
                crew.first(lambda: self._begin(partial))
                write_tensors(partial, state, crew)
                write_manifest(partial, step, details, crew)
                crew.first(lambda: self._install(partial, step))
        finally:
            if crew.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
        path = self.folder / _name(step)
        with explained(f"{path} is written, but older checkpoints cannot be removed"):
            crew.first(lambda: self._prune(step))
        return path

    def _begin(self, partial: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        partial.mkdir()

    def _found(self) -> tuple[set[int], set[int]]:
        """Steps that have a checkpoint, and those that have no more than the beginning of one."""
        complete = set(self.steps())
        return complete, {
            step for step, _, ending in self._entries() if ending == "partial"
        } - complete

    def _entries(self) -> Iterator[tuple[int, Path, str]]:
        """(step, path, ending) of every folder with a name of ours; the ending is empty for a final name."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = re.fullmatch(
                r"step_(\d{6,})|\.step_(\d{6,})\.(partial|replaced|removed)", path.name
            )
            if match:
                yield int(match[1] or match[2]), path, match[3] or ""

    def _hidden(self, step: int, ending: str) -> Path:
        return self.folder / f".{_name(step)}.{ending}"

    def _path(self, step: int) -> Path:
        """Where the checkpoint of a step lies: set aside if a process was killed between the renames of `_install`."""
        path = self.folder / _name(step)
        return path if path.exists() else self._hidden(step, "replaced")

    def _install(self, partial: Path, step: int) -> None:
        """Gives a complete folder its final name. The old one keeps a name under which it is found until then."""
        path, aside = self.folder / _name(step), self._hidden(step, "replaced")
        if path.exists():
            path.rename(aside)
        partial.rename(path)
        sync(self.folder)
        if aside.exists():
            shutil.rmtree(aside)

    def _remove(self, step: int) -> None:
        """Renamed first: a folder that is half deleted must not look like a damaged checkpoint."""
        hidden = self._hidden(step, "removed")
        if hidden.exists():
            shutil.rmtree(hidden)
        self._path(step).rename(hidden)
        shutil.rmtree(hidden)

    def _prune(self, written: int) -> None:
        steps = self.steps()
        kept = {
            written,
            *steps[-self.keep_last :],
            *(step for step in steps if self.keep_every and step % self.keep_every == 0),
        }
        for step in set(steps) - kept:
            self._remove(step)

    def _sweep(self) -> None:
        """Clears away what processes that were killed left behind, but not the only copy of a checkpoint."""
        for step, path, ending in list(self._entries()):
            if ending in ("partial", "removed") or (
                ending == "replaced" and self._path(step) != path
            ):
                shutil.rmtree(path)


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _unfaithful(details: dict[str, Any]) -> list[str]:
    try:
        if json.loads(json.dumps(details, allow_nan=False)) == details:
            return []
        return [
            f"details={details!r}: JSON gives something else back; write lists, and texts as keys"
        ]
    except (TypeError, ValueError) as fault:
        return [f"details={details!r}: cannot be written as JSON: {fault}"]
