"""scripts/inspect_text.py: its α are those of the queries and keys themselves, and its name
disturbs nobody.
"""

import io
import json
import math

import pytest
import torch

from lrattnres.config import ConfigError, DepthConfig, EvalConfig
from lrattnres.config.commands import InspectConfig
from lrattnres.data.packing import segments
from lrattnres.entry import settings
from lrattnres.evaluation.load import load_run
from lrattnres.evaluation.reads import depth_reads
from lrattnres.report import inspection
from lrattnres.report.inspection import inspect_run
from lrattnres.report.reads import visible
from tests.model.test_decoder import SEPARATOR, drawn, make
from tests.paths import ROOT
from tests.programs import run


def keys_of(model, tokens) -> list[list[torch.Tensor]]:
    """Per site, the keys [T, r] of its sources in float64, from the sub-layers' outputs alone (p_lr
    in blocks).
    """
    outputs, dim = [], model.config.dim
    hooks = [
        layer.register_forward_hook(lambda module, given, output: outputs.append(output[0][0]))
        for layer in model.sublayers
    ]
    model(tokens, model.mask(segments(tokens, SEPARATOR), *tokens.shape))
    for hook in hooks:
        hook.remove()
    emitted = [output[:, dim:].double() for output in outputs]
    normal = [key / (key.square().mean(-1, keepdim=True) + 2.0**-23).sqrt() for key in emitted]
    first = (model.embedding(tokens)[0] @ model.router.embedding_key.weight.T).double()
    groups = [model.router.plan.sources(site)[1:] for site in model.router.plan.sites]
    return [
        [first, *(sum(normal[i - 1] for i in members) for members in group)] for group in groups
    ]


def test_alpha_against_queries_and_keys(tiny_model_config) -> None:
    model = make(tiny_model_config(residual="p_lr", rank=4, blocks=3, context=24))
    tokens = drawn(1, 24)
    found = depth_reads(model, tokens[0], SEPARATOR, documents=True)
    assert list(found) == list(range(2, 8))
    for site, keys in enumerate(keys_of(model, tokens)[1:], start=2):
        query = model.router.queries[site - 2].double().tolist()
        for token in range(24):
            rows = [key[token].tolist() for key in keys]
            norms = [math.sqrt(sum(x * x for x in row) / 4 + 2.0**-23) for row in rows]
            scores = [
                math.exp(sum(q * x for q, x in zip(query, row, strict=True)) / n)
                for row, n in zip(rows, norms, strict=True)
            ]
            expected = [score / sum(scores) for score in scores]
            assert found[site][token].tolist() == pytest.approx(expected, abs=1e-5)


def test_several_heads_are_read_as_their_mean(tiny_model_config) -> None:
    model = make(tiny_model_config(depth=DepthConfig(heads=2), context=24))
    tokens, seen = drawn(1, 24), []
    found = depth_reads(model, tokens[0], SEPARATOR, documents=True)
    mask = model.mask(segments(tokens, SEPARATOR), *tokens.shape)
    model(tokens, mask, lambda site, depth: seen.append(model.router.weights(depth, site)))
    assert seen[3].shape == (1, 24, 2, 3) and found[4].shape == (24, 3)
    torch.testing.assert_close(found[4], (seen[3][0, :, 0] + seen[3][0, :, 1]) / 2)


def test_the_coefficients_of_every_token_give_h_back(tiny_model_config) -> None:
    """Of a path that does not attend: Σ c·o of the sub-layers' own outputs is what a site reads."""
    model = make(tiny_model_config(residual="denseformer", blocks=None, context=24))
    with torch.no_grad():
        for weights in model.router.parameters():
            weights.normal_()
    tokens, outputs, hidden = drawn(1, 24), [], []
    for layer in model.sublayers:
        layer.register_forward_hook(lambda module, given, output: outputs.append(output[0][0]))
    with torch.no_grad():
        mask = model.mask(segments(tokens, SEPARATOR), *tokens.shape)
        model(tokens, mask, lambda site, state: hidden.append(model.router.hidden(state, site)[0]))
        written = torch.stack([model.embedding(tokens)[0], *outputs], dim=1)
    found = depth_reads(model, tokens[0], SEPARATOR, documents=True)
    assert list(found) == list(range(1, 8)) and found[5].min() < 0
    for site, rows in found.items():
        mixed = torch.einsum("ti,tid->td", rows, written[:, :site])
        torch.testing.assert_close(mixed, hidden[site - 1], rtol=1e-5, atol=1e-5)


def look(trained, *words: str, standard_input: str = ""):
    return inspect_run(
        settings(InspectConfig, [f"run={trained}", *words]), io.StringIO(standard_input)
    )


def test_what_is_written(trained, tmp_path) -> None:
    text = "the $router$\r\n\té"
    out = look(trained, "text=-", f"out={tmp_path}/look", standard_input=text)
    record = json.loads((out / "reads.json").read_text())
    run = load_run(EvalConfig(str(trained)), print)
    tokens = torch.tensor([256, *text.encode()])
    assert [entry["token"] for entry in record["tokens"]] == tokens.tolist()
    assert [entry["text"] for entry in record["tokens"][-3:]] == ["\t", "\\xc3", "\\xa9"]
    found = depth_reads(run.model, tokens, 256, documents=True)
    assert [(site["site"], site["feeds"]) for site in record["sites"]] == [
        (2, "mlp"),
        (3, "attention"),
        (4, "mlp"),
        (5, "head"),
    ]
    assert record["sites"][-1]["sources"] == ["embedding", "1-2", "3-4"]
    for site in record["sites"]:
        torch.testing.assert_close(
            torch.tensor(site["weights"]), found[site["site"]], rtol=0, atol=1e-6
        )
    assert all(
        (out / name).read_bytes().startswith(b"\x89PNG") for name in ("tokens.png", "sites.png")
    )
    file = tmp_path / "text.txt"
    file.write_bytes(text.encode())
    again = look(trained, f"file={file}", "sites=2,head", "first=3", "shown=5")
    assert (
        again == trained / "inspection" and json.loads((again / "reads.json").read_text()) == record
    )


@pytest.mark.parametrize("residual", ["baseline", "denseformer"])
def test_a_path_that_does_not_attend_shows_coefficients(
    trained, tmp_path, capsys, monkeypatch, tiny_model_config, residual: str
) -> None:
    run = load_run(EvalConfig(str(trained)), print)
    size = {name: getattr(run.model.config, name) for name in ("vocabulary", "context")}
    model = make(tiny_model_config(residual=residual, blocks=None, **size))
    monkeypatch.setattr(inspection, "load_run", lambda *given: run._replace(model=model))
    out = look(trained, "text=the router", "sites=1,3,head", f"out={tmp_path}")
    assert "coefficients of 11 tokens at 7 sites" in capsys.readouterr().out
    sites = json.loads((out / "reads.json").read_text())["sites"]
    assert [site["sources"] for site in sites[:3]] == [["embedding"], ["embedding", "1"],
                                                       ["embedding", "1", "2"]]  # fmt: skip
    assert all(set(site) == {"site", "feeds", "sources", "coefficients"} for site in sites)
    rows = [(site["site"], row) for site in sites for row in site["coefficients"]]
    assert all(len(row) == site for site, row in rows)
    assert residual != "baseline" or all(set(row) == {1} for _, row in rows)
    assert all(
        (out / name).read_bytes().startswith(b"\x89PNG") for name in ("tokens.png", "sites.png")
    )
    with pytest.raises(ConfigError, match="'0' must be 1 to 6"):
        look(trained, "text=a", "sites=0")
    model.router.linear = False
    with pytest.raises(ConfigError, match="no sum of the outputs with one number each"):
        look(trained, "text=a")


def test_refusals(trained, tmp_path) -> None:
    for words, message in (
        ([], "write one of them"),
        (["text=a", "file=b"], "write one of them"),
        ([f"file={tmp_path}/none"], "cannot be read"),
        (["text=a", "first=2"], "write 0 to 1"),
        (["text=a", "sites=2,7"], "'7' must be 2 to 4"),
        (["text=" + "x" * 48], "more than the context of 48"),
        (["text=\udcff"], "not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=message):
            look(trained, *words)


def test_labels_show_what_cannot_be_seen() -> None:
    assert visible(" a\n\x07") == "␣a↵\\u0007" and visible("漢") in ("漢", "\\u6f22")
    assert visible("x" * 40).endswith("…")


def test_the_command_as_it_is_written(trained, tmp_path) -> None:
    words = [
        "scripts/inspect_text.py",
        f"run={trained}",
        "text=the router reads",
        f"out={tmp_path}/look",
        "threads=1",
    ]
    found = run(*words, cwd=ROOT, timeout=120)
    assert found.returncode == 0 and "α of 17 tokens at 4 sites" in found.stdout, found.stderr
    assert (tmp_path / "look" / "reads.json").exists()
