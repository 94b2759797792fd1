"""Llama and Qwen3 models in Hugging Face format: their config.json and their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lrattnres.config import ModelConfig, QKNorm, RopeKind, RopeScaling
from lrattnres.exchange.folder import WEIGHTS, FolderError, read_json

INDEX = f"{WEIGHTS}.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FAMILIES = {"llama": QKNorm.none, "qwen3": QKNorm.gains}
ROPE = {"default": RopeKind.none, "linear": RopeKind.linear, "llama3": RopeKind.llama3}
# Settings under which the model would be something else than ours, with the value that is possible.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "transformers_weights": None,
}


def model_of(tree: Mapping[str, Any], file: Path) -> ModelConfig:
    """The model that a config.json describes, without a residual path.

    Args:
        tree: What the file holds.
        file: Its path, for messages.

    Raises:
        FolderError: The model cannot be had here; everything that is in the way is listed.
    """
    errors = [
        f"{key}={tree[key]!r}: must be {value!r} here"
        for key, value in FIXED.items()
        if tree.get(key, value) != value
    ]
    layer_types = set(tree.get("layer_types") or ()) - {"full_attention"}
    errors += [
        f"layer_types has {name}: only full_attention is had here" for name in sorted(layer_types)
    ]
    family = tree.get("model_type")
    if family not in FAMILIES:
        errors.append(f"model_type={family!r}: must be one of {', '.join(FAMILIES)}")
    needed = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    errors += [f"{key}: not there" for key in needed if key not in tree]
    errors += [
        f"{key}={tree[key]!r}: must be a number above 0"
        for key in needed
        if key in tree and not (type(tree[key]) in (int, float) and tree[key] > 0)
    ]
    base, scaling = _rope(tree, errors)
    if errors:
        raise FolderError(
            f"{file}: no model that can be converted:\n"
            + "\n".join(f"  - {error}" for error in errors)
        )
    return ModelConfig(
        residual="",
        rank=None,
        blocks=None,
        layers=tree["num_hidden_layers"],
        dim=tree["hidden_size"],
        heads=tree["num_attention_heads"],
        mlp_width=tree["intermediate_size"],
        context=tree["max_position_embeddings"],
        vocabulary=tree["vocab_size"],
        rope_base=base,
        # Where nothing is said, Qwen3 has 32 and a width of 128, Llama as many as queries and what
        # divides the width.
        kv_heads=tree.get("num_key_value_heads", 32 if family == "qwen3" else None),
        head_dim=tree.get("head_dim") or (128 if family == "qwen3" else None),
        gains=True,
        qk_norm=FAMILIES[tree["model_type"]],
        norm_eps=tree["rms_norm_eps"],
        tied=tree.get("tie_word_embeddings", False),
        rope_scaling=scaling,
    )


def _rope(tree: Mapping[str, Any], errors: list[str]) -> tuple[float, RopeScaling]:
    """Base and scaling. Older files call them `rope_theta` and `rope_scaling`; some have both."""
    known = {
        key: given
        for key in ("rope_parameters", "rope_scaling")
        if (given := _one_rope(tree, key, errors))
    }
    if len(known) == 2 and known["rope_parameters"] != known["rope_scaling"]:
        errors.append("rope_parameters and rope_scaling: do not agree; leave out one of the two")
    given = next(iter(known.values()), {})
    given.pop("partial_rotary_factor", None)
    kind, base = given.pop("rope_type", "default"), tree.get("rope_theta")
    base = float(given.pop("rope_theta", 10_000.0 if base is None else base))
    names = {
        "factor": "factor",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "original_max_position_embeddings": "first_context",
    }
    used = {"default": (), "linear": ("factor",), "llama3": tuple(names)}
    if kind not in ROPE:
        errors.append(f"rope_type={kind!r}: must be one of {', '.join(ROPE)}")
        return base, RopeScaling()
    errors += [f"rope {kind}: {name} is not there" for name in used[kind] if name not in given]
    errors += [
        f"rope {kind}: {name}={given[name]!r} has no meaning here"
        for name in given
        if name not in used[kind]
    ]
    return base, RopeScaling(
        ROPE[kind], **{names[name]: given[name] for name in used[kind] if name in given}
    )


def _one_rope(tree: Mapping[str, Any], key: str, errors: list[str]) -> dict[str, Any]:
    """One of the two dictionaries, with what the rest of the file says; {} if it is not there."""
    given = dict(tree.get(key) or {})
    if not given:
        return given
    older = given.pop("type", None)
    if older is None:
        given.setdefault("rope_type", "default")
    outside = {"rope_theta": tree.get("rope_theta"), "rope_type": older}
    if given.get("rope_type", older) == "llama3":
        name = "original_max_position_embeddings"
        outside[name] = tree.get(name)
    for name, value in outside.items():
        if value is not None and given.setdefault(name, value) != value:
            errors.append(
                f"{name}: {given[name]!r} in {key}, and {value!r} beside it; "
                "leave out one of the two"
            )
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        errors.append(f"partial_rotary_factor={given['partial_rotary_factor']!r}: must be 1.0 here")
    return given


class Weights:
    """The tensors of a folder, read one at a time.

    One file (model.safetensors) counts before shards with an index, as in transformers.

    Attributes:
        folder: Where they lie.
        files: The file of each tensor, by the tensor's name.
        unread: The names of those that were not read yet.
        notes: What was passed over, for people.
    """

    def __init__(self, folder: Path):
        """Opens every file, and compares an index with what is there.

        Raises:
            FolderError: A file cannot be read, or the index and the shards do not agree.
        """
        self.folder, index = folder, folder / INDEX
        self.files: dict[str, str] = {}
        self.notes: list[str] = []
        single = (folder / WEIGHTS).exists()
        if not single and not index.exists():
            raise FolderError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there")
        if single and index.exists():
            self.notes.append(f"{folder}: {WEIGHTS} is read, {INDEX} and its shards are not")
        listed = {} if single else _weight_map(index)
        twice = []
        for name in [WEIGHTS] if single else sorted(set(listed.values())):
            with self._open(name) as file:
                twice += [
                    f"{key}: in {name} and {self.files[key]}"
                    for key in set(file.keys()) & self.files.keys()
                ]
                self.files |= dict.fromkeys(file.keys(), name)
        errors = twice or [
            f"{key}: in {listed.get(key, 'no file')} by the index, in {self.files.get(key, 'none')}"
            for key in sorted(listed.keys() | self.files.keys())
            if not single and listed.get(key) != self.files.get(key)
        ]
        if errors:
            shown = "\n".join(f"  - {error}" for error in errors[:10])
            more = f"\n  - and {len(errors) - 10} more" if len(errors) > 10 else ""
            raise FolderError(f"{index}: does not agree with the shards:\n{shown}{more}")
        self.unread = set(self.files)

    def __call__(self, name: str) -> Tensor:
        """A tensor in float32, on the CPU.

        Raises:
            FolderError: It is not there, cannot be read, or does not hold real numbers.
        """
        if name not in self.files:
            raise FolderError(f"{self.folder}: no tensor {name}")
        self.unread.discard(name)
        with self._open(self.files[name]) as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise FolderError(
                f"{self.folder / self.files[name]}: {name} is {tensor.dtype}, quantised perhaps; "
                "only floating-point weights are converted"
            )
        return tensor.float()

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        try:
            with safe_open(self.folder / name, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise FolderError(f"{self.folder / name}: cannot be read: {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in listed.values()
    ):
        raise FolderError(f"{index}: cannot be read: weight_map must name a file for each tensor")
    return listed


def interleaved(rows: Tensor, width: int) -> Tensor:
    """Rows [heads * width, ...], reordered: rotary pairs (j, j + width/2) become (2j, 2j + 1)."""
    return rows.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


def weights_of(
    read: Callable[[str], Tensor], config: ModelConfig
) -> dict[str, Callable[[], Tensor]]:
    """What makes each tensor that a pretrained model knows, by its name in `Transformer`.

    Args:
        read: Gives a tensor of the pretrained model by its own name.
        config: The model; `tied` says whether the head is the embedding.
    """
    width, made = config.head_width, dict[str, Callable[[], Tensor]]()
    made["embedding.weight"] = lambda: read(EMBEDDING)
    made["final.gain"] = lambda: read("model.norm.weight")
    if not config.tied:
        made["head.weight"] = lambda: read(HEAD)
    for layer in range(config.layers):
        made |= _block(f"model.layers.{layer}", 2 * layer, read, config, width)
    return made


def _block(
    block: str, site: int, read: Callable[[str], Tensor], config: ModelConfig, width: int
) -> dict[str, Callable[[], Tensor]]:
    attention, mlp = f"sublayers.{site}", f"sublayers.{site + 1}"
    made = {
        f"{attention}.gain.gain": lambda: read(f"{block}.input_layernorm.weight"),
        f"{attention}.input.weight": lambda: torch.cat(
            [
                *(
                    interleaved(read(f"{block}.self_attn.{part}_proj.weight"), width)
                    for part in "qk"
                ),
                read(f"{block}.self_attn.v_proj.weight"),
            ]
        ),
        f"{attention}.output.weight": lambda: read(f"{block}.self_attn.o_proj.weight"),
        f"{mlp}.gain.gain": lambda: read(f"{block}.post_attention_layernorm.weight"),
        f"{mlp}.input.weight": lambda: torch.cat(
            [read(f"{block}.mlp.{part}_proj.weight") for part in ("up", "gate")]
        ),
        f"{mlp}.output.weight": lambda: read(f"{block}.mlp.down_proj.weight"),
    }
    if config.qk_norm is QKNorm.gains:
        made[f"{attention}.query_gain.gain"] = lambda: interleaved(
            read(f"{block}.self_attn.q_norm.weight"), width
        )
        made[f"{attention}.key_gain.gain"] = lambda: interleaved(
            read(f"{block}.self_attn.k_norm.weight"), width
        )
    return made
