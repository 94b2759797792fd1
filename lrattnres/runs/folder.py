"""The folder of one run: its files, who may write to it, and what it was started with.

    runs/NAME/
        config.yaml        every setting, ending with YAML's own end mark `...`
        paths.json         absolute paths of the settings that name files
        identity.json      fingerprints of what the settings only name: corpus, tokenizer
        corpus.json        the files of a streamed corpus: revision, names, sizes, row groups
        environment.json   "starts": versions, revision and command line of every start
        metrics.jsonl      one JSON object a line (see lrattnres/runs/metrics.py)
        evaluation/        what eval.py measured, and step_STEP.diagnostics.json: where each site
                           reads, of training too
        checkpoints/       plots/       summary.json (once the run is finished)

metrics.jsonl grows by whole lines. Every other file is replaced as a whole.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from lrattnres.config import ConfigError, TrainConfig, fields_of, parse, plain, values_of
from lrattnres.data.listing import differences
from lrattnres.runs.environment import describe_environment
from lrattnres.runs.errors import listed
from lrattnres.runs.files import from_json, to_json, write_atomic

LONGEST_NAME = 200  # bytes; file systems take 255, and files are named after the run
END = "...\n"
PATHS = ("data.root", "data.cache", "tokenizer.path", "initial")  # settings that name files


class RunError(Exception):
    """A run folder cannot be used as asked; `str` names it and what to do instead."""


class RunFolder:
    """Paths of a run. The constructor touches nothing; `open` is for the process that trains.

    Attributes:
        path: The folder.
        config_path, paths_path, identity_path, corpus_path, environment_path, metrics_path,
            checkpoints_path, plots_path, summary_path: Files and folders in it.
        notes: What `open` has to tell the user, a sentence each.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.paths_path = self.path / "paths.json"
        self.identity_path = self.path / "identity.json"
        self.corpus_path = self.path / "corpus.json"
        self.environment_path = self.path / "environment.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints_path = self.path / "checkpoints"
        self.plots_path = self.path / "plots"
        self.summary_path = self.path / "summary.json"
        self.notes: list[str] = []
        self._lock: IO[str] | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> RunFolder:
        """The folder `config.runs`/`config.name`, untouched.

        Raises:
            RunError: The name cannot be the name of a folder.
        """
        return cls(Path(config.runs) / _checked_name(config.name))

    @classmethod
    def open(
        cls,
        config: TrainConfig,
        *,
        extra_identity: Mapping[str, str] | None = None,
        listing: Mapping[str, Any] | None = None,
    ) -> RunFolder:
        """Makes or continues the folder `config.runs`/`config.name`, and locks it.

        It is locked until `close`, or until the object or the process ends. A folder that exists
        must be of the same run: every setting that results depend on, and every entry of
        `extra_identity`, must be as it was. Its name may differ, if the folder was renamed, and a
        path may be written in another way. Settings that may change are written to config.yaml.

        Args:
            config: What is to be run.
            extra_identity: Fingerprints of what the settings only name.
            listing: The files of a streamed corpus. It tells what differs if the fingerprint
                differs.

        Raises:
            RunError: The name cannot be the name of a folder; the folder is in use, of another run,
                damaged, or cannot be written; or it has a run, and the settings say `resume=none`.
        """
        run = cls.of(config)
        with run.usable():
            if config.resume.isdigit() and not run.config_path.exists():
                raise RunError(
                    f"resume={config.resume}: there is no run in {run.path}; write resume=auto to "
                    "start one"
                )
            run.path.mkdir(parents=True, exist_ok=True)
            run._lock = _locked(run.path)
            try:
                run._claim(config, dict(extra_identity or {}), listing)
            except BaseException:
                run.close()
                raise
        return run

    @contextmanager
    def usable(self) -> Iterator[None]:
        """A context in which an OSError becomes a RunError.

        Raises:
            RunError: Something inside raised OSError.
        """
        try:
            yield
        except OSError as error:
            raise RunError(f"{self.path}: cannot be used as a run folder: {error}") from error

    def close(self) -> None:
        """Releases the lock, so that another process can train here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_diagnostics(self, step: int, diagnostics: Mapping[str, Any]) -> None:
        """Writes evaluation/step_STEP.diagnostics.json.

        Args:
            step: The number of steps done.
            diagnostics: What `diagnose` of lrattnres.evaluation returned.

        Raises:
            OSError: It cannot be written.
        """
        file = self.path / "evaluation" / f"step_{step:06d}.diagnostics.json"
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, to_json(dict(diagnostics), indent=1) + "\n")

    def record_choices(self, choices: Mapping[str, Any]) -> None:
        """Adds what this start chose itself to its entry in environment.json.

        Args:
            choices: Such as device, attention and kernels.

        Raises:
            RunError: It cannot be written.
        """
        starts = self.starts()
        starts[-1] |= choices
        with self.usable():
            write_atomic(self.environment_path, to_json({"starts": starts}, indent=2) + "\n")

    def starts(self) -> list[dict[str, Any]]:
        """An entry for every start of the run, the oldest first."""
        return _read_json(self.environment_path)["starts"] if self.environment_path.exists() else []

    def identity(self) -> dict[str, Any]:
        """Fingerprints of the corpus and the tokenizer that the run was started with."""
        return _read_json(self.identity_path)

    def listing(self) -> dict[str, Any] | None:
        """The files of the corpus as they were when the run started; None: no such list."""
        return _read_json(self.corpus_path) if self.corpus_path.exists() else None

    @classmethod
    def pinned_listing(cls, config: TrainConfig) -> dict[str, Any] | None:
        """`listing` of the run that settings name; None if there is no run yet."""
        run = cls.of(config)
        with run.usable():
            return run.listing() if run.config_path.exists() else None

    def finished(self) -> dict[str, Any] | None:
        """The summary of a finished run; None if it is not finished."""
        return _read_json(self.summary_path) if self.summary_path.exists() else None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the summary, which marks the run as finished.

        Raises:
            OSError: It cannot be written.
        """
        write_atomic(self.summary_path, to_json(dict(summary), indent=2) + "\n")

    @staticmethod
    def read_config(path: Path) -> TrainConfig:
        """The settings of the run in a folder.

        Paths of files are made absolute where the file is there. Elsewhere, as on another machine,
        they stay as they are written.

        Raises:
            RunError: Names config.yaml and every error in it.
        """
        config, run = RunFolder._as_written(path), RunFolder(path)
        for key, full in (_read_json(run.paths_path) if run.paths_path.exists() else {}).items():
            if key in PATHS and isinstance(full, str) and _is_there(full):
                *parents, last = key.split(".")
                setattr(reduce(getattr, parents, config), last, full)
        return config

    @staticmethod
    def _as_written(path: Path) -> TrainConfig:
        """The settings in config.yaml of a folder, with paths as they are written there.

        Raises:
            RunError: Names config.yaml and every error in it.
        """
        file = Path(path) / "config.yaml"
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RunError(
                f"{file}: not there, so {path} is no run folder; write one that training or "
                f"scripts/export.py left, or, for a converted model, eval.py run={path} "
                f"downstream=[…], or train.py initial={path}"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{file}: unreadable: {error}") from error
        if not text.endswith("\n" + END):
            raise RunError(
                f"{file}: torn: it does not end with the line `...`; restore the file, or remove "
                "the folder"
            )
        try:
            tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        except Exception as error:  # OmegaConf and its YAML parser have many classes
            raise RunError(f"{file}: not YAML: {error}") from error
        if not isinstance(tree, dict):
            raise RunError(f"{file}: not a mapping of settings")
        try:
            return parse(TrainConfig, tree)  # type: ignore[arg-type]
        except ConfigError as error:
            raise RunError(
                f"{file}: not the settings of a run as this version knows them:\n{error}"
            ) from error

    def _claim(
        self, config: TrainConfig, identity: dict[str, str], listing: Mapping[str, Any] | None
    ) -> None:
        """Checks that the folder is free or of this run, then writes what this start adds."""
        if self.config_path.exists():
            self._check_same_run(config, identity, listing)
        else:
            rest = [
                path
                for path in (self.metrics_path, self.checkpoints_path, self.summary_path)
                if path.exists()
            ]
            if rest:
                raise RunError(
                    f"{self.path}: has {rest[0].name}, but no config.yaml; {self._remedy()}"
                )
            self.environment_path.unlink(missing_ok=True)
            write_atomic(self.identity_path, to_json(identity, indent=2) + "\n")
            self.corpus_path.unlink(missing_ok=True)
            if listing is not None:
                write_atomic(self.corpus_path, to_json(dict(listing)) + "\n")
        write_atomic(self.paths_path, to_json(_full_paths(config), indent=2) + "\n")
        starts = [*self.starts(), describe_environment()]
        write_atomic(self.environment_path, to_json({"starts": starts}, indent=2) + "\n")
        # Last: a folder with a config.yaml has everything else.
        write_atomic(self.config_path, OmegaConf.to_yaml(OmegaConf.create(plain(config))) + END)

    def _check_same_run(
        self, config: TrainConfig, identity: dict[str, str], listing: Mapping[str, Any] | None
    ) -> None:
        """Checks that settings and fingerprints continue the run in this folder.

        Raises:
            RunError: They do not, or the settings say `resume=none`.
        """
        if config.resume == "none":
            remedy = f"write resume=auto to continue it, {self._remedy()}"
            raise RunError(f"{self.path}: there is a run already, and resume=none; {remedy}")
        before = self.check_settings(config)
        if before.name != config.name:
            self.notes.append(
                f"the run was started as name={before.name}, and goes on as {config.name}"
            )
        known = self.identity()
        errors = [
            f"the {key} changed since the run started: {known.get(key, 'none')} then, "
            f"{identity.get(key, 'none')} now"
            for key in sorted(known.keys() | identity.keys())
            if known.get(key) != identity.get(key)
        ]
        if errors and listing is not None:
            errors += differences(self.listing() or {}, listing)
        if errors:
            raise RunError(
                f"{self.path}: the run cannot be continued:\n{listed(errors)}\n{self._remedy()}"
            )

    def check_settings(self, config: TrainConfig) -> TrainConfig:
        """The settings of the run in this folder, after a comparison with others.

        Args:
            config: The settings with which the run is to be continued.

        Raises:
            RunError: Lists every setting that differs and on which results depend.
        """
        written, now = self._as_written(self.path), values_of(config)
        before, paths = values_of(written), _full_paths(config)
        known = _read_json(self.paths_path) if self.paths_path.exists() else {}
        errors = [
            f"{name}: {was} at the start, {is_now} now"
            for key, (_, metadata) in fields_of(TrainConfig).items()
            for name, was, is_now in _differing(key, before[key], now[key])
            if before[key] != now[key]
            and not metadata["may_change"]
            and key != "name"  # the user may rename the folder
            and not (key in paths and paths[key] == known.get(key))
        ]
        if errors:
            raise RunError(
                f"{self.path}: the run was started with other settings:\n{listed(errors)}\n"
                + self._remedy()
            )
        return written

    def _remedy(self) -> str:
        return (
            f"write name=OTHER to start another run, or remove {self.path} to start this one again"
        )


def _differing(key: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """What differs in a setting; a dictionary of free settings has a key of its own for each."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [(key, before, now)]
    names = sorted(before.keys() | now.keys())
    both = [(f"{key}.{name}", before.get(name), now.get(name)) for name in names]
    return [(name, was, is_now) for name, was, is_now in both if was != is_now]


def _full_paths(config: TrainConfig) -> dict[str, str]:
    """Setting -> absolute path, for every setting in PATHS that names a local file."""
    values = values_of(config)
    return {
        key: str(Path(values[key]).expanduser().resolve())
        for key in PATHS
        if values[key] is not None and "://" not in values[key]
    }


def _is_there(path: str) -> bool:
    """Whether a path exists, or matches as a pattern."""
    return Path(path).exists() or any(glob.iglob(path, recursive=True))  # noqa: PTH207


def _checked_name(name: str) -> str:
    """A name that can be the name of a folder.

    Raises:
        RunError: It cannot.
    """
    wrong = (
        "is empty" if not name
        else "has a path separator" if "/" in name or "\\" in name
        else "is no name of its own" if name in (".", "..")
        else "has a NUL character" if "\0" in name
        else f"is longer than {LONGEST_NAME} bytes" if len(os.fsencode(name)) > LONGEST_NAME
        else None
    )  # fmt: skip
    if wrong:
        raise RunError(
            f"name={name!r}: {wrong}; write the plain name of a folder, and the place of it as "
            "runs=FOLDER"
        )
    return name


def _locked(folder: Path) -> IO[str]:
    """Locks `.lock` in a folder, and returns the open file.

    The system releases the lock when the process ends, in whatever way.

    Raises:
        RunError: Another process holds it.
    """
    file = (folder / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise RunError(
            f"{folder}: another process is training in it"
            f"{f' (process {holder})' if holder else ''}; "
            "wait for it to end, or write name=OTHER"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        RunError: The file is missing or damaged.
    """
    try:
        content = from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}: missing or damaged: {error}; restore it, or remove {path.parent}"
        ) from error
    if not isinstance(content, dict):
        raise RunError(
            f"{path}: not a JSON object: {json.dumps(content)[:80]}; restore it, or remove "
            f"{path.parent}"
        )
    return content
