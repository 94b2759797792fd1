"""From a checkpoint of a run to a folder of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from lrattnres.config import TrainConfig
from lrattnres.config.commands import ExportConfig
from lrattnres.data.tokenizers import build_tokenizer
from lrattnres.exchange.folder import CONFIG, TOKENIZER, figures, new_folder, write_model
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import path_of
from lrattnres.runs.files import from_json
from lrattnres.runs.find import find_checkpoint
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


def export_run(config: ExportConfig) -> Path:
    """Writes the model of a checkpoint to `config.out`; returns that folder.

    Raises RunError and CheckpointError as evaluation does, FolderError if something is there already.
    """
    folder, checkpoint = find_checkpoint(config.run, config.step, print)
    settings = RunFolder.read_config(folder.path)
    with new_folder(config.out) as path:
        model = build_model(
            settings.model, seed=None, device=CPU, attention=BACKENDS["sdpa"], dtype=torch.float32
        )
        checkpoint.load({"model": dict(model.state_dict())})
        tokenizer = build_tokenizer(settings.tokenizer)
        own = (
            Path(settings.tokenizer.path) if settings.tokenizer.path else None
        )  # of the model that it was made of
        card = model_card(settings, model, checkpoint.step, figures(folder.path, checkpoint.step))
        write_model(
            path,
            settings.model,
            model.state_dict(),
            card,
            tokenizer=None if own else settings.tokenizer.name.name,
            separator=tokenizer.separator,
            end=_ends(own, tokenizer.separator),
            step=checkpoint.step,
        )
        files = [folder.config_path, folder.identity_path, folder.corpus_path]
        for file in [*files, *(own / name for name in TOKENIZER if own)]:
            if file.exists():
                shutil.copyfile(file, path / file.name)
    return Path(config.out)


def _ends(own: Path | None, separator: int) -> int | list[int]:
    """What ends a text: the separator, which training puts between two, and what the model that the tokenizer came from says."""
    said = (
        from_json((own / CONFIG).read_bytes()).get("eos_token_id")
        if own and (own / CONFIG).exists()
        else None
    )
    ends = {separator, *(said if isinstance(said, list) else [] if said is None else [said])}
    return separator if ends == {separator} else sorted(ends)


def model_card(
    settings: TrainConfig, model: Transformer, step: int, measured: dict[str, Any]
) -> str:
    """The card as Markdown: what the model is, its figures, and how to use it."""
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
