"""Llama and Qwen3 models in Hugging Face format: what their config.json means here, and their weights by our names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lrattnres.config import ModelConfig, QKNorm, RopeKind, RopeScaling
from lrattnres.exchange.folder import WEIGHTS, FolderError

INDEX = f"{WEIGHTS}.index.json"
FAMILIES = {"llama": QKNorm.none, "qwen3": QKNorm.gains}
ROPE = {"default": RopeKind.none, "linear": RopeKind.linear, "llama3": RopeKind.llama3}
# Settings under which the model would compute something else than ours does, with the value that is possible.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def model_of(tree: Mapping[str, Any], file: Path) -> ModelConfig:
    """The model that a config.json describes, as `baseline`. Raises FolderError with everything that cannot be had here."""
    faults = [
        f"{key}={tree[key]!r}: must be {value!r} here"
        for key, value in FIXED.items()
        if tree.get(key, value) != value
    ]
    layer_types = set(tree.get("layer_types") or ()) - {"full_attention"}
    faults += [
        f"layer_types has {name}: only full_attention is had here" for name in sorted(layer_types)
    ]
    family = tree.get("model_type")
    if family not in FAMILIES:
        faults.append(f"model_type={family!r}: must be one of {', '.join(FAMILIES)}")
    needed = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "rms_norm_eps",
    )
    faults += [
        f"{key}: not there" for key in (*needed, "max_position_embeddings") if key not in tree
    ]
    base, scaling = _rope(tree, faults)
    if faults:
        raise FolderError(
            f"{file}: no model that can be converted:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
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
        kv_heads=tree.get("num_key_value_heads"),
        # Qwen3 has 128 where nothing is said, Llama what divides the width.
        head_dim=tree.get("head_dim") or (128 if family == "qwen3" else None),
        gains=True,
        qk_norm=FAMILIES[tree["model_type"]],
        norm_eps=tree["rms_norm_eps"],
        tied=tree.get("tie_word_embeddings", False),
        rope_scaling=scaling,
    )


def _rope(tree: Mapping[str, Any], faults: list[str]) -> tuple[float, RopeScaling]:
    """Base and scaling, from `rope_parameters`, or from `rope_theta` and `rope_scaling` as older files have them."""
    given = dict(tree.get("rope_parameters") or tree.get("rope_scaling") or {})
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    base = float(given.pop("rope_theta", tree.get("rope_theta", 10_000.0)))
    names = {
        "factor": "factor",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "original_max_position_embeddings": "first_context",
    }
    used = {"default": (), "linear": ("factor",), "llama3": tuple(names)}
    if kind not in ROPE:
        faults.append(f"rope_type={kind!r}: must be one of {', '.join(ROPE)}")
        return base, RopeScaling()
    faults += [f"rope {kind}: {name} is not there" for name in used[kind] if name not in given]
    faults += [
        f"rope {kind}: {name}={given[name]!r} has no meaning here"
        for name in given
        if name not in used[kind]
    ]
    return base, RopeScaling(
        ROPE[kind], **{names[name]: given[name] for name in used[kind] if name in given}
    )


class Weights:
    """The tensors of a folder, in one file or in shards with an index, read one at a time. Keeps track of what was read."""

    def __init__(self, folder: Path):
        self.folder, index = folder, folder / INDEX
        try:
            if index.exists():
                self.files: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            else:
                with safe_open(folder / WEIGHTS, framework="pt") as file:
                    self.files = dict.fromkeys(file.keys(), WEIGHTS)
        except (OSError, ValueError, KeyError, SafetensorError) as fault:
            raise FolderError(
                f"{folder}: neither {WEIGHTS} nor {INDEX} can be read: {fault}"
            ) from fault
        self.unread = set(self.files)

    def __call__(self, name: str) -> Tensor:
        """Float32. Raises FolderError for what is not there."""
        if name not in self.files:
            raise FolderError(f"{self.folder}: no tensor {name}")
        self.unread.discard(name)
        try:
            with safe_open(self.folder / self.files[name], framework="pt") as file:
                return file.get_tensor(name).float()
        except (OSError, SafetensorError) as fault:
            raise FolderError(
                f"{self.folder / self.files[name]}: cannot be read: {fault}"
            ) from fault


def interleaved(rows: Tensor, width: int) -> Tensor:
    """Rows [heads * width, ...] whose rotary pairs are (j, j + width/2), as rows whose pairs are (2j, 2j + 1)."""
    return rows.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


def weights_of(
    read: Callable[[str], Tensor], config: ModelConfig
) -> dict[str, Callable[[], Tensor]]:
    """Name in `Transformer` -> what makes that tensor, of everything a pretrained model knows."""
    width, made = config.head_width, dict[str, Callable[[], Tensor]]()
    made["embedding.weight"] = lambda: read("model.embed_tokens.weight")
    made["final.gain"] = lambda: read("model.norm.weight")
    if not config.tied:
        made["head.weight"] = lambda: read("lm_head.weight")
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
