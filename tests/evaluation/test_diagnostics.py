"""Streamed diagnostics against the direct computation over all tokens at once."""

import pytest
import torch

from lrattnres.evaluation.diagnostics import diagnose
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import build_model
from lrattnres.report.plots import weight_grid
from lrattnres.residual.plan import DepthPlan
from lrattnres.residual.probe import DepthProbe, source_name
from tests.residual.making import ATTENTION


@pytest.mark.parametrize("residual", ATTENTION)
def test_streamed_equals_direct(tiny_model_config, residual: str) -> None:
    config = tiny_model_config(residual=residual)
    model = build_model(
        config, seed=0, device=torch.device("cpu"), attention=BACKENDS["sdpa"], dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    windows = torch.randint(1, 31, (5, 13))
    windows[4, 9:] = -100
    found = diagnose(model, iter([windows[:2], windows[2:]]), 0, documents=True)

    weights: dict[int, list[torch.Tensor]] = {}
    norms: dict[int, list[torch.Tensor]] = {}

    def collect(site, depth):
        if model.router.weights(depth, site) is not None:
            weights.setdefault(site, []).append(
                model.router.weights(depth, site).double().flatten(0, -2)
            )
        norms.setdefault(site, []).append(
            model.router.hidden(depth, site).double().norm(dim=-1).flatten()
        )

    for rows in (windows[:4, :-1], windows[4:, :8]):
        with torch.no_grad():
            model(rows, model.mask(torch.zeros_like(rows), *rows.shape), observe=collect)
    assert found["tokens"] == 4 * 12 + 8
    assert (
        found["mean_weight"][0]
        is found["effective_sources"][0]
        is found["largest_weight"][0]
        is None
    )
    for site, parts in weights.items():
        alpha = torch.cat(parts)
        assert len(alpha) == 56
        entropy = -(alpha * alpha.clamp(min=1e-300).log()).sum(-1)
        assert found["mean_weight"][site] == pytest.approx(alpha.mean(0).tolist(), rel=1e-5)
        assert found["effective_sources"][site] == pytest.approx(
            entropy.exp().mean().item(), rel=1e-5
        )
        assert found["largest_weight"][site] == pytest.approx(
            alpha.amax(-1).mean().item(), rel=1e-5
        )
        assert found["newest_weight"][site] == pytest.approx(alpha[:, -1].mean().item(), rel=1e-5)
        assert found["hidden_norm"][site] == pytest.approx(
            torch.cat(norms[site]).mean().item(), rel=1e-5
        )
        assert len(found["sources"][site]) == alpha.shape[1]
    assert found["sources"][1] == ["embedding", "1"]


def test_the_plain_stream_has_norms_and_no_weights(tiny_model_config) -> None:
    config = tiny_model_config(residual="baseline", blocks=None)
    model = build_model(
        config, seed=0, device=torch.device("cpu"), attention=BACKENDS["sdpa"], dtype=torch.float32
    )
    found = diagnose(model, [torch.randint(1, 31, (2, 13))], 0, documents=False)
    assert found["mean_weight"] == found["effective_sources"] == [None] * 7
    assert all(norm > 0 for norm in found["hidden_norm"])


def test_sources_have_names_of_their_own() -> None:
    plans = (
        DepthPlan(4, 2),
        DepthPlan(4, 2, states=True),
        DepthPlan(4, 2, embedding=False, null=True),
    )
    names = [[source_name(source) for source in plan.sources(3)] for plan in plans]
    assert names == [["embedding", "1-2", "3"], ["embedding", "0-2", "0-3"], ["null", "1-2", "3"]]
    weights, used = weight_grid(
        {"sources": [["embedding"], ["null", "0-1"]], "mean_weight": [None, [0.25, 0.75]]}
    )
    assert used.tolist() == [1, 2] and weights[1, used].tolist() == [0.75, 0.25]


def test_the_probe_of_uniform_weights_counts_all_sources(tiny_model_config) -> None:
    config = tiny_model_config(residual="attn_res", blocks=None)
    model = build_model(
        config, seed=0, device=torch.device("cpu"), attention=BACKENDS["sdpa"], dtype=torch.float32
    )
    probe = DepthProbe(model.router)
    tokens = torch.randint(31, (2, 12))
    model(tokens, model.mask(None, 2, 12), observe=probe)
    found = probe.results()
    assert found["effective_sources"][1:] == pytest.approx([2, 3, 4, 5, 6, 7], rel=1e-6)
    assert found["largest_weight"][1:] == pytest.approx([1 / n for n in range(2, 8)], rel=1e-6)
