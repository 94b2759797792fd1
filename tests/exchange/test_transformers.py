"""The exported folder as transformers sees it: the same logits, padding that changes nothing,
greedy decoding by hand.
"""

import json
from pathlib import Path

import pytest
import torch

import lrattnres
from lrattnres.config import ModelConfig, QKNorm
from lrattnres.exchange.folder import write_model
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import path_of, paths

transformers = pytest.importorskip(
    "transformers", reason="the interface is that of transformers, the extra [transformers]"
)
CPU = torch.device("cpu")
SIZES = {"layers": 2, "dim": 16, "heads": 4, "mlp_width": 24, "context": 24, "vocabulary": 61}
MODELS = {
    "p_lr": ModelConfig("p_lr", 4, 2, **SIZES),
    "tied": ModelConfig(
        "delta",
        None,
        None,
        **SIZES,
        kv_heads=2,
        gains=True,
        qk_norm=QKNorm.gains,
        tied=True,
        gate=True,
    ),
}


def far(config: ModelConfig) -> Transformer:
    """A model with weights far from their start."""
    model = build_model(config, seed=0, device=CPU, attention=BACKENDS["sdpa"], dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(
            parameter, std=0.4, generator=torch.Generator().manual_seed(parameter.numel())
        )
    return model.requires_grad_(False)


def written(config: ModelConfig, path: Path) -> Path:
    model = far(config)
    write_model(
        path, config, model.state_dict(), "", tokenizer="bytes", separator=0, ends=[0], step=0
    )
    return path


def from_pretrained(path: Path, **words):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code=True, **words
    ).eval()


@pytest.fixture(scope="module", autouse=True)
def _modules(tmp_path_factory):
    """transformers copies the code of a folder into a cache of its own; not the person's."""
    module = transformers.dynamic_module_utils
    before, module.HF_MODULES_CACHE = (
        module.HF_MODULES_CACHE,
        str(tmp_path_factory.mktemp("modules")),
    )
    yield
    module.HF_MODULES_CACHE = before


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return from_pretrained(written(MODELS["p_lr"], tmp_path_factory.mktemp("p_lr")))


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_same_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    folder = written(MODELS[name], tmp_path / "out")
    tokens = torch.randint(61, (2, 11))
    ours, theirs = far(MODELS[name]), from_pretrained(folder)
    expected = ours(tokens, ours.mask(None, 2, 11))
    result = theirs(tokens, labels=tokens)
    torch.testing.assert_close(result.logits, expected, atol=1e-5, rtol=1e-5)
    loss = -expected[:, :-1].double().log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
    assert result.loss.item() == pytest.approx(loss.item(), abs=1e-5)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
    theirs.save_pretrained(tmp_path / "saved")
    again = lrattnres.load(tmp_path / "saved")
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.state_dict().values(), ours.state_dict().values(), strict=True)
    )
    torch.testing.assert_close(
        from_pretrained(tmp_path / "saved")(tokens).logits, expected, atol=1e-5, rtol=1e-5
    )
    half = from_pretrained(folder, dtype=torch.bfloat16)(tokens).logits
    assert (
        half.dtype == torch.bfloat16
        and (half.float() - expected).abs().max() < 0.2 * expected.abs().max()
    )


@pytest.mark.parametrize("residual", list(paths()))
def test_every_path_is_the_same_model_and_writes_the_same(tmp_path: Path, residual: str) -> None:
    """Logits, and what is written with a cache, against those of the whole pass of ours."""
    given = ModelConfig(residual, 4, 2, **SIZES)
    config, _ = path_of(given).settled(given)
    folder = written(config, tmp_path)
    tokens = torch.randint(1, 61, (2, 11))
    ours, theirs = far(config), from_pretrained(folder)
    expected = ours(tokens, ours.mask(None, 2, 11))
    torch.testing.assert_close(theirs(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    found = theirs.generate(tokens[:1], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert found[0, 11:].tolist() == greedily(theirs, tokens[0], 4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, side: str) -> None:
    rows = [torch.randint(1, 61, (length,)) for length in (3, 9, 6)]
    padded = torch.stack(
        [
            torch.nn.functional.pad(row, (9 - len(row), 0) if side == "left" else (0, 9 - len(row)))
            for row in rows
        ]
    )
    result = model(padded, attention_mask=(padded > 0).long()).logits
    for row, whole, tokens in zip(rows, result, padded, strict=True):
        torch.testing.assert_close(
            whole[tokens > 0], model(row[None]).logits[0], atol=1e-5, rtol=1e-5
        )


def greedily(model, row: torch.Tensor, count: int) -> list[int]:
    for _ in range(count):
        row = torch.cat([row, model(row[None]).logits[0, -1].argmax()[None]])
    return row[-count:].tolist()


def test_generate_writes_what_greedy_decoding_writes(model) -> None:
    rows = [torch.randint(1, 61, (length,)) for length in (3, 7)]
    padded = torch.stack([torch.nn.functional.pad(row, (7 - len(row), 0)) for row in rows])
    found = model.generate(
        padded,
        attention_mask=(padded > 0).long(),
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
    )
    for row, tokens in zip(rows, found, strict=True):
        assert tokens[-5:].tolist() == greedily(model, row, 5)
    ends = greedily(model, rows[1], 5)[1]
    stopped = model.generate(
        rows[1][None], max_new_tokens=5, do_sample=False, eos_token_id=ends, pad_token_id=0
    )
    assert (
        stopped[0, 7:].tolist()
        == greedily(model, rows[1], 5)[: greedily(model, rows[1], 5).index(ends) + 1]
    )


def test_what_would_be_wrong_is_refused(model) -> None:
    tokens = torch.randint(1, 61, (1, 6))
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(tokens, max_new_tokens=2, use_cache=True, do_sample=False)
    with pytest.raises(ValueError, match="25 tokens: the model's context is 24"):
        model(torch.ones(1, 25, dtype=torch.int64))
    with pytest.raises(ValueError, match="side by side"):
        model(tokens, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]]))
    with pytest.raises(ValueError, match="one by one"):
        model(tokens, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_a_model_from_a_configuration_alone_is_drawn_and_a_damaged_folder_is_not(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    folder = written(MODELS["p_lr"], tmp_path)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    drawn = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    ours = build_model(
        MODELS["p_lr"], seed=0, device=CPU, attention=BACKENDS["sdpa"], dtype=torch.float32
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(drawn.model.state_dict().values(), ours.state_dict().values(), strict=True)
    )
    weights = load_file(folder / "model.safetensors")
    weights.pop("head.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for model\.head\.weight"):
        from_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 0
