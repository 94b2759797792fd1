"""A trained model and its tokenizer from a run folder, without the corpus they were trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from lrattnres.config import EvalConfig, TrainConfig
from lrattnres.data.tokenizers import Tokenizer
from lrattnres.evaluation.run import find_weights, load_weights, run_of, settings_of, tokenizer_of
from lrattnres.exchange.folder import Exported
from lrattnres.model.transformer import Transformer
from lrattnres.runs.checkpoint import Checkpoint
from lrattnres.runs.folder import RunFolder


class TrainedRun(NamedTuple):
    """`settings` are the run's own, with device, precision and backends as they were asked for now."""

    folder: RunFolder
    checkpoint: Checkpoint | Exported
    settings: TrainConfig
    tokenizer: Tokenizer
    model: Transformer


def load_run(config: EvalConfig, say: Callable[[str], None]) -> TrainedRun:
    """The checkpoint that `config` names, on the device that it names; says what was passed over on the way.

    Raises RunError for a folder that is no run or whose tokenizer is another one by now, CheckpointError for a damaged
    checkpoint, ConfigError for settings that cannot be.
    """
    folder, checkpoint = find_weights(config, say)
    settings = settings_of(config, run_of(folder, checkpoint))
    if config.threads:
        torch.set_num_threads(config.threads)
    tokenizer = tokenizer_of(folder, settings)
    return TrainedRun(
        folder,
        checkpoint,
        settings,
        tokenizer,
        load_weights(settings.model, checkpoint, config, settings.precision),
    )
