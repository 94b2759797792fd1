"""From a pretrained model, or one trained here, to the same weights with another residual path.

Every residual path begins as the model that it was made of, but for the epsilon of the norms: its
queries are zero, so that a read is the mean of its sources; together they are the residual stream;
and whoever reads normalises. `model.gate` makes that exact, and independent of the queries.

The norm gains of a pretrained model stay parameters of their own. Folded into the projections
behind them they would cost nothing, but a tied embedding has no place for the last one, and an
optimizer that orthogonalises or decays the product does not move the model that was pretrained.

Several files of a pretrained model may state the same fact. Where they disagree, what transformers
does with them is done, and said; or the model is refused, by the names of the files.
"""

from __future__ import annotations

import dataclasses
import re
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
    GENERATION,
    TOKENIZER,
    FolderError,
    ends_in,
    ends_of,
    new_folder,
    read_exported,
    read_json,
    write_model,
)
from lrattnres.exchange.pretrained import EMBEDDING, HEAD, Weights, model_of, weights_of
from lrattnres.exchange.tokenizer import read_tokenizer
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import path_of, paths

# What a model that was trained here was trained with: it is measured on the same held-out tokens.
RUN = ("config.yaml", "identity.json", "corpus.json")
ADAPTER = "adapter_config.json"


class Given(NamedTuple):
    """The model that is converted.

    Attributes:
        model: What it is made of, without a residual path.
        weights: What makes each tensor, by its name in `Transformer`.
        words: What `write_model` wants to know of its tokenizer.
        notes: What was decided between files that disagree, for people.
        done: Called when all tensors have been made, to look for what was left.
        write: Puts the files of its tokenizer into a folder.
    """

    model: ModelConfig
    weights: Mapping[str, Callable[[], Tensor]]
    words: dict[str, Any]
    notes: list[str]
    done: Callable[[], None]
    write: Callable[[Path], None]


def convert(config: ConvertConfig, say: Callable[[str], None] = print) -> Path:
    """Writes the converted model to `config.out` (see folder.py).

    Args:
        config: The settings of the command.
        say: Gets a line for each fact that was decided between files that disagree.

    Returns:
        The folder.

    Raises:
        FolderError: Something cannot be read or written.
        ConfigError: The residual path cannot be.
    """
    source = Path(config.source)
    given = _given(source)
    for note in given.notes:
        say(note)
    target = _target(config, given.model)
    if path_of(target).begins(target) == "other":
        say(
            f"model.residual={target.residual} does not begin as the given model: its loss is "
            "another one until it is trained"
        )
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
        given.write(path)
    return Path(config.out)


def _given(source: Path) -> Given:
    file = source / CONFIG
    if not file.exists():
        raise FolderError(
            f"from={source}: {CONFIG} is not there; write the folder of a model "
            "(scripts/export.py makes one of a run)"
        )
    tree = read_json(file)
    if (source / ADAPTER).exists():
        raise FolderError(
            f"from={source}: {ADAPTER}: an adapter changes these weights, and is not converted; "
            "merge it into the model first"
        )
    read = Weights(source)
    return _given_ours(source, read) if "lrattnres" in tree else _given_pretrained(tree, read)


def _trained(model: ModelConfig, weights: Mapping[str, Callable[[], Tensor]]) -> bool:
    """Whether the residual path is no longer as it started, so that it cannot be left out.

    What starts at random cannot be compared; whatever is trained moves something that does not.
    """
    for name, role in path_of(model).roles(model).items():
        pattern = re.compile(re.escape(f"router.{name}").replace(r"\*", r"\d+"))
        for own in filter(pattern.fullmatch, weights):
            value = weights[own]()
            if callable(role.start):
                starts = [
                    role.start(value.shape, torch.Generator().manual_seed(seed)) for seed in (0, 1)
                ]
            else:
                starts = [torch.full_like(value, role.start)] * 2
            if torch.equal(*starts) and not torch.equal(value, starts[0].to(value.dtype)):
                return True
    return False


def _given_ours(source: Path, read: Weights) -> Given:
    exported = read_exported(source)
    names = {name.removeprefix("model."): name for name in read.files}
    path = path_of(exported.model)
    if path.begins(exported.model) == "other":
        raise FolderError(
            f"from={source}: model.residual={exported.model.residual} does not compute what a "
            "plain transformer with these weights does, so another residual path would make "
            "another model of them; write a folder with model.residual=baseline"
        )
    if _trained(exported.model, {own: partial(read, there) for own, there in names.items()}):
        raise FolderError(
            f"from={source}: its reads were trained, and a new residual path begins without them, "
            "as another model; write a folder with model.residual=baseline, or one not trained "
            "since it was converted"
        )
    exported.check()
    weights = {
        name: partial(read, there)
        for name, there in names.items()
        if not name.startswith("router.")
    }
    words = {
        "tokenizer": exported.tokenizer,
        "separator": exported.separator,
        "ends": ends_of(source),
        "generation": read_json(source / GENERATION),
    }

    def write(path: Path) -> None:
        for name in (*TOKENIZER, *RUN):
            if (source / name).exists():
                shutil.copyfile(source / name, path / name)

    return Given(exported.model, weights, words, read.notes, lambda: None, write)


def _given_pretrained(tree: dict[str, Any], read: Weights) -> Given:
    source = read.folder
    model, notes = model_of(tree, source / CONFIG), list(read.notes)
    if model.tied and HEAD in read.files and not torch.equal(read(HEAD), read(EMBEDDING)):
        model = dataclasses.replace(model, tied=False)
        notes.append(
            f"{source}: {CONFIG} has tie_word_embeddings=true, but {HEAD} has values of its own; "
            "they are kept"
        )
    tokenizer = read_tokenizer(source, notes)
    if tokenizer.largest >= tree["vocab_size"]:
        raise FolderError(
            f"{source}: its tokenizer has token {tokenizer.largest}, and {CONFIG} vocab_size="
            f"{tree['vocab_size']}; take the tokenizer that belongs to the model"
        )
    generation = read_json(source / GENERATION)
    ends = ends_of(source) | tokenizer.ends
    known = {CONFIG: ends_in(tree), GENERATION: ends_in(generation)}
    if len({ends, *(said for said in known.values() if said)}) > 1:
        notes.append(f"{source}: a text ends with any of the tokens {sorted(ends)}")
    # A model without a token of its own for the beginning was trained with the end of the text
    # before.
    firsts = [tokenizer.first, tree.get("bos_token_id"), generation.get("bos_token_id")]
    firsts = [first for first in firsts if first is not None]
    if len(set(firsts)) > 1:
        notes.append(f"{source}: of the tokens that begin a text, {firsts}, the first one counts")
    last = tree.get("eos_token_id")
    last = last[0] if isinstance(last, list) and last else last
    firsts += [last] if isinstance(last, int) else sorted(ends)[:1]
    words = {
        "tokenizer": None,
        "separator": firsts[0] if firsts else None,
        "ends": ends,
        "generation": generation,
    }

    def done() -> None:
        left = sorted(name for name in read.unread if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise FolderError(
                f"{source}: tensors that have no place in the model: {', '.join(left)}"
            )

    return Given(model, weights_of(read, model), words, notes, done, tokenizer.write)


def _target(config: ConvertConfig, given: ModelConfig) -> ModelConfig:
    variant, errors = config.model, []
    chosen = {
        name: getattr(variant, name) for name in ("residual", "rank", "blocks", "routing", "gate")
    }
    target = dataclasses.replace(given, **chosen, depth=DepthConfig(), path=variant.path)
    if variant.residual not in paths():
        errors.append(f"model.residual={variant.residual}: must be one of {', '.join(paths())}")
    else:
        path = path_of(target)
        errors += path.errors(target)
        if any(path.value_site(target, site) != site for site in range(0, 2 * target.layers, 2)):
            errors.append(
                f"model.residual={variant.residual}: has no place for the values of every block, "
                "so it cannot begin as the given model; write another path"
            )
        errors += [
            f"model.{name}={value}: has no meaning for model.residual={variant.residual}; "
            "leave it out"
            for name, value in chosen.items()
            if name not in (*path.uses, "residual") and value not in (None, False)
        ]
    if config.context is not None and not 1 <= config.context <= given.context:
        errors.append(
            f"context={config.context}: must be between 1 and {given.context}, "
            "what the model was trained for"
        )
    if errors:
        raise ConfigError(errors)
    target = path_of(target).settled(target)[0]
    return dataclasses.replace(target, context=config.context or given.context)


@torch.no_grad()
def _fill(model: Transformer, given: Given, source: Path) -> None:
    """Copies every given tensor; projections that also write keys keep their own rows for those."""
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
            there, here = tuple(tensor.shape), tuple(place.shape)
            raise FolderError(f"{source}: {name} has shape {there}, but {CONFIG} says {here}")
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
