"""A trained model as a folder that needs no run: weights as safetensors, and what they mean as JSON.

    DIR/
        model.safetensors          every parameter under its name in `Transformer`
        model.safetensors.sha256   its checksum
        config.json                sizes and residual path (the key "lrattnres"), and what transformers wants to read
        generation_config.json  modeling_lrattnres.py      the same model behind transformers' interface
        README.md                  the model card
        config.yaml  identity.json  corpus.json    of an exported run, or converted from one: what it was trained with
        tokenizer.json …           of a converted model: its own tokenizer

The folder appears as a whole: it is written under a hidden name beside it first.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lrattnres.config import ConfigError, ModelConfig, parse, plain
from lrattnres.kernels.backends import choose_kernels
from lrattnres.model.attention import choose_attention
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import path_of
from lrattnres.runs.files import from_json, to_json
from lrattnres.runs.metrics import MetricsFile

FORMAT = 1
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
CHECKSUM = "model.safetensors.sha256"  # as sha256sum writes and checks it
MODELING = Path(__file__).with_name("modeling_lrattnres.py")


class FolderError(Exception):
    """A folder that is no model, or a place where none can be written; `str` names it and what to do instead."""


@dataclass(frozen=True)
class Exported:
    """What config.json says. tokenizer: its name, None where the folder has files of its own; separator: the end-of-text
    token, which opens every document; step: of the run, 0 for a model that was converted.
    """

    path: Path
    model: ModelConfig
    tokenizer: str | None
    separator: int | None
    step: int

    def fingerprint(self) -> str:
        """Of the weights."""
        return _sha256(self.path / WEIGHTS)

    def check(self) -> None:
        """Raises FolderError for weights that are not those that were written."""
        file, written = (
            self.path / WEIGHTS,
            self.path / CHECKSUM,
        )  # which is not there if transformers saved the folder
        if written.exists() and self.fingerprint() not in written.read_text(encoding="utf-8"):
            raise FolderError(
                f"{file}: damaged: its SHA-256 is not the one in {CHECKSUM}; copy or export the folder again"
            )

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copies the weights into the tensors of `state["model"]`.

        Raises FolderError that lists every name and shape that differs, or for bytes that are not those that were
        written; then no tensor is touched.
        """
        file, wanted = self.path / WEIGHTS, state["model"]
        try:
            # transformers puts the name of its own attribute before those of ours when it saves a model.
            saved = {
                name.removeprefix("model."): tensor for name, tensor in load_file(file).items()
            }
        except (OSError, SafetensorError) as fault:
            raise FolderError(f"{file}: cannot be read: {fault}") from fault
        faults = [f"{name}: in the file, but not wanted" for name in saved.keys() - wanted.keys()]
        faults += [f"{name}: not in the file" for name in wanted.keys() - saved.keys()]
        for name in wanted.keys() & saved.keys():
            if saved[name].shape != wanted[name].shape:
                faults.append(
                    f"{name}: {tuple(saved[name].shape)} in the file, {tuple(wanted[name].shape)} wanted"
                )
        if faults:
            raise FolderError(
                f"{file} does not fit {CONFIG}:\n"
                + "\n".join(f"  - {fault}" for fault in sorted(faults))
            )
        self.check()
        with torch.no_grad():
            for name, tensor in wanted.items():
                if isinstance(tensor, DTensor):  # every rank reads the file, and keeps its part
                    whole = saved[name].to(tensor.device)
                    tensor.copy_(
                        distribute_tensor(
                            whole, tensor.device_mesh, tensor.placements, src_data_rank=None
                        )
                    )
                else:
                    tensor.copy_(saved[name])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_exported(path: Path) -> bool:
    """Whether a folder looks like one of these."""
    return (path / WEIGHTS).is_file() and (path / CONFIG).is_file()


def read_exported(path: Path) -> Exported:
    """What a folder says of itself. Raises FolderError that names the file and everything wrong in it."""
    file = path / CONFIG
    try:
        tree = from_json(file.read_bytes())["lrattnres"]
        if tree["format"] != FORMAT:
            raise FolderError(
                f"{file}: format {tree['format']}, this version reads {FORMAT}; use the one that wrote it"
            )
        model = parse(ModelConfig, tree["model"])
        return Exported(path, model, tree["tokenizer"], tree["separator"], tree["step"])
    except ConfigError as fault:
        raise FolderError(f"{file}: not a model as this version knows it:\n{fault}") from fault
    except FileNotFoundError:
        raise FolderError(
            f"{file}: not there; write a folder that scripts/export.py or scripts/convert.py made"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise FolderError(
            f"{file}: not the description of a model of lrattnres: {fault!r}"
        ) from fault


def load_model(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str = "auto",
    kernels: str = "auto",
) -> Transformer:
    """The model in `folder`: weights are float32, `dtype` is the precision of the arithmetic.

    `model(tokens, model.mask(documents, *tokens.shape))` gives logits [B, T, vocabulary] for tokens [B, T]; documents
    are integers [B, T], or None where each row is one document. Raises FolderError for a folder that is damaged or none
    of ours, ValueError for an attention or kernels that cannot run here.
    """
    exported, device = read_exported(Path(folder)), torch.device(device)
    model = build_model(
        exported.model,
        seed=None,
        device=device,
        attention=choose_attention(attention, device, dtype, training=False),
        dtype=dtype,
        kernels=choose_kernels(
            kernels,
            device,
            dtype,
            compiled=False,
            beyond=path_of(exported.model).beyond_kernels(exported.model),
        ),
    )
    exported.load({"model": dict(model.state_dict())})
    return model


@contextmanager
def new_folder(out: str) -> Iterator[Path]:
    """A hidden folder that gets the name `out` once everything in it is written; nothing stays if that fails.

    Raises FolderError for a place that has something in it.
    """
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FolderError(
            f"out={out}: there is something already; write another folder, or remove it"
        )
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if path.exists():
            path.rmdir()
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_model(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    card: str,
    *,
    tokenizer: str | None,
    separator: int | None,
    end: int | list[int] | None,
    step: int,
) -> None:
    """Everything but the files of a run or of a tokenizer. weights: by their names in `Transformer`; separator: the token
    that opens a text; end: what ends one when text is generated.
    """
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()},
        path / WEIGHTS,
        {"format": "pt"},
    )
    own = {"format": FORMAT, "version": version("lrattnres"), "model": plain(config)}
    own |= {"tokenizer": tokenizer, "separator": separator, "step": step}
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
    shutil.copymode(
        path / CONFIG, path / WEIGHTS
    )  # safetensors makes a file that nobody else may read
    # transformers would else make a cache, which the model does not take.
    generation = {"bos_token_id": separator, "eos_token_id": end, "use_cache": False}
    (path / "generation_config.json").write_text(
        to_json(generation, indent=2) + "\n", encoding="utf-8"
    )
    (path / CHECKSUM).write_text(f"{_sha256(path / WEIGHTS)}  {WEIGHTS}\n", encoding="utf-8")
    (path / CARD).write_text(card, encoding="utf-8")
    shutil.copyfile(MODELING, path / MODELING.name)


def figures(folder: Path, step: int) -> dict[str, Any]:
    """What the run measured at `step`, in training and afterwards by eval.py, which counts where both did."""
    metrics, later = folder / "metrics.jsonl", folder / "evaluation" / f"step_{step:06d}.json"
    records = MetricsFile.read(metrics) if metrics.exists() else []
    measured = next((record for record in records if record["step"] == step), {})
    return measured | (from_json(later.read_bytes()) if later.exists() else {})
