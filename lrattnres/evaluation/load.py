"""A trained model on a device, with its tokenizer: what `run=` names, whichever command asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lrattnres.config import (
    ConfigError,
    Device,
    EvalConfig,
    ModelConfig,
    Precision,
    TokenizerName,
    TrainConfig,
)
from lrattnres.config.checks import DTYPES, resolve_device
from lrattnres.data.tokenizers import Tokenizer, build_tokenizer
from lrattnres.evaluation.words import PretrainedWords, TrainedWords, Words
from lrattnres.exchange.folder import Exported, ends_of
from lrattnres.exchange.source import Source, find_source
from lrattnres.model.attention import choose_attention
from lrattnres.model.head import choose_loss
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import path_of
from lrattnres.runs.checkpoint import Checkpoint
from lrattnres.runs.folder import RunError, RunFolder


class Loaded(NamedTuple):
    """A trained model, ready to be used.

    Attributes:
        folder: The run, or the exported or converted folder.
        source: Where the weights lay.
        passed_over: Steps of newer, damaged checkpoints.
        run: The settings of the run; None for a converted model that was never trained here.
        words: How it reads and writes text.
        documents: Whether attention stays inside a document.
        precision: The arithmetic.
        model: The module, not trainable.
    """

    folder: RunFolder
    source: Checkpoint | Exported
    passed_over: list[int]
    run: TrainConfig | None
    words: Words
    documents: bool
    precision: Precision
    model: Transformer

    def choices(self) -> dict[str, Any]:
        """What was chosen for it, as it is written beside every result."""
        return {
            "device": str(self.model.head.weight.device),
            "precision": self.precision.name,
            "attention": self.model.attention.name,
            "depth_kernels": self.model.kernels.name,
            "loss_form": self.model.head.form.name,
        } | ({"passed_over": self.passed_over} if self.passed_over else {})


def load_run(config: EvalConfig, say: Callable[[str], None]) -> Loaded:
    """The model that `config.run` and `config.step` name, on the device that `config` names.

    Args:
        config: `run`, `step`, `strict`, and the device, precision and backends.
        say: Gets a line for each checkpoint that is passed over.

    Raises:
        RunError: `run` is no such folder, or its tokenizer is another one by now.
        CheckpointError: The checkpoint is damaged or not there.
        FolderError: The same for an exported or converted folder.
        ConfigError: The settings cannot be.
    """
    if errors := device_errors(config):
        raise ConfigError(errors)
    if config.threads:
        torch.set_num_threads(config.threads)
    wanted = find_source(config.run, config.step)
    exported, folder = wanted.exported, wanted.folder
    run: TrainConfig | None = None
    words: Words
    if exported is None or folder.config_path.exists():
        run = _run_of(wanted)
        words = TrainedWords(_checked_tokenizer(folder, run), _further_ends(wanted, run))
    elif exported.tokenizer is not None:
        named = build_tokenizer(TokenizerName[exported.tokenizer])
        words = TrainedWords(named, ends_of(exported.path))
    else:
        words = PretrainedWords(exported)
    settings = run.model if run else exported.model if exported else None
    assert settings is not None
    precision = config.precision or (run.precision if run else Precision.float32)

    def weights(source: Checkpoint | Exported) -> Transformer:
        return _load_weights(settings, source, config, precision)

    model, source, passed_over = wanted.take(weights, strict=config.strict, say=say)
    documents = run.documents if run else False
    return Loaded(folder, source, passed_over, run, words, documents, precision, model)


def device_errors(config: EvalConfig) -> list[str]:
    """A GPU that was asked for and is not there, and a number of threads that is none."""
    errors = []
    if config.device is Device.cuda and not torch.cuda.is_available():
        errors.append(
            "device=cuda: this machine has no CUDA GPU that torch can see; "
            "write device=cpu or device=auto"
        )
    if config.threads is not None and config.threads < 1:
        errors.append(f"threads={config.threads}: must be at least 1, or null")
    return errors


def _run_of(wanted: Source) -> TrainConfig:
    """The settings of a run; for an exported folder with its own model, which may be converted."""
    run, exported = RunFolder.read_config(wanted.folder.path), wanted.exported
    if exported is None:
        return run
    path = str(exported.path) if exported.tokenizer is None else run.tokenizer.path
    tokenizer = dataclasses.replace(run.tokenizer, path=path)
    return dataclasses.replace(run, model=exported.model, tokenizer=tokenizer)


def _further_ends(wanted: Source, run: TrainConfig) -> frozenset[int]:
    """What ends a text besides the separator: what the folder says, or the model that was given."""
    if wanted.exported is not None:
        return ends_of(wanted.exported.path)
    return ends_of(Path(run.tokenizer.path)) if run.tokenizer.path else frozenset()


def _checked_tokenizer(folder: RunFolder, run: TrainConfig) -> Tokenizer:
    """Raises RunError if it is another one by now."""
    tokenizer = build_tokenizer(run.tokenizer)
    if folder.identity().get("tokenizer") == tokenizer.fingerprint:
        return tokenizer
    own = run.tokenizer.path
    other = "the run" if folder.environment_path.exists() else "the run that it was exported from"
    remedy = (
        f"restore the tokenizer.json of {own}"
        if own
        else f"install the versions that environment.json of {other} names"
    )
    raise RunError(
        f"{folder.path}: its tokenizer {tokenizer.name} is not the one of this machine, so the "
        f"model would read other tokens than it was trained on; {remedy}"
    )


def _load_weights(
    model: ModelConfig, source: Checkpoint | Exported, config: EvalConfig, precision: Precision
) -> Transformer:
    """Raises ConfigError where the backends of `config` cannot run here."""
    device, dtype = resolve_device(config.device), DTYPES[precision]
    try:
        attention = choose_attention(config.attention.name, device, dtype, training=False)
        kernels = path_of(model).choose_kernels(
            model, config.kernels.name, device, dtype, compiled=False
        )
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    tokens = (config.batch or 1) * model.context
    built = build_model(
        model,
        seed=None,
        device=device,
        attention=attention,
        dtype=dtype,
        kernels=kernels,
        loss=choose_loss(config.loss.name, device, tokens, model.vocabulary, compiled=False),
    )
    source.load({"model": dict(built.state_dict())})
    return built.requires_grad_(False)
