"""Reads runs from files: run folders, and exports from Weights & Biases.

A folder is a run if it has a configuration. The first file of each line that is there is read:

    config.yaml, config.json                                   the resolved settings
    metrics.jsonl, history.jsonl, history.json, history.csv    what was measured, step by step
    summary.json, wandb-summary.json                           the last values
    identity.json, environment.json, evaluation/step_*.diagnostics.json

Exports do not have the files of the last line. Nothing is imported or executed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from lrattnres.config import TrainConfig, defaults, fields_of, flatten
from lrattnres.report.history import HISTORIES, HistoryError, read_gaps, read_history, read_json
from lrattnres.runs.errors import first_line

CONFIGS = ("config.yaml", "config.json")
SUMMARIES = ("summary.json", "wandb-summary.json")
# What shows that a folder is a run, even if its configuration is lost.
TRACES = (*HISTORIES, *SUMMARIES, "checkpoints", "status.json")
SCHEMA = fields_of(TrainConfig)
DEFAULTS = flatten(defaults(TrainConfig))


class ReportError(Exception):
    """A folder from which no run can be read; `str` names it and what is wrong."""


@dataclass(frozen=True)
class Run:
    """What is known of one run.

    Attributes:
        name: Of its folder.
        settings: By dotted key; what the file leaves out is at its default.
        records: What was measured, by step.
        summary: The last values.
        diagnostics: Where each site reads; `of` says on which tokens. None: not measured.
        identity: Fingerprints of corpus and tokenizer.
        machine: What the last start chose: device, kernels, ranks and more.
        errors: What is missing or unreadable, and what the report cannot show for it.
    """

    name: str
    settings: Mapping[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    diagnostics: Mapping[str, Any] | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    @property
    def tokens(self) -> int:
        """Tokens that the whole run reads: steps x sequences x context."""
        return int(
            self.settings["steps"] * self.settings["global_batch"] * self.settings["model.context"]
        )

    @property
    def last_step(self) -> int:
        """The last step that is known to be done."""
        return max(
            [int(self.summary.get("step") or 0), *(record["step"] for record in self.records)]
        )

    @property
    def val_loss(self) -> float | None:
        """Held-out loss after the last step, in nats per token; None: not finished."""
        last = self.records[-1] if self.records else {}
        for source in (self.summary, last):
            if source.get("step") == self.settings["steps"] and isinstance(
                source.get("val_loss"), float | int
            ):
                return float(source["val_loss"])
        return None

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every record that has this number, also where it is not finite."""
        return [
            (record["step"], float(record[name]))
            for record in self.records
            if _is_number(record.get(name))
        ]


def find_runs(folders: list[Path]) -> tuple[list[Run], list[str]]:
    """All runs in folders and below them, each folder once.

    Returns:
        The runs, by name; and what is wrong, one sentence each.
    """
    runs: dict[Path, Run] = {}
    errors: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            errors.append(f"{folder}: no such folder")
            continue
        before = len(runs) + len(errors)
        for path in _candidates(folder.resolve()):
            if path in runs:
                continue
            try:
                runs[path] = read_run(path)
            except ReportError as error:
                errors.append(str(error))
        if len(runs) + len(errors) == before and folder.resolve() not in runs:
            errors.append(f"{folder}: no run in it: no folder with one of {', '.join(CONFIGS)}")
    named = _distinct(runs)
    return named, [*errors, *(f"{run.name}: {error}" for run in named for error in run.errors)]


def read_run(path: Path) -> Run:
    """Reads one run.

    Raises:
        ReportError: Its configuration cannot be read. Any other error is noted in `Run.errors`.
    """
    settings = _settings(path)
    errors: list[str] = []
    try:
        records = read_history(path)
    except HistoryError as error:
        records = []
        errors.append(f"{error}; no curve, gradient norm or rate of this run")
    summary = _optional(path, SUMMARIES, errors)
    errors += read_gaps(path, _last_recorded(path, summary))
    identity = _optional(path, ("identity.json",), errors)
    starts = _optional(path, ("environment.json",), errors).get("starts") or [{}]
    diagnostics = _diagnostics(path, settings, records, errors)
    return Run(
        _name(path), settings, records, summary, diagnostics, identity, starts[-1], tuple(errors)
    )


def _last_recorded(path: Path, summary: Mapping[str, Any]) -> int:
    """The last step that must have a record, by summary and newest checkpoint; 0: not known."""
    known = [summary.get("step")]
    for file in path.glob("checkpoints/step_*/manifest.json"):
        details = _optional(path, (str(file.relative_to(path)),), []).get("details")
        known += [details.get("recorded")] if isinstance(details, dict) else []
    return max([0, *(step for step in known if isinstance(step, int))])


def _candidates(folder: Path) -> Iterator[Path]:
    """Folders that are runs or were runs. A folder inside a run is no other run."""
    if any((folder / name).is_file() for name in CONFIGS):
        yield folder
        return
    if any((folder / name).exists() for name in TRACES) or any(folder.glob("run-*.wandb")):
        files = folder / "files"  # of a folder of W&B; its history is in a file of another format
        yield files if any((files / name).is_file() for name in CONFIGS) else folder
        return
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.name.startswith("."):
            yield from _candidates(child)


def _settings(path: Path) -> dict[str, Any]:
    """The resolved configuration, complete, by dotted key.

    W&B wraps each top-level value as {value: …}, and adds keys of its own.

    Raises:
        ReportError: It is missing, unreadable or not complete.
    """
    file = next((path / name for name in CONFIGS if (path / name).is_file()), None)
    if file is None:
        raise ReportError(
            f"{path.name}: left out: it has no {' or '.join(CONFIGS)}{_refusal(path)}"
        )
    try:
        text = file.read_text(encoding="utf-8")
        tree = (
            read_json(text)
            if file.suffix == ".json"
            else OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        )
        # `json.dumps(run.json_config)` is a text in a text.
        tree = read_json(tree) if isinstance(tree, str) else tree
    except Exception as error:  # two parsers, each with its own classes
        raise ReportError(
            f"{path.name}: left out: {file.name} cannot be read: {first_line(error)}"
        ) from error
    if not isinstance(tree, dict):
        raise ReportError(f"{path.name}: left out: {file.name} is not a mapping of settings")
    tree = {
        key: value
        for key, value in tree.items()
        if not str(key).startswith("_") and key != "wandb_version"
    }
    if tree and all(isinstance(value, dict) and "value" in value for value in tree.values()):
        tree = {key: value["value"] for key, value in tree.items()}
    given = flatten(tree)
    settings = DEFAULTS | given
    lacking = [
        key
        for key in SCHEMA
        if settings[key] == MISSING and not SCHEMA[key][1]["may_change"] and key != "name"
    ]
    if lacking:
        raise ReportError(
            f"{path.name}: left out: {file.name} lacks {', '.join(lacking)}; "
            "is it whole, and of a training run?"
        )
    return settings


def _refusal(path: Path) -> str:
    """Why a folder has no configuration, as far as that is known."""
    if any(path.glob("run-*.wandb")):
        return "; `wandb sync` it, and export its config and history (docs/reproducing.md)"
    try:
        status = read_json((path / "status.json").read_text(encoding="utf-8"))
        return f"; it was {status['state']}: {status['fault']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _optional(path: Path, names: tuple[str, ...], errors: list[str]) -> dict[str, Any]:
    """The first of the files that is there; {} if there is none.

    A damaged file gives {} too, and is noted in `errors`.
    """
    file = next((path / name for name in names if (path / name).is_file()), None)
    if file is None:
        return {}
    try:
        value = read_json(file.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value
    except (OSError, ValueError) as error:
        errors.append(f"{file.name} cannot be read: {first_line(error)}")
        return {}


def _diagnostics(
    path: Path, settings: Mapping[str, Any], records: list[dict[str, Any]], errors: list[str]
) -> dict[str, Any] | None:
    """The newest diagnostics of evaluation/, or else those of training, which have no mean α.

    `of` is added: the tokens that they are of.
    """
    sites = 2 * settings["model.layers"] + 1
    files = sorted(
        path.glob("evaluation/step_*.diagnostics.json"),
        key=lambda file: (len(file.name), file.name),
    )
    found: dict[str, Any] | None = None
    for file in files[-1:]:
        value = _optional(path, (str(file.relative_to(path)),), errors)
        step = file.name.removeprefix("step_").partition(".")[0]
        found = value and value | {
            "of": f"held-out tokens at step {int(step) if step.isdigit() else step}"
        }
        if step.isdigit() and int(step) != settings["steps"]:
            errors.append(
                f"its newest diagnostics are of step {int(step)}, "
                f"not of its last, {settings['steps']}"
            )
    if not found:
        in_training = [
            record for record in records if isinstance(record.get("effective_sources"), list)
        ]
        found = (
            in_training[-1] | {"of": f"training tokens at step {in_training[-1]['step']}"}
            if in_training
            else None
        )
    if found and not _whole(found, sites):
        errors.append(
            f"its diagnostics ({found['of']}) are not those of {sites} read sites; "
            "they are not shown"
        )
        return None
    return found


def _whole(diagnostics: Mapping[str, Any], sites: int) -> bool:
    """Whether the lists that are shown have an entry for each site, and for each thing it reads."""
    names = ("effective_sources", "largest_weight", "mean_weight", "sources", "coefficients")
    lists = [diagnostics[name] for name in names if diagnostics.get(name) is not None]
    if not lists or any(not isinstance(values, list) or len(values) != sites for values in lists):
        return False
    pairs = zip(diagnostics.get("mean_weight", ()), diagnostics.get("sources", ()), strict=False)
    triangle = enumerate(diagnostics.get("coefficients") or (), start=1)
    return all(means is None or len(means) == len(labels) for means, labels in pairs) and all(
        isinstance(row, list) and len(row) == site for site, row in triangle
    )


def _name(path: Path) -> str:
    return path.parent.name if path.name == "files" else path.name


def _distinct(runs: Mapping[Path, Run]) -> list[Run]:
    """By name. Where folders have the same name, the name of the folder above is added."""
    names = [run.name for run in runs.values()]
    again = {name for name in names if names.count(name) > 1}
    renamed = [
        Run(**(vars(run) | {"name": f"{path.parent.name}/{run.name}"}))
        if run.name in again
        else run
        for path, run in runs.items()
    ]
    return sorted(renamed, key=lambda run: run.name)


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def finite(values: list[float]) -> list[float]:
    """The values that are finite numbers."""
    return [value for value in values if math.isfinite(value)]
