"""From a checkpoint of a run to a folder of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lrattnres.config import TrainConfig
from lrattnres.config.commands import ExportConfig
from lrattnres.data.tokenizers import build_tokenizer
from lrattnres.exchange.folder import (
    TOKENIZER,
    Exported,
    ends_of,
    figures,
    new_folder,
    write_model,
)
from lrattnres.exchange.source import find_run
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import path_of
from lrattnres.runs.checkpoint import Checkpoint
from lrattnres.runs.folder import RunFolder

CPU = torch.device("cpu")
# What the card shows, with its name in metrics.jsonl.
FIGURES = {
    "val_loss": "held-out loss, nats a token",
    "val_perplexity": "held-out perplexity",
    "val_bits_per_byte": "held-out bits a byte",
    "val_tokens": "held-out tokens",
    "loss": "training loss at this step",
    "tokens": "training tokens",
}


def export_run(config: ExportConfig, say: Callable[[str], None] = print) -> Path:
    """Writes the model of a checkpoint to `config.out` (see folder.py).

    Args:
        config: The settings of the command.
        say: Gets a line for each checkpoint that is passed over.

    Returns:
        The folder.

    Raises:
        RunError: `run` is no run folder, or has no checkpoint.
        CheckpointError: The checkpoint is damaged or not there.
        FolderError: `out` cannot be made, or has something in it.
    """

    def weights(checkpoint: Checkpoint | Exported) -> Transformer:
        model = build_model(
            settings.model, seed=None, device=CPU, attention=BACKENDS["sdpa"], dtype=torch.float32
        )
        checkpoint.load({"model": dict(model.state_dict())})
        return model

    wanted = find_run(config.run, config.step)
    folder, settings = wanted.folder, RunFolder.read_config(wanted.folder.path)
    own = Path(settings.tokenizer.path) if settings.tokenizer.path else None
    with new_folder(config.out) as path:
        model, checkpoint, passed_over = wanted.take(weights, strict=config.strict, say=say)
        tokenizer = build_tokenizer(settings.tokenizer)
        measured = figures(folder.path, checkpoint.step)
        write_model(
            path,
            settings.model,
            model.state_dict(),
            model_card(settings, model, checkpoint.step, measured, passed_over),
            tokenizer=None if own else settings.tokenizer.name.name,
            separator=tokenizer.separator,
            # Training puts the separator between two texts; the model that the tokenizer came from
            # may end one by others.
            ends={tokenizer.separator} | (ends_of(own) if own else set()),
            step=checkpoint.step,
            passed_over=passed_over,
        )
        files = [folder.config_path, folder.identity_path, folder.corpus_path]
        for file in [*files, *(own / name for name in TOKENIZER if own)]:
            if file.exists():
                shutil.copyfile(file, path / file.name)
    return Path(config.out)


def model_card(
    settings: TrainConfig,
    model: Transformer,
    step: int,
    measured: dict[str, Any],
    passed_over: Sequence[int] = (),
) -> str:
    """The card as Markdown: what the model is, its figures, and how to use it.

    Args:
        settings: Those of the run.
        model: The model.
        step: The training step of its weights.
        measured: Figures of that step, by their names in metrics.jsonl.
        passed_over: Steps of newer checkpoints that were damaged.
    """
    config = settings.model
    residual = path_of(config).description(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = [
        ("residual path", residual),
        ("size", f"{config.layers} blocks of width {config.dim}, {parameters:,} parameters"),
        ("context", f"{config.context:,} tokens"),
        ("tokenizer", f"`{settings.tokenizer.name.name}`"),
        ("corpus", f"`{settings.data.corpus.name}`"),
        ("steps", f"{step:,} of {settings.steps:,}"),
    ]
    if passed_over:
        rows.append(("newer, damaged checkpoints", ", ".join(map(str, passed_over))))
    rows += [(words, _shown(measured[name])) for name, words in FIGURES.items() if name in measured]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [lrattnres, attention-residuals]
---
# {settings.name}

A decoder whose residual path is attention over depth, trained with lrattnres.

| | |
| --- | --- |
{table}

{USE}"""


USE = """`config.yaml` has every setting of the run, and `python eval.py run=DIR` measures it again.

```python
import lrattnres

model = lrattnres.load("DIR")  # the module itself
```

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIR", trust_remote_code=True)  # needs lrattnres, too
```

Every text begins with the end-of-text token, `bos_token_id` in `config.json`.
"""


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
