"""From a pretrained model, or one trained here, to the same weights with another residual path.

Every variant begins as the model that it was made of, but for the epsilon of the norms: its queries are zero, so that a
read is the mean of its sources; together they are the residual stream; and whoever reads normalises. `model.gate` makes
that exact, and independent of the queries.

The norm gains of a pretrained model stay parameters of their own. Folded into the projections behind them they would
cost nothing, but a tied embedding has no place for the last one, and an optimizer that orthogonalises or decays the
product does not move the model that was pretrained.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrattnres.config import ConfigError, DepthConfig, ModelConfig
from lrattnres.config.commands import ConvertConfig
from lrattnres.exchange.folder import (
    CONFIG,
    TOKENIZER,
    FolderError,
    new_folder,
    read_exported,
    write_model,
)
from lrattnres.exchange.pretrained import Weights, model_of, weights_of
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import path_of, paths
from lrattnres.runs.files import from_json

# Of a model that was trained here: what it was trained with, so that it is measured on the same held-out tokens.
RUN = ("config.yaml", "identity.json", "corpus.json")


class Given(NamedTuple):
    """The model that is converted. weights: what makes each tensor, by its name in `Transformer`; words: of its tokenizer,
    for `write_model`; done: called when all have been made, to look for what was left.
    """

    model: ModelConfig
    weights: Mapping[str, Callable[[], Tensor]]
    words: dict[str, Any]
    done: Callable[[], None]


def convert(config: ConvertConfig) -> Path:
    """Writes the converted model to `config.out` (see folder.py); returns that folder.

    Raises FolderError for what cannot be read or written, ConfigError for a residual path that cannot be.
    """
    source = Path(config.source)
    given = _given(source)
    target = _target(config, given.model)
    with new_folder(config.out) as path:
        model = build_model(
            target,
            seed=config.seed,
            device=torch.device("cpu"),
            attention=BACKENDS["sdpa"],
            dtype=torch.float32,
        )
        _fill(model, given, source)
        write_model(path, target, model.state_dict(), _card(config, target), **given.words, step=0)
        for name in (*TOKENIZER, *RUN):
            if (source / name).exists():
                shutil.copyfile(source / name, path / name)
    return Path(config.out)


def _given(source: Path) -> Given:
    file = source / CONFIG
    try:
        tree: dict[str, Any] = from_json(file.read_bytes())
    except (OSError, ValueError) as fault:
        raise FolderError(
            f"from={source}: {CONFIG} cannot be read: {fault}; write the folder of a model (scripts/export.py makes one of a run)"
        ) from fault
    read = Weights(source)
    if "lrattnres" in tree:
        exported = read_exported(source)
        names = {name.removeprefix("model."): name for name in read.files}
        learned = names.get("router.gates") or names.get("router.queries")
        if learned and read(learned).any():
            raise FolderError(
                f"from={source}: its reads were trained, and a new residual path begins without them, as another model; "
                "write a folder with model.residual=baseline, or one not trained since it was converted"
            )
        exported.check()
        own = {
            name: partial(read, there)
            for name, there in names.items()
            if not name.startswith("router.")
        }
        words = {
            "tokenizer": exported.tokenizer,
            "separator": exported.separator,
            "end": tree["eos_token_id"],
        }
        return Given(exported.model, own, words, lambda: None)
    model = model_of(tree, file)
    if model.tied:
        read.unread.discard("lm_head.weight")  # some files hold the embedding twice

    def done() -> None:
        left = sorted(name for name in read.unread if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise FolderError(
                f"{source}: tensors that have no place in the model: {', '.join(left)}"
            )

    # A model without a token of its own for the beginning was trained with the end of the text before.
    end, first = tree.get("eos_token_id"), tree.get("bos_token_id")
    first = first if first is not None else end[0] if isinstance(end, list) else end
    return Given(
        model, weights_of(read, model), {"tokenizer": None, "separator": first, "end": end}, done
    )


def _target(config: ConvertConfig, given: ModelConfig) -> ModelConfig:
    variant, errors = config.model, []
    chosen = {
        name: getattr(variant, name) for name in ("residual", "rank", "blocks", "routing", "gate")
    }
    target = dataclasses.replace(given, **chosen, depth=DepthConfig(), path={})
    if variant.residual not in paths():
        errors.append(f"model.residual={variant.residual}: must be one of {', '.join(paths())}")
    else:
        path = path_of(target)
        errors += path.errors(target)
        errors += [
            f"model.{name}={value}: has no meaning for model.residual={variant.residual}; leave it out"
            for name, value in chosen.items()
            if name not in (*path.uses, "residual") and value not in (None, False)
        ]
    if config.context is not None and not 1 <= config.context <= given.context:
        errors.append(
            f"context={config.context}: must be between 1 and {given.context}, what the model was trained for"
        )
    if errors:
        raise ConfigError(errors)
    target = path_of(target).settled(target)[0]
    return dataclasses.replace(target, context=config.context or given.context)


@torch.no_grad()
def _fill(model: Transformer, given: Given, source: Path) -> None:
    """Copies every given tensor into the new model. Projections that also write keys keep their own rows for those."""
    state = dict(model.state_dict())
    emit, dim = model.router.emit_dim, model.config.dim
    if more := given.weights.keys() - state.keys():
        raise FolderError(f"{source}: {CONFIG} has no place for {', '.join(sorted(more))}")
    for name, make in given.weights.items():
        tensor = make()
        place = state[name][:dim] if emit and name.endswith("output.weight") else state[name]
        if name.endswith("output.weight"):
            tensor = tensor[:dim]  # without the key rows of a model that was trained here
        if place.shape != tensor.shape:
            raise FolderError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, but {CONFIG} says {tuple(place.shape)}"
            )
        place.copy_(tensor)
    missing = [
        name for name in state.keys() - given.weights.keys() if not name.startswith("router.")
    ]
    if missing:
        raise FolderError(f"{source}: no weights for {', '.join(sorted(missing))}")
    given.done()


def _card(config: ConvertConfig, model: ModelConfig) -> str:
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [lrattnres, attention-residuals]
---
# {Path(config.source).name}, with the residual path `{model.residual}`

The weights of {Path(config.source).name}, converted by lrattnres and not trained since.
`python train.py experiment=finetune initial=DIR` trains it.
"""
