"""A trained model as a folder that needs no run: safetensors, and what they mean as JSON.

    DIR/
        model.safetensors          every parameter under its name in `Transformer`
        model.safetensors.sha256   its checksum
        config.json                sizes and residual path (the key "lrattnres"), and what
                                   transformers wants to read
        generation_config.json     what ends a text, and how a pretrained model is sampled
        modeling_lrattnres.py      the same model behind the interface of transformers
        README.md                  the model card
        config.yaml  identity.json  corpus.json    what a run was trained with, if there was one
        tokenizer.json …           a converted model's own tokenizer

The folder appears as a whole: it is written under a hidden name beside it first.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lrattnres.config import ConfigError, ModelConfig, parse, plain
from lrattnres.model.attention import choose_attention
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import path_of
from lrattnres.runs.files import from_json, to_json
from lrattnres.runs.metrics import MetricsFile

FORMAT = 1
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
GENERATION = "generation_config.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
CHECKSUM = "model.safetensors.sha256"  # as sha256sum writes and checks it
MODELING = Path(__file__).with_name("modeling_lrattnres.py")


class FolderError(Exception):
    """A folder that is no model, or a place where none can be written.

    `str` names it, and what to do instead.
    """


@dataclass(frozen=True)
class Exported:
    """What config.json of an exported or converted folder says.

    Attributes:
        path: The folder.
        model: The model.
        tokenizer: The tokenizer's name; None where the folder has files of its own.
        separator: The token that opens every document; None if the model has none.
        step: The training step of the weights; 0 for a converted model.
    """

    path: Path
    model: ModelConfig
    tokenizer: str | None
    separator: int | None
    step: int

    def fingerprint(self) -> str:
        """The SHA-256 of the weights, hexadecimal."""
        return _sha256(self.path / WEIGHTS)

    def check(self) -> None:
        """Compares the weights with their checksum, if there is one: transformers writes none.

        Raises:
            FolderError: They are not those that were written.
        """
        file, written = self.path / WEIGHTS, self.path / CHECKSUM
        if written.exists() and self.fingerprint() not in written.read_text(encoding="utf-8"):
            raise FolderError(
                f"{file}: damaged: its SHA-256 is not the one in {CHECKSUM}; "
                "copy or export the folder again"
            )

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copies the weights into the tensors of `state["model"]`, on any device, whole or sharded.

        Raises:
            FolderError: Names or shapes differ (all are listed), or the bytes are not those that
                were written; then no tensor is touched.
        """
        file, wanted = self.path / WEIGHTS, state["model"]
        try:
            # transformers puts the name of its own attribute first when it saves a model.
            saved = {
                name.removeprefix("model."): tensor for name, tensor in load_file(file).items()
            }
        except (OSError, SafetensorError) as error:
            raise FolderError(f"{file}: cannot be read: {error}") from error
        errors = [f"{name}: in the file, but not wanted" for name in saved.keys() - wanted.keys()]
        errors += [f"{name}: not in the file" for name in wanted.keys() - saved.keys()]
        for name in wanted.keys() & saved.keys():
            there, here = tuple(saved[name].shape), tuple(wanted[name].shape)
            if there != here:
                errors.append(f"{name}: {there} in the file, {here} wanted")
        if errors:
            listed = "\n".join(f"  - {error}" for error in sorted(errors))
            raise FolderError(f"{file} does not fit {CONFIG}:\n{listed}")
        self.check()
        with torch.no_grad():
            for name, tensor in wanted.items():
                value = saved[name]
                if isinstance(tensor, DTensor):  # every rank reads the file, and keeps its part
                    value = distribute_tensor(
                        value.to(tensor.device),
                        tensor.device_mesh,
                        tensor.placements,
                        src_data_rank=None,
                    )
                tensor.copy_(value)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_exported(path: Path) -> bool:
    """Whether a folder looks like one of these."""
    return (path / WEIGHTS).is_file() and (path / CONFIG).is_file()


def read_exported(path: Path) -> Exported:
    """What a folder says of itself.

    Raises:
        FolderError: config.json is not there or not ours, or contradicts itself where no shape of
            a weight would show it.
    """
    file = path / CONFIG
    try:
        whole = from_json(file.read_bytes())
        own = whole["lrattnres"]
        if own["format"] != FORMAT:
            raise FolderError(
                f"{file}: format {own['format']}, this version reads {FORMAT}; "
                "use the one that wrote it"
            )
        model = parse(ModelConfig, own["model"])
        told = {
            "num_attention_heads": model.heads,
            "max_position_embeddings": model.context,
            "bos_token_id": own["separator"],
        }
        if other := [key for key, value in told.items() if whole.get(key, value) != value]:
            raise FolderError(
                f'{file}: the key "lrattnres" says something else than '
                + ", ".join(f"{key}={whole[key]}" for key in other)
                + "; restore the file, or make the folder again"
            )
        return Exported(path, model, own["tokenizer"], own["separator"], own["step"])
    except ConfigError as error:
        raise FolderError(f"{file}: not a model as this version knows it:\n{error}") from error
    except FileNotFoundError:
        raise FolderError(
            f"{file}: not there; write a folder that scripts/export.py or scripts/convert.py made"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FolderError(
            f"{file}: not the description of a model of lrattnres: {error!r}"
        ) from error


def load_model(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str = "auto",
    kernels: str = "auto",
) -> Transformer:
    """The model of an exported or converted folder.

    Args:
        folder: What scripts/export.py or scripts/convert.py made.
        device: Where it computes.
        dtype: The precision of the arithmetic; weights are float32.
        attention: The attention backend, as in the settings of a run.
        kernels: The depth kernels, as in the settings of a run.

    Returns:
        The module. `model(tokens, model.mask(documents, *tokens.shape))` gives logits
        [B, T, vocabulary] for integer tokens [B, T]; documents are integers [B, T], or None where
        each row is one document.

    Raises:
        FolderError: The folder is damaged, or none of ours.
        ValueError: This attention or these kernels cannot run here.
    """
    exported, device = read_exported(Path(folder)), torch.device(device)
    model = build_model(
        exported.model,
        seed=None,
        device=device,
        attention=choose_attention(attention, device, dtype, training=False),
        dtype=dtype,
        kernels=path_of(exported.model).choose_kernels(
            exported.model, kernels, device, dtype, compiled=False
        ),
    )
    exported.load({"model": dict(model.state_dict())})
    return model


@contextmanager
def new_folder(out: str) -> Iterator[Path]:
    """A place for a folder that appears under the name `out` once everything in it is written.

    What is written goes to a hidden folder beside it first, a different one for each process, and
    nothing of it stays if writing fails.

    Args:
        out: The folder to make. It may be there if it is empty, but not be the working directory.

    Yields:
        The hidden folder.

    Raises:
        FolderError: `out` cannot be made, has something in it, or cannot be written to.
    """
    path, asked = Path(out), f"out={out}"
    made: list[Path] = []
    partial = None
    try:
        _refuse_place(path, out)
        path = path.resolve()
        for parent in reversed(path.parents):
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        # Without the name of `path`, which may be as long as names can be.
        partial = path.with_name(f".lrattnres.{uuid.uuid4().hex}.partial")
        partial.mkdir()
        yield partial
        partial.rename(path)  # takes the place of an empty folder, and of no other
        made = []
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FolderError(f"{asked}: {THERE}") from None
        reason = error.strerror or str(error)
        raise FolderError(f"{asked}: cannot be written: {reason}; write another place") from error
    except SafetensorError as error:  # it has no other class for a full disk
        raise FolderError(f"{asked}: cannot be written: {error}; write another place") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            for parent in reversed(made):
                parent.rmdir()


THERE = "there is something already; write another folder, or remove it"


def _refuse_place(path: Path, out: str) -> None:
    """Raises FolderError for what cannot become a folder, OSError where looking fails."""
    if not out:
        raise FolderError("out=: names no folder; write out=FOLDER")
    if "\0" in out:
        raise FolderError(f"out={out!r}: has a NUL character; write the name of a folder")
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise FolderError(
                f"out={out}: {place} is a link to nothing; remove it, or write another"
            )
    if path.resolve() == Path.cwd():
        raise FolderError(f"out={out}: the working directory itself; write a folder inside it")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FolderError(f"out={out}: {THERE}")


def write_model(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    card: str,
    *,
    tokenizer: str | None,
    separator: int | None,
    ends: Iterable[int],
    step: int,
    generation: Mapping[str, Any] = MappingProxyType({}),
    passed_over: Iterable[int] = (),
) -> None:
    """Writes everything of a model but the files of a run and of a tokenizer.

    Args:
        path: An empty folder.
        config: The model.
        weights: Tensors by their names in `Transformer`, on any device.
        card: The model card, Markdown.
        tokenizer: The tokenizer's name; None where the folder gets files of its own.
        separator: The token that opens a text; None if there is none.
        ends: The tokens that end a generated text.
        step: The training step of the weights; 0 for a converted model.
        generation: More for generation_config.json, as a pretrained model has it.
        passed_over: Steps of newer checkpoints that were damaged.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, path / WEIGHTS, {"format": "pt"})
    own = {"format": FORMAT, "version": version("lrattnres"), "model": plain(config)}
    own |= {"tokenizer": tokenizer, "separator": separator, "step": step}
    own |= {"passed_over": steps} if (steps := sorted(passed_over)) else {}
    several = sorted(set(ends))
    end = several if len(several) > 1 else several[0] if several else None
    tree = {
        "architectures": ["LrattnresForCausalLM"],
        "model_type": "lrattnres",
        "auto_map": {
            "AutoConfig": f"{MODELING.stem}.LrattnresConfig",
            "AutoModelForCausalLM": f"{MODELING.stem}.LrattnresForCausalLM",
        },
        "dtype": "float32",
        "vocab_size": config.vocabulary,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.tied,
        "use_cache": False,
        "bos_token_id": separator,
        "eos_token_id": end,
        "lrattnres": own,
    }
    (path / CONFIG).write_text(to_json(tree, indent=2) + "\n", encoding="utf-8")
    # safetensors makes a file that nobody else may read.
    shutil.copymode(path / CONFIG, path / WEIGHTS)
    # transformers would else make a cache, which the model does not take.
    generation = {
        name: value for name, value in generation.items() if not name.startswith("cache_")
    }
    generation |= {"bos_token_id": separator, "eos_token_id": end, "use_cache": False}
    text = to_json(generation, indent=2) + "\n"
    (path / GENERATION).write_text(text, encoding="utf-8")
    (path / CHECKSUM).write_text(f"{_sha256(path / WEIGHTS)}  {WEIGHTS}\n", encoding="utf-8")
    (path / CARD).write_text(card, encoding="utf-8")
    shutil.copyfile(MODELING, path / MODELING.name)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object in a file; empty where there is no such file.

    Raises:
        FolderError: The file cannot be read, or is no JSON object.
    """
    try:
        tree = from_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise FolderError(f"{file}: cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise FolderError(f"{file}: not a JSON object")
    return tree


def ends_in(tree: Mapping[str, Any]) -> frozenset[int]:
    """The tokens in `eos_token_id`, which may be one, several or none.

    Raises:
        FolderError: Something there is no token.
    """
    said = tree.get("eos_token_id")
    ends = said if isinstance(said, list) else [] if said is None else [said]
    if any(type(end) is not int or end < 0 for end in ends):
        raise FolderError(f"eos_token_id={said!r}: must be the number of a token, or several")
    return frozenset(ends)


def ends_of(folder: Path) -> frozenset[int]:
    """The tokens that end a text, all that config.json and generation_config.json name.

    Instruct models often have further ones in the second file only.

    Raises:
        FolderError: A file cannot be read, or names something that is no token.
    """
    try:
        return ends_in(read_json(folder / CONFIG)) | ends_in(read_json(folder / GENERATION))
    except FolderError as error:
        raise FolderError(f"{folder}: {error}") from error


def figures(folder: Path, step: int) -> dict[str, Any]:
    """What was measured at `step`, in training or later by eval.py; the later one counts."""
    metrics, later = folder / "metrics.jsonl", folder / "evaluation" / f"step_{step:06d}.json"
    records = MetricsFile.read(metrics) if metrics.exists() else []
    measured = next((record for record in records if record["step"] == step), {})
    return measured | (from_json(later.read_bytes()) if later.exists() else {})
