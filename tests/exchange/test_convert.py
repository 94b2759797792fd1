"""Converted models compute what transformers computes, begin as what they were, and nothing is
converted by halves.
"""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import lrattnres
from lrattnres.config import ConfigError
from lrattnres.config.commands import ConvertConfig
from lrattnres.entry import settings
from lrattnres.exchange.convert import convert
from lrattnres.exchange.folder import FolderError

transformers = pytest.importorskip(
    "transformers", reason="the models that are converted are made by transformers"
)

SIZE = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen3": ("Qwen3", {"head_dim": 12, "bos_token_id": None, "eos_token_id": [5, 6]}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Path, torch.Tensor, torch.Tensor]]:
    """Of each model: its folder, in shards, with tokens and the logits that transformers computes
    for them.
    """
    made = {}
    for name, (family, changes) in MODELS.items():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(
            getattr(transformers, f"{family}Config")(**SIZE | changes)
        )
        for parameter in model.parameters():  # gains too: all ones would hide where they belong
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
        folder, tokens = tmp_path_factory.mktemp(name), torch.randint(67, (2, 40))
        model.save_pretrained(folder, max_shard_size="1GB" if name == "llama_linear" else "20KB")
        with torch.no_grad():
            made[name] = folder, tokens, model.eval()(tokens).logits
    return made


def converted(source: Path, out: Path, *words: str) -> torch.nn.Module:
    convert(settings(ConvertConfig, [f"source={source}", f"out={out}", *words]))
    return lrattnres.load(out)


@torch.no_grad()
def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, model.mask(None, *tokens.shape))


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_baseline_has_the_logits_of_transformers(
    models, tmp_path: Path, name: str
) -> None:
    folder, tokens, expected = models[name]
    found = logits(converted(folder, tmp_path / "out", "model.residual=baseline"), tokens)
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        ["delta", "model.blocks=3"],
        ["attn_res"],
        ["s_lr", "model.rank=4"],
        ["p_lr", "model.rank=4", "model.blocks=2"],
        ["s_lr", "model.rank=4", "model.routing=add"],
    ],
)
def test_any_variant_begins_as_the_model_and_with_the_gate_whatever_the_queries(
    models, tmp_path, words
) -> None:
    folder, tokens, expected = models["qwen3_tied"]
    words = [f"model.residual={words[0]}", *words[1:]]
    model = converted(folder, tmp_path / "bare", *words)
    # Zero queries mix all sources alike, which is the stream but for a factor, and every reader
    # normalises.
    torch.testing.assert_close(logits(model, tokens), expected, atol=2e-3, rtol=1e-3)
    gated = converted(folder, tmp_path / "gated", *words, "model.gate=true")
    for router in (model.router, gated.router):
        router.load_state_dict(
            {"queries": torch.randn(6, router.rank, generator=torch.Generator().manual_seed(1))},
            strict=False,
        )
    torch.testing.assert_close(logits(gated, tokens), expected, atol=1e-4, rtol=1e-4)
    assert (logits(model, tokens) - expected).abs().max() > 0.1
    torch.nn.init.ones_(gated.router.gates)  # an open gate is the published read
    torch.testing.assert_close(logits(gated, tokens), logits(model, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        ["hc"],
        ["mudd"],
        ["lambdas", "model.path.unet=true"],
        ["resformer", "model.path.start=neutral"],
        ["lime", "model.path.start=neutral"],
        ["dca", "model.path.version=2"],
        ["laurel", "model.rank=4"],
        ["attn_res", "model.blocks=[1,2,3]"],
    ],
    ids=" ".join,
)
def test_any_path_that_starts_as_the_baseline_begins_as_the_model(
    models, tmp_path, words, capsys
) -> None:
    folder, tokens, expected = models["qwen3_tied"]
    model = converted(folder, tmp_path / "out", f"model.residual={words[0]}", *words[1:])
    bits = type(model.router).begins(model.config) == "bits"
    torch.testing.assert_close(
        logits(model, tokens), expected, atol=1e-4 if bits else 2e-3, rtol=1e-3
    )
    assert "does not begin" not in capsys.readouterr().out


def test_a_path_that_starts_otherwise_is_said_and_one_without_a_place_is_refused(
    models, tmp_path, capsys
) -> None:
    folder, tokens, expected = models["qwen3_tied"]
    model = converted(folder, tmp_path / "out", "model.residual=highway")
    assert "model.residual=highway does not begin as the given model" in capsys.readouterr().out
    assert (logits(model, tokens) - expected).abs().max() > 0.1
    with pytest.raises(ConfigError, match="svformer: has no place for the values of every block"):
        converted(folder, tmp_path / "other", "model.residual=svformer")


def test_a_gate_learns_and_opens_the_queries(models, tmp_path: Path) -> None:
    folder, tokens, _ = models["llama"]
    model = converted(folder, tmp_path / "out", "model.residual=delta", "model.gate=true")
    for opened in (0.0, 0.5):
        torch.nn.init.constant_(model.router.gates, opened)
        model.zero_grad()
        model(tokens, model.mask(None, *tokens.shape)).logsumexp(-1).mean().backward()
        assert (model.router.gates.grad != 0).all()
        assert bool((model.router.queries.grad != 0).any()) == (opened > 0)


def test_a_model_that_was_converted_is_converted_again(models, tmp_path: Path) -> None:
    folder, tokens, expected = models["llama"]
    converted(folder, tmp_path / "first", "model.residual=p_lr", "model.rank=4", "context=48")
    second = converted(tmp_path / "first", tmp_path / "second", "model.residual=baseline")
    assert second.config.context == 48
    torch.testing.assert_close(logits(second, tokens), expected, atol=1e-4, rtol=1e-4)


def changed(folder: Path, to: Path, **changes) -> Path:
    copy = shutil.copytree(folder, to)
    tree = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(tree | changes))
    return copy


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "must be one of llama, qwen3"),
        ({"attention_bias": True}, "attention_bias=True: must be False here"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope_type='yarn'",
        ),
        ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, "factor=4.0 has no meaning"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_hidden_layers": 2}, "no place in the model: model.layers.2."),
        ({"num_hidden_layers": 4}, "no tensor model.layers.3."),
        ({"intermediate_size": 48}, "config.json says"),
    ],
)
def test_what_cannot_be_converted_is_named_and_leaves_nothing(
    models, tmp_path: Path, changes, words: str
) -> None:
    source = changed(models["llama"][0], tmp_path / "source", **changes)
    with pytest.raises(FolderError) as refusal:
        converted(source, tmp_path / "out", "model.residual=delta")
    assert words in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("residual", "name"), [("delta", "queries"), ("denseformer", "alpha.2"), ("hc", "static_beta")]
)
def test_trained_reads_are_not_thrown_away(models, tmp_path: Path, residual, name) -> None:
    routed = converted(models["llama"][0], tmp_path / "first", f"model.residual={residual}")
    converted(tmp_path / "first", tmp_path / "again", "model.residual=attn_res")
    routed.router.get_parameter(name).data.view(-1)[1] = 0.1
    weights = {name: tensor.contiguous() for name, tensor in routed.state_dict().items()}
    safetensors.torch.save_file(weights, tmp_path / "first" / "model.safetensors", {"format": "pt"})
    with pytest.raises(FolderError, match="its reads were trained"):
        converted(tmp_path / "first", tmp_path / "second", "model.residual=attn_res")


@pytest.mark.parametrize("residual", ["postnorm", "lime"])
def test_weights_are_not_taken_from_a_path_that_is_no_plain_transformer(
    models, tmp_path: Path, residual: str
) -> None:
    """Even if there is nothing in it that could be trained."""
    converted(models["llama"][0], tmp_path / "first", f"model.residual={residual}")
    with pytest.raises(FolderError, match=f"from=.*model.residual={residual} does not compute"):
        converted(tmp_path / "first", tmp_path / "second", "model.residual=baseline")


def test_a_damaged_model_is_not_converted_again(models, tmp_path: Path) -> None:
    converted(models["llama"][0], tmp_path / "first", "model.residual=baseline")
    tree = json.loads((tmp_path / "first" / "config.json").read_text())
    fewer = shutil.copytree(tmp_path / "first", tmp_path / "fewer")
    tree["lrattnres"]["model"]["layers"] = 2
    (fewer / "config.json").write_text(json.dumps(tree))
    with pytest.raises(FolderError, match=r"has no place for sublayers\.4\."):
        converted(fewer, tmp_path / "second", "model.residual=delta")
    weights = tmp_path / "first" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(FolderError, match="damaged: its SHA-256"):
        converted(tmp_path / "first", tmp_path / "second", "model.residual=delta")
    assert not (tmp_path / "second").exists()


def test_older_files_name_the_rotary_embedding_otherwise(models, tmp_path: Path) -> None:
    folder, tokens, expected = models["llama"]
    old = {
        key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")
    } | {"type": "llama3"}
    source = changed(
        folder, tmp_path / "source", rope_parameters=None, rope_theta=1e4, rope_scaling=old
    )
    found = logits(converted(source, tmp_path / "out", "model.residual=baseline"), tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_residual_path_that_cannot_be_is_refused(models, tmp_path: Path) -> None:
    folder = models["llama"][0]
    for words, said in {
        ("model.residual=slr",): "must be one of",
        ("model.residual=baseline", "model.blocks=2"): "has no meaning for model.residual=baseline",
        ("model.residual=s_lr",): "needs a key width",
        ("model.residual=delta", "model.blocks=7"): r"between 1 and 2\*model.layers=6",
        ("model.residual=delta", "context=65"): "between 1 and 64",
        ("model.residual=delta", "model.rank=3"): "model.rank=3: has no meaning",
    }.items():
        with pytest.raises(ConfigError, match=said):
            converted(folder, tmp_path / "out", *words)
