"""Ablations in whole models: what they weigh, cost and start with, who trains them, and what runs them."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lrattnres.config import BlockScale, DepthConfig, LogitScale, ModelConfig, Sources
from lrattnres.config.checks import resolve
from lrattnres.kernels.backends import KERNELS, choose_kernels
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.optim.groups import assign
from lrattnres.residual.base import path_of
from lrattnres.residual.cost import cost
from lrattnres.residual.probe import DepthProbe
from lrattnres.training.memory import estimate_memory
from tests.config.test_config import composed, faults

CPU = torch.device("cpu")
ALL = DepthConfig(
    key_norm=False,
    heads=2,
    input_queries=True,
    block_scale=BlockScale.mean,
    learned_scale=True,
    logit_scale=LogitScale.rsqrt,
)
PROJECTIONS, SCALES = "router.ablations.query_projections", "router.ablations.source_scales"


def build(config: ModelConfig, kernels: str = "reference") -> Transformer:
    return build_model(
        config,
        seed=3,
        device=CPU,
        attention=BACKENDS["sdpa"],
        dtype=torch.float32,
        kernels=KERNELS[kernels],
    )


def test_initial_weights(tiny_model_config) -> None:
    published = build(tiny_model_config()).state_dict()
    ablated = build(tiny_model_config(depth=dataclasses.replace(ALL, query_std=0.5))).state_dict()
    assert set(ablated) - set(published) == {PROJECTIONS, SCALES}
    assert ablated[PROJECTIONS].shape == (6, 4, 16) and not ablated[PROJECTIONS].any()
    assert torch.equal(ablated[SCALES], torch.ones(4))
    assert 0.3 < ablated["router.queries"].std() < 0.7 and not published["router.queries"].any()
    for name, weight in published.items():
        assert name == "router.queries" or torch.equal(weight, ablated[name]), name


def test_adam_owns_what_ablations_add(tiny_model_config) -> None:
    config = tiny_model_config(depth=ALL)
    owned = assign(build(config).named_parameters(), path_of(config).roles(config))
    assert {PROJECTIONS, SCALES, "router.queries"} < {name for name, _ in owned["adam"]}


@pytest.mark.parametrize("residual", ["attn_res", "s_lr", "p_lr", "delta"])
@pytest.mark.parametrize(
    "depth",
    [
        ALL,
        DepthConfig(embedding_source=False, learned_scale=True),
        DepthConfig(sources=Sources.states, learned_scale=True),
    ],
    ids=["all", "no embedding", "states"],
)
def test_parameters_are_those_of_the_cost_model(
    tiny_model_config, residual: str, depth: DepthConfig
) -> None:
    config = tiny_model_config(residual=residual, depth=depth)
    plain = build(tiny_model_config(residual="baseline"))
    added = sum(p.numel() for p in build(config).parameters()) - sum(
        p.numel() for p in plain.parameters()
    )
    assert cost(config).added.parameters == added


def test_compute_of_queries_that_depend_on_the_input(tiny_model_config) -> None:
    """Against torch's own count of the matrix products of a forward pass."""
    counts, costs = [], []
    for depth in (DepthConfig(key_norm=False), DepthConfig(key_norm=False, input_queries=True)):
        config = tiny_model_config(depth=depth)
        model = build(config)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(2, 12, dtype=torch.int64), None)
        # A product with one query for all tokens is a matrix-vector product, which torch counts, and one a token is not.
        counts.append(counter.get_flop_counts()["Global"])
        costs.append(cost(config))
    linear = [
        sum(flops for op, flops in count.items() if op is torch.ops.aten.mm) for count in counts
    ]
    assert (
        linear[1] - linear[0]
        == 2 * 2 * 12 * (costs[1].added.projections - costs[0].added.projections)
        == 2 * 24 * 6 * 4 * 16
    )
    assert (
        costs[1].added_percent > costs[0].added_percent
        and costs[1].training_flops > costs[0].training_flops
    )


def test_compute_follows_the_sources(tiny_model_config) -> None:
    published, bare, states, scaled = (
        cost(tiny_model_config(depth=depth))
        for depth in (
            DepthConfig(),
            DepthConfig(embedding_source=False),
            DepthConfig(sources=Sources.states),
            DepthConfig(learned_scale=True),
        )
    )
    assert published.added.mixing - bare.added.mixing == 6 * (
        16 + 4
    )  # one source less at each of 6 sites
    # The newest state is a source, and the stream that the next output is added to as well.
    stream = published.added.carried + 16
    assert states == dataclasses.replace(published, added=published.added._replace(carried=stream))
    assert (
        scaled.added.projections - published.added.projections == 7 * 16
        and scaled.added.parameters - published.added.parameters == 4
    )


STATES = DepthConfig(sources=Sources.states, embedding_source=False)


@pytest.mark.parametrize(
    ("residual", "depth"),
    [
        pytest.param("p_lr", STATES, id="states"),
        pytest.param("s_lr", ALL, id="all", marks=pytest.mark.slow),
        pytest.param("p_lr", ALL, id="all keys", marks=pytest.mark.slow),
    ],
)
def test_the_compiled_kernels_agree(tiny_model_config, residual: str, depth: DepthConfig) -> None:
    """Each read compiled by itself: logits and every gradient."""
    config = tiny_model_config(residual=residual, depth=depth, layers=2, blocks=2)
    models = [build(config, kernels) for kernels in ("reference", "compiled")]
    torch.nn.init.normal_(models[0].router.queries, std=0.5)
    for parameter in models[0].router.ablations.parameters():
        torch.nn.init.normal_(parameter, mean=1, std=0.1)
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.randint(31, (2, 12))
    for model in models:
        model(tokens, None).square().mean().backward()
    for name, parameter in models[0].named_parameters():
        torch.testing.assert_close(
            models[1].get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize("depth", [ALL, STATES], ids=["all", "states"])
def test_a_compiled_model_is_one_graph(tiny_model_config, depth: DepthConfig) -> None:
    torch._dynamo.reset()
    config = tiny_model_config(residual="p_lr", depth=depth, layers=2, blocks=2)
    models = [build(config), build(config)]
    models[1].compile(fullgraph=True)
    tokens = torch.randint(31, (2, 12))
    for model in models:
        model(tokens, None).square().mean().backward()
    for (name, parameter), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_diagnostics_of_heads_are_means_over_heads(tiny_model_config) -> None:
    model = build(tiny_model_config(residual="attn_res", depth=DepthConfig(heads=2)))
    torch.nn.init.normal_(model.router.queries)
    probe, seen = DepthProbe(model.router), []

    def observe(site, depth):
        probe(site, depth)
        seen.append(model.router.weights(depth, site))

    model(torch.randint(31, (2, 12)), None, observe)
    results = probe.results()
    assert results["sources"][6] == ["embedding", "1-2", "3-4", "5-6"]
    for site, weights in enumerate(seen[1:], start=1):
        assert weights.shape[-2] == 2
        by_head = [
            (-(head * head.log()).sum(-1)).exp().mean().item() for head in weights.unbind(-2)
        ]
        assert results["effective_sources"][site] == pytest.approx(sum(by_head) / 2, rel=1e-5)
        assert results["largest_weight"][site] == pytest.approx(
            weights.amax(-1).mean().item(), rel=1e-5
        )
        assert results["mean_weight"][site] == pytest.approx(
            weights.mean((0, 1, 2)).tolist(), rel=1e-5
        )
        assert sum(results["mean_weight"][site]) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(("residual", "sources"), [("s_lr", "states"), ("p_lr", "outputs")])
def test_memory_is_counted(residual: str, sources: str) -> None:
    settings = [
        "experiment=demo",
        "name=x",
        "model.layers=2",
        "model.dim=32",
        "model.rank=8",
        "model.blocks=2",
    ]
    settings += [f"model.residual={residual}", "model.context=64"]
    published = estimate_memory(resolve(composed(*settings))[0], 1)
    more = [
        "model.depth.input_queries=true",
        "model.depth.learned_scale=true",
        f"model.depth.sources={sources}",
    ]
    ablated = estimate_memory(resolve(composed(*settings, *more))[0], 1)
    assert ablated.weights - published.weights == 4 * (4 * 8 * 32 + 3)
    counts = 2 * 4  # Adam's step count of each of the two parameters
    assert ablated.moments - published.moments == 2 * 4 * (4 * 8 * 32 + 3) + counts
    assert ablated.activations > published.activations


def test_the_choice_of_kernels_is_explained(tiny_model_config) -> None:
    def beyond(**changes) -> list[str]:
        config = tiny_model_config(**changes)
        return path_of(config).beyond_kernels(config)

    assert beyond(depth=dataclasses.replace(ALL, query_std=0.1)) == [
        f"model.depth.{setting}"
        for setting in (
            "key_norm=false",
            "heads=2",
            "input_queries=true",
            "block_scale=mean",
            "learned_scale=true",
        )
    ]
    assert beyond(residual="baseline", depth=ALL) == []
    assert beyond(depth=DepthConfig(logit_scale=LogitScale.rsqrt, query_std=1.0)) == []
    assert choose_kernels("auto", CPU, torch.float32, compiled=False).reason == (
        "chosen by kernels=auto; not triton: this is no GPU; not compiled: the model is not compiled"
    )
    with pytest.raises(
        ValueError,
        match=r"kernels=triton: it does not compute model.depth.heads=2; or write kernels=auto",
    ):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        choose_kernels(
            "triton", device, torch.float32, compiled=False, beyond=["model.depth.heads=2"]
        )
    chosen = choose_kernels(
        "auto", torch.device("cuda"), torch.bfloat16, compiled=False, beyond=["model.depth.heads=2"]
    )
    assert chosen.name == "reference" and "model.depth.heads=2" in chosen.reason


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["model.depth.heads=3"],
            ["model.depth.heads=3", "model.rank=16 and model.dim=128", "write model.depth.heads=2"],
        ),
        (["model.depth.heads=0"], ["model.depth.heads=0", "must be between 1 and"]),
        (["model.depth.query_std=-1"], ["model.depth.query_std=-1", "at least 0"]),
        (
            ["model.depth.block_scale=half"],
            ["model.depth.block_scale=half", "one of sum, mean, sqrt"],
        ),
        (["model.depth.head=2"], ["no such key", "did you mean model.depth.heads"]),
        (
            ["model.depth.sources=states", "model.depth.block_scale=mean"],
            ["block_scale=mean", "write model.depth.block_scale=sum"],
        ),
        (
            ["model.depth.heads=2", "kernels=triton"],
            ["kernels=triton", "model.depth.heads=2", "write kernels=auto"],
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(overrides: list[str], words: list[str]) -> None:
    (fault,) = faults(*overrides)
    for word in words:
        assert word in fault


def test_what_has_no_effect_is_recorded_as_the_default() -> None:
    ablations = ["model.depth.heads=2", "model.depth.key_norm=false"]
    config, notes = resolve(
        composed("experiment=demo", "name=x", "model.residual=baseline", *ablations)
    )
    assert config.model.depth == DepthConfig()
    for setting in ablations:
        assert any(
            note.startswith(f"{setting} has no meaning for model.residual=baseline")
            for note in notes
        )
    config, notes = resolve(
        composed("experiment=demo", "name=x", "model.depth.block_scale=mean", "model.blocks=null")
    )
    assert config.model.depth == DepthConfig() and any(
        "blocks of one sub-layer" in note for note in notes
    )
    config, notes = resolve(composed("experiment=demo", "name=x", "model.depth.block_scale=mean"))
    assert config.model.depth.block_scale is BlockScale.mean and notes == []
