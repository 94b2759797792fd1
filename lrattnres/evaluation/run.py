"""Evaluation of a run folder, of one checkpoint in it, or of an exported model; the folder knows its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lrattnres.config import ConfigError, Device, EvalConfig, ModelConfig, Precision, TrainConfig
from lrattnres.config.checks import DTYPES, resolve_device
from lrattnres.data.dataset import Dataset, open_dataset
from lrattnres.data.tokenizers import Tokenizer, build_tokenizer
from lrattnres.distributed.ranks import start_ranks
from lrattnres.evaluation.diagnostics import diagnose
from lrattnres.evaluation.heldout import HeldOut, evaluate
from lrattnres.exchange.folder import Exported, is_exported, read_exported
from lrattnres.kernels.backends import choose_kernels
from lrattnres.model.attention import choose_attention
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import path_of
from lrattnres.runs.checkpoint import Checkpoint
from lrattnres.runs.files import from_json, to_json, write_atomic
from lrattnres.runs.find import find_checkpoint
from lrattnres.runs.folder import RunError, RunFolder

TIMEOUT = 600.0  # seconds for a rank that is slower than the others


@dataclass(frozen=True)
class Evaluation:
    """What was measured, and where it lies: `record` in `file`, `diagnostics` beside it. `first`: on rank 0."""

    folder: RunFolder
    step: int
    first: bool
    record: dict[str, Any]
    diagnostics: dict[str, Any] | None

    @property
    def file(self) -> Path:
        return self.folder.path / "evaluation" / f"step_{self.step:06d}.json"

    def write(self) -> None:
        self.file.parent.mkdir(exist_ok=True)
        write_atomic(self.file, to_json(self.record, indent=2) + "\n")
        if self.diagnostics is not None:
            self.folder.write_diagnostics(self.step, self.diagnostics)


def evaluate_run(config: EvalConfig) -> Evaluation:
    """Prints and writes the held-out loss of a checkpoint, and the depth diagnostics if asked.

    Under torchrun the ranks share the windows, each with a whole model, and the result is that of one; rank 0 writes.
    Raises RunError for a folder that is no run or a corpus that is not the run's, CheckpointError for a damaged
    checkpoint, ConfigError for settings that cannot be.
    """
    if faults := device_faults(config):
        raise ConfigError(faults)
    if config.threads:
        torch.set_num_threads(config.threads)
    ranks = start_ranks(resolve_device(config.device).type, TIMEOUT)
    say = print if ranks.first else (lambda text: None)
    folder, checkpoint = find_weights(config, say)
    settings = settings_of(config, run_of(folder, checkpoint))
    dataset = open_dataset(settings, folder.listing())
    _check_identity(folder, dataset)
    model = load_weights(settings.model, checkpoint, config, settings.precision)

    chosen = f"attention {model.attention.name}, depth kernels {model.kernels.name}"
    if path_of(settings.model).beyond_kernels(settings.model):
        chosen += f" ({model.kernels.reason})"
    say(f"{checkpoint.path}: {model.head.weight.device}, {settings.precision.name}, {chosen}")
    budget = settings.evaluation
    windows = dataset.held_out_windows(budget.tokens, budget.batch)
    held_out = evaluate(
        model, windows, dataset.tokenizer, documents=settings.documents, ranks=ranks
    )
    say(_sentence(held_out))
    record = {"step": checkpoint.step, **held_out.record(), "precision": settings.precision.name}
    record |= {"attention": model.attention.name, "depth_kernels": model.kernels.name}
    record |= {"device": str(model.head.weight.device)}
    diagnostics = None
    if config.diagnostics:
        windows = dataset.held_out_windows(budget.diagnostics_tokens, budget.batch)
        diagnostics = diagnose(
            model, windows, dataset.tokenizer.separator, documents=settings.documents, ranks=ranks
        )
    result = Evaluation(folder, checkpoint.step, ranks.first, record, diagnostics)
    if ranks.first:
        _say_what_goes(result, say)
        result.write()
    return result


def find_weights(
    config: EvalConfig, say: Callable[[str], None]
) -> tuple[RunFolder, Checkpoint | Exported]:
    """`run` names a run folder, one of the folders under its `checkpoints`, or what scripts/export.py made of one."""
    path = Path(config.run)
    if not is_exported(path):
        return find_checkpoint(config.run, config.step, say)
    exported = read_exported(path)
    if config.step not in (None, exported.step):
        raise ConfigError(
            [f"step={config.step}: run={path} was exported at step {exported.step}; leave step out"]
        )
    return RunFolder(path), exported


def run_of(folder: RunFolder, source: Checkpoint | Exported) -> TrainConfig:
    """The settings of the run; of an exported folder its model, which may have been converted, and its own tokenizer."""
    run = RunFolder.read_config(folder.path)
    if not isinstance(source, Exported):
        return run
    path = str(source.path) if source.tokenizer is None else run.tokenizer.path
    return dataclasses.replace(
        run, model=source.model, tokenizer=dataclasses.replace(run.tokenizer, path=path)
    )


def settings_of(config: EvalConfig, run: TrainConfig) -> TrainConfig:
    """The run's own settings, with what the evaluation says differently."""
    positive = {
        "tokens": config.tokens,
        "batch": config.batch,
        "diagnostics_tokens": config.diagnostics_tokens,
    }
    faults = [
        f"{name}={value}: must be at least 1"
        for name, value in positive.items()
        if value is not None and value < 1
    ]
    faults += device_faults(config)
    alone = {"tasks": config.tasks, "limit": config.limit}
    faults += [
        f"{name}={value}: has no use without downstream=[…]"
        for name, value in alone.items()
        if value is not None
    ]
    if faults:
        raise ConfigError(faults)
    budget = {name: value for name, value in positive.items() if value is not None}
    return dataclasses.replace(
        run,
        evaluation=dataclasses.replace(run.evaluation, **budget),
        data=dataclasses.replace(run.data, cache=config.cache or run.data.cache),
        device=config.device,
        precision=config.precision or run.precision,
        attention=config.attention,
        kernels=config.kernels,
    )


def device_faults(config: EvalConfig) -> list[str]:
    """A GPU that was asked for and is not there, and a number of threads that is none."""
    faults = []
    if config.device is Device.cuda and not torch.cuda.is_available():
        faults.append(
            "device=cuda: this machine has no CUDA GPU that torch can see; write device=cpu or device=auto"
        )
    if config.threads is not None and config.threads < 1:
        faults.append(f"threads={config.threads}: must be at least 1, or null")
    return faults


def tokenizer_of(folder: RunFolder, settings: TrainConfig) -> Tokenizer:
    """The tokenizer of a run or an exported folder. Raises RunError if it is another one by now."""
    tokenizer = build_tokenizer(settings.tokenizer)
    if folder.identity().get("tokenizer") == tokenizer.fingerprint:
        return tokenizer
    run = "the run" if folder.environment_path.exists() else "the run that it was exported from"
    own = settings.tokenizer.path
    raise RunError(
        f"{folder.path}: its tokenizer {tokenizer.name} is not the one of this machine, so the model would read other tokens "
        "than it was trained on; "
        + (
            f"restore the tokenizer.json of {own}"
            if own
            else f"install the versions that environment.json of {run} names"
        )
    )


def _check_identity(folder: RunFolder, dataset: Dataset) -> None:
    known = folder.identity()
    faults = [name for name, value in dataset.identity.items() if known.get(name) != value]
    if faults:
        raise RunError(
            f"{folder.path}: the {' and the '.join(faults)} differ from what the run was trained with (another version of "
            "the texts, or of the packages they come from); its held-out loss would not be comparable"
        )


def load_weights(
    model: ModelConfig, source: Checkpoint | Exported, config: EvalConfig, precision: Precision
) -> Transformer:
    """The model of a checkpoint or an exported folder, on the device and with the backends of `config`; not trainable.

    Raises ConfigError where those cannot run here.
    """
    device, dtype = resolve_device(config.device), DTYPES[precision]
    try:
        attention = choose_attention(config.attention.name, device, dtype, training=False)
        kernels = choose_kernels(
            config.kernels.name,
            device,
            dtype,
            compiled=False,
            beyond=path_of(model).beyond_kernels(model),
        )
    except ValueError as fault:
        raise ConfigError([str(fault)]) from fault
    built = build_model(
        model, seed=None, device=device, attention=attention, dtype=dtype, kernels=kernels
    )
    source.load({"model": dict(built.state_dict())})
    return built.requires_grad_(False)


def _say_what_goes(result: Evaluation, say: Callable[[str], None]) -> None:
    """An earlier measurement of the same step is replaced, and not without a word if it was another one."""
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
