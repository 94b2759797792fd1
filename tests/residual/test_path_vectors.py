"""Recorded results of public code for each residual path: logits, losses and every gradient, made in float64."""

import json

import numpy as np
import pytest
import torch

from lrattnres.config import ModelConfig, parse
from lrattnres.model.head import token_losses
from lrattnres.model.transformer import Transformer
from tests.paths import ROOT

FOLDER = ROOT / "tests" / "vectors" / "paths"
BODY = {"embed": "embedding.weight", "head": "head.weight"}
for layer in range(4):
    for site, part, matrix in ((2 * layer, "attn", "qkv"), (2 * layer + 1, "mlp", "up_gate")):
        BODY[f"layers/{layer}/{matrix}"] = f"sublayers.{site}.input.weight"
        BODY[f"layers/{layer}/{part}_out"] = f"sublayers.{site}.output.weight"
# A recorded file -> the settings that it was made with, as ours.
SETTINGS = {
    "denseformer_d1_p1": {"residual": "denseformer", "path": {"dilation": 1, "period": 1}},
    "hc_static_n2": {"residual": "hc", "path": {"n": 2, "dynamic": False}},
    "hc_dynamic_n2": {"residual": "hc", "path": {"n": 2, "dynamic": True}},
    "mhc_n2": {"residual": "mhc", "path": {"n": 2}},
    "frac_dynamic_m2": {"residual": "frac", "path": {"m": 2}},
    "laurel_rw": {"residual": "laurel", "path": {"parts": "rw"}},
    "laurel_lr_r4": {"residual": "laurel", "rank": 4, "path": {"parts": "lr"}},
    "postnorm": {"residual": "postnorm"},
    "highway_scalar": {"residual": "highway", "path": {"gate": "scalar"}},
    "altup_n2": {"residual": "altup", "path": {"n": 2}},
    "mudd_narrow": {
        "residual": "mudd",
        "path": {"expand_last": False, "round64": False, "norms": False},
    },
    "mudd_norms": {"residual": "mudd"},
    "resformer": {"residual": "resformer"},
    "svformer": {"residual": "svformer"},
    "lambdas": {"residual": "lambdas"},
    "lambdas_unet": {
        "residual": "lambdas",
        "path": {"resid": False, "first": False, "unet": True},
    },
    "dca_v3": {"residual": "dca"},
    "grn_v1": {"residual": "dca", "path": {"version": 1, "ways": 1}},
    "lime": {"residual": "lime"},
    "attnres_scalars": {"residual": "attn_res", "depth": {"mixing": "scalars"}},
    "attnres_sigmoid": {"residual": "attn_res", "depth": {"mixing": "sigmoid"}},
    "attnres_heads4_full_norm": {
        "residual": "attn_res",
        "depth": {"heads": 4, "norm_scope": "full"},
    },
}
# Parameters whose recorded names are methods of a residual path.
RENAMED = {"mudd": {"hidden": "w1", "weights": "w2"}}


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_logits_losses_and_gradients(name: str) -> None:
    with np.load(FOLDER / f"{name}.npz") as file:
        recorded = dict(file)
    sizes = {"layers": 4, "dim": 32, "heads": 4, "mlp_width": 48, "context": 24, "vocabulary": 97}
    given = {"rank": None, "blocks": None} | SETTINGS[name]
    model = Transformer(parse(ModelConfig, given | sizes))
    parameters = dict(model.named_parameters())
    renamed = RENAMED.get(given["residual"], {})
    names = {}
    for own in of_path(recorded):
        first, *rest = own.split("/")
        names[".".join(["router", renamed.get(first, first), *rest])] = f"path/{own}"
    names |= {ours: theirs for theirs, ours in BODY.items()}
    assert names.keys() == parameters.keys()
    for ours, theirs in names.items():
        rows = len(parameters[ours])  # without those that have no use
        parameters[ours].data.copy_(torch.from_numpy(recorded[f"param/{theirs}"][:rows]))

    logits = model(torch.from_numpy(recorded["idx"]), model.mask(None, 2, 24))
    sums = token_losses(logits, torch.from_numpy(recorded["targets"])).sums()
    loss, penalty = sums.cross_entropy / sums.tokens, sums.squared_logsumexp / sums.tokens
    (loss + 1e-5 * penalty).backward()

    assert np.abs(logits.detach().numpy() - recorded["logits"]).max() < 5e-5
    assert loss.item() == pytest.approx(float(recorded["ce"]), rel=1e-6)
    assert penalty.item() == pytest.approx(float(recorded["z"]), rel=1e-6)
    for ours, theirs in names.items():
        found, whole = parameters[ours].grad.numpy(), recorded[f"grad/{theirs}"]
        truth, unused = whole[: len(found)], whole[len(found) :]
        assert not unused.any() and (given["residual"] == "svformer" or not len(unused))
        assert np.abs(found - truth).max() <= 5e-5 * np.abs(truth).max(), ours
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values()])
    assert norm.item() == pytest.approx(float(recorded["grad_norm"]), rel=1e-5)


def of_path(recorded: dict[str, np.ndarray]) -> list[str]:
    """The names of the path's own parameters."""
    prefix = "param/path/"
    return [name.removeprefix(prefix) for name in recorded if name.startswith(prefix)]


def test_options_are_those_of_the_file() -> None:
    for name, settings in SETTINGS.items():
        with np.load(FOLDER / f"{name}.npz") as file:
            options = json.loads(str(file["options"]))
        print(name, options, settings)
