"""The held-out loss and depth diagnostics of a run, a checkpoint in it, or an exported model."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lrattnres.config import ConfigError, EvalConfig, TrainConfig
from lrattnres.config.checks import resolve_device
from lrattnres.data.dataset import Dataset, open_dataset
from lrattnres.distributed.ranks import start_ranks
from lrattnres.evaluation.diagnostics import diagnose
from lrattnres.evaluation.heldout import HeldOut, evaluate
from lrattnres.evaluation.load import Loaded, device_errors, load_run
from lrattnres.residual.base import path_of
from lrattnres.runs.files import from_json, to_json, write_atomic
from lrattnres.runs.folder import RunError, RunFolder

TIMEOUT = 600.0  # seconds for a rank that is slower than the others


@dataclass(frozen=True)
class Evaluation:
    """What was measured of a model.

    Attributes:
        folder: The run or the exported folder.
        step: The training step of the weights.
        first: Whether this is rank 0, which writes.
        record: Figures and choices, as they are written to `file`.
        diagnostics: Where each site reads, written beside it; None if it was not asked for.
    """

    folder: RunFolder
    step: int
    first: bool
    record: dict[str, Any]
    diagnostics: dict[str, Any] | None

    @property
    def file(self) -> Path:
        return self.folder.path / "evaluation" / f"step_{self.step:06d}.json"

    def write(self) -> None:
        results_folder(self.file.parent)
        write_atomic(self.file, to_json(self.record, indent=2) + "\n")
        if self.diagnostics is not None:
            self.folder.write_diagnostics(self.step, self.diagnostics)


def evaluate_run(config: EvalConfig) -> Evaluation:
    """Prints and writes the held-out loss of a model, and the depth diagnostics if asked.

    Under torchrun the ranks share the windows, each with a whole model, and the result is that of
    one; rank 0 writes.

    Raises:
        RunError: The folder is no run, its corpus or tokenizer is not the one that it was trained
            with, or nothing can be written into it.
        CheckpointError: The checkpoint is damaged or not there.
        FolderError: The same for an exported folder.
        ConfigError: The settings cannot be.
    """
    if errors := _errors(config):
        raise ConfigError(errors)
    ranks = start_ranks(resolve_device(config.device).type, TIMEOUT)
    say = print if ranks.first else (lambda text: None)
    loaded = ranks.all_succeed(lambda: load_run(config, say))
    # A training beside this may have removed a checkpoint before some of the ranks saw it.
    while len(ranks.gather(torch.tensor(loaded.source.step)).unique()) > 1:
        loaded = ranks.all_succeed(lambda: load_run(config, say))
    folder = loaded.folder
    if loaded.run is None:
        RunFolder.read_config(folder.path)  # which says what to do with a converted model
    settings = _settings(config, loaded)
    results_folder(folder.path / "evaluation")
    dataset = open_dataset(settings, folder.listing())
    _check_identity(folder, dataset)

    model, choices = loaded.model, loaded.choices()
    chosen = f"attention {choices['attention']}, depth kernels {choices['depth_kernels']}"
    chosen += f", loss {choices['loss_form']}"
    if path_of(model.config).beyond_kernels(model.config):
        chosen += f" ({model.kernels.reason})"
    say(f"{loaded.source.path}: {choices['device']}, {choices['precision']}, {chosen}")
    budget = settings.evaluation
    windows = dataset.held_out_windows(budget.tokens, budget.batch)
    held_out = evaluate(
        model, windows, dataset.tokenizer, documents=settings.documents, ranks=ranks
    )
    say(_sentence(held_out))
    record = {"step": loaded.source.step, **held_out.record(), **choices}
    diagnostics = None
    if config.diagnostics:
        windows = dataset.held_out_windows(budget.diagnostics_tokens, budget.batch)
        diagnostics = diagnose(
            model, windows, dataset.tokenizer.separator, documents=settings.documents, ranks=ranks
        )
    result = Evaluation(folder, loaded.source.step, ranks.first, record, diagnostics)
    if ranks.first:
        _say_what_goes(result, say)
        result.write()
    return result


def results_folder(path: Path) -> Path:
    """A folder for results, made if it is not there.

    Raises:
        RunError: Nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise RunError(
            f"{path}: results cannot be written there: {error.strerror}; write another place, or "
            "make it writable"
        ) from error
    return path


def _errors(config: EvalConfig) -> list[str]:
    positive = ("tokens", "batch", "diagnostics_tokens")
    errors = [
        f"{name}={value}: must be at least 1"
        for name in positive
        if (value := getattr(config, name)) is not None and value < 1
    ]
    errors += device_errors(config)
    errors += [
        f"{name}={value}: has no use without downstream=[…]"
        for name in ("tasks", "limit")
        if (value := getattr(config, name)) is not None
    ]
    return errors


def _settings(config: EvalConfig, loaded: Loaded) -> TrainConfig:
    """The run's own settings, with what the evaluation says differently."""
    run = loaded.run
    assert run is not None
    said = {name: getattr(config, name) for name in ("tokens", "batch", "diagnostics_tokens")}
    budget = {name: value for name, value in said.items() if value is not None}
    return dataclasses.replace(
        run,
        evaluation=dataclasses.replace(run.evaluation, **budget),
        data=dataclasses.replace(run.data, cache=config.cache or run.data.cache),
        device=config.device,
        precision=loaded.precision,
        attention=config.attention,
        kernels=config.kernels,
        loss=config.loss,
    )


def _check_identity(folder: RunFolder, dataset: Dataset) -> None:
    known = folder.identity()
    other = [name for name, value in dataset.identity.items() if known.get(name) != value]
    if other:
        raise RunError(
            f"{folder.path}: the {' and the '.join(other)} differ from what the run was trained "
            "with (another version of the texts, or of the packages they come from); its held-out "
            "loss would not be comparable"
        )


def _say_what_goes(result: Evaluation, say: Callable[[str], None]) -> None:
    """An earlier measurement of the step is replaced, with a word if it was another one."""
    before = from_json(result.file.read_bytes()) if result.file.exists() else result.record
    other = {name: value for name, value in before.items() if result.record.get(name) != value}
    if other:
        say(
            f"{result.file}: replaced; before: "
            + ", ".join(f"{name} {value}" for name, value in other.items())
        )
    file = result.file.with_suffix(".diagnostics.json")
    if result.diagnostics is not None and file.exists():
        tokens = from_json(file.read_bytes()).get("tokens")
        if tokens != result.diagnostics["tokens"]:
            say(f"{file}: replaced; before: tokens {tokens}")


def _sentence(held_out: HeldOut) -> str:
    return (
        f"held-out loss {held_out.loss:.6f} nats per token, perplexity {held_out.perplexity:.4f}, "
        f"{held_out.bits_per_byte:.6f} bits per byte, {held_out.tokens:,} tokens"
    )
