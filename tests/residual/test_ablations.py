"""Every ablation against its equations written out naively in float64, and the identities that hold for it."""

import itertools
import math
import re

import pytest
import torch
from torch import Tensor

from lrattnres.config import (
    BlockScale,
    DepthConfig,
    LogitScale,
    Mixing,
    NormScope,
    Routing,
    Sources,
)
from lrattnres.kernels.backends import KERNELS
from lrattnres.kernels.reference import Scoring, depth_attention, depth_weights
from lrattnres.residual.base import ResidualPath, path_of, pattern_of
from tests.residual.making import config_of, make_together
from tests.residual.making import make as make_path
from tests.residual.making import run as reads
from tests.residual.test_router import norm

DIM, RANK, SUBLAYERS = 12, 6, 8

SINGLE = [
    {"key_norm": False},
    {"logit_scale": LogitScale.rsqrt},
    {"heads": 3},
    {"input_queries": True},
    {"block_scale": BlockScale.mean},
    {"block_scale": BlockScale.sqrt},
    {"learned_scale": True},
    {"null_source": True},
    {"embedding_source": False},
    {"sources": Sources.states},
    {"mixing": Mixing.sigmoid},
    {"mixing": Mixing.scalars},
    {"window": 1},
    {"window": 2},
]
TOGETHER = [
    {"norm_scope": NormScope.full, "heads": 3},
    {"window": 2, "learned_scale": True, "null_source": True, "heads": 2},
    {"window": 1, "sources": Sources.states, "embedding_source": False, "learned_scale": True},
    {"mixing": Mixing.sigmoid, "heads": 2, "norm_scope": NormScope.full, "window": 1},
    {"mixing": Mixing.scalars, "window": 2, "block_scale": BlockScale.mean},
    {
        "key_norm": False,
        "heads": 2,
        "logit_scale": LogitScale.rsqrt,
        "input_queries": True,
        "learned_scale": True,
    },
    {
        "heads": 3,
        "input_queries": True,
        "embedding_source": False,
        "block_scale": BlockScale.sqrt,
        "learned_scale": True,
    },
    {"null_source": True, "heads": 2, "learned_scale": True, "block_scale": BlockScale.mean},
    {
        "sources": Sources.states,
        "embedding_source": False,
        "learned_scale": True,
        "heads": 2,
        "key_norm": False,
    },
]


def make(
    name: str, blocks: int | None, options: dict, *, routing: Routing | None = None
) -> ResidualPath:
    path = make_path(name, blocks, dim=DIM, rank=RANK, routing=routing, **options)
    for parameter in path.parameters():
        torch.nn.init.normal_(parameter)
    return path


def written(router: ResidualPath) -> list[Tensor]:
    """The embedding, and what each sub-layer writes."""
    widths = [DIM] + [DIM + router.emit_dim] * SUBLAYERS
    return [torch.randn(2, 5, width, dtype=torch.float64, requires_grad=True) for width in widths]


def naive_reads(
    name: str, routing: Routing, blocks, options: dict, router: ResidualPath, outputs
) -> list[Tensor]:
    """RMSNorm(h) of every site, straight from docs/ablations.md; nothing of the router but its parameters is used."""
    chosen, parameters = DepthConfig(**options), dict(router.named_parameters())
    if isinstance(blocks, list):
        count, ends = len(blocks), [0, *itertools.accumulate(blocks)]
    else:
        count = blocks or SUBLAYERS
        ends = [0] + [math.ceil(SUBLAYERS * j / count) for j in range(1, count + 1)]
    values = [output[..., :DIM] for output in outputs]
    rank = RANK if name in ("s_lr", "p_lr") else DIM
    maybe = norm if chosen.key_norm else lambda x: x
    emitted: list = [None] * len(outputs)
    if name == "p_lr":
        emitted = [None, *(output[..., DIM:] for output in outputs[1:])]
        if chosen.embedding_source or chosen.sources is Sources.states:
            emitted[0] = outputs[0] @ parameters["embedding_key.weight"].T
    scales = parameters.get("ablations.source_scales", torch.ones(count + 1, dtype=torch.float64))
    if not chosen.embedding_source:
        scales = torch.cat([torch.ones(1, dtype=torch.float64), scales])
    found = [norm(values[0] * scales[0])]
    for site in range(1, SUBLAYERS + 1):
        sources = []  # (value, key)
        for number, (start, end) in enumerate(itertools.pairwise([-1, *ends])):
            members = list(
                range(0 if chosen.sources is Sources.states else start + 1, min(end, site) + 1)
            )
            if start >= site or (number == 0 and not chosen.embedding_source):
                continue
            divisor = {
                BlockScale.sum: 1,
                BlockScale.mean: len(members),
                BlockScale.sqrt: len(members) ** 0.5,
            }[chosen.block_scale]
            value = scales[number] * sum(values[i] for i in members) / divisor
            key = value[..., DIM - rank :]
            if name == "p_lr":
                alone = members == [0] and chosen.sources is Sources.outputs
                key = emitted[0] if alone else sum(maybe(emitted[i]) for i in members)
            sources.append((value, key))
        if chosen.window:
            kept = chosen.window + (1 if chosen.embedding_source else 0)
            first = sources[:1] if chosen.embedding_source else []
            sources = first + sources[-chosen.window :] if len(sources) > kept else sources
        if chosen.null_source:
            sources.insert(0, tuple(torch.zeros_like(part) for part in sources[-1]))
        if chosen.mixing is Mixing.scalars:
            weights = parameters[f"weight.{site}"]
            mixture = sum(w * value for w, (value, _) in zip(weights, sources, strict=True))
            stream = sum(values[: site + 1]) if routing is Routing.add else 0
            found.append(norm(stream + mixture))
            continue
        query = parameters["queries"][site - 1]
        if chosen.input_queries:
            query = (
                query + norm(sources[-1][0]) @ parameters["ablations.query_projections"][site - 1].T
            )
        width, columns = rank // chosen.heads, DIM // chosen.heads
        mixtures = []
        for head in range(chosen.heads):
            part = slice(head * width, (head + 1) * width)
            factor = width**-0.5 if chosen.logit_scale is LogitScale.rsqrt else 1
            keys = [maybe(key[..., part]) for _, key in sources]
            if chosen.norm_scope is NormScope.full:
                keys = [maybe(key)[..., part] for _, key in sources]
            logits = torch.stack([factor * (query[..., part] * key).sum(-1) for key in keys], -1)
            weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
            if chosen.mixing is Mixing.sigmoid:
                weights = 1 / (1 + (-logits).exp())
            cut = slice(head * columns, (head + 1) * columns)
            mixtures.append(
                sum(
                    weights[..., i : i + 1] * value[..., cut]
                    for i, (value, _) in enumerate(sources)
                )
            )
        mixture = torch.cat(mixtures, -1)
        found.append(norm(sum(values[: site + 1]) + mixture if routing is Routing.add else mixture))
    return found


CASES = [("s_lr", "replace"), ("p_lr", "replace"), ("attn_res", "replace"), ("p_lr", "add")]


@pytest.mark.parametrize("options", [*SINGLE, *TOGETHER], ids=lambda options: "-".join(options))
@pytest.mark.parametrize("blocks", [None, 2, 3, [1, 4, 1, 2]], ids=str)
@pytest.mark.parametrize(("name", "routing"), CASES)
def test_reads_and_gradients_follow_the_definitions(
    name: str, routing: str, blocks, options: dict
) -> None:
    if options.get("mixing") is Mixing.scalars and name != "attn_res":
        return  # refused: without keys there is one such path
    router = make(name, blocks, options, routing=Routing[routing])
    outputs = written(router)
    found, truth = (
        reads(router, outputs),
        naive_reads(name, Routing[routing], blocks, options, router, outputs),
    )
    wanted = [*outputs, *router.parameters()]
    probes = [torch.randn_like(read) for read in truth]
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    losses = [
        sum((read * probe).sum() for read, probe in zip(each, probes, strict=True))
        for each in (found, truth)
    ]
    gradients = [torch.autograd.grad(loss, wanted, retain_graph=True) for loss in losses]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def same_start(router: ResidualPath, other: ResidualPath) -> None:
    """`other` with the parameters that both have; the others as training starts them."""
    for name, parameter in other.named_parameters():
        known = dict(router.named_parameters()).get(name)
        parameter.data.copy_(
            known
            if known is not None
            else torch.full_like(parameter, float(name.endswith("source_scales")))
        )


@pytest.mark.parametrize("name", ["attn_res", "s_lr", "p_lr", "delta"])
@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"learned_scale": True}, 3),
        ({"learned_scale": True}, None),
        ({"block_scale": BlockScale.mean}, SUBLAYERS),
        ({"block_scale": BlockScale.sqrt}, SUBLAYERS),
    ],
    ids=str,
)
def test_what_starts_as_the_published_method_is_it_to_the_last_bit(
    name: str, options: dict, blocks: int | None
) -> None:
    published, ablated = make(name, blocks, {}), make(name, blocks, options)
    same_start(published, ablated)
    beyond = [type(path).beyond_kernels(path.config) for path in (ablated, published)]
    assert beyond[0] and not beyond[1]
    outputs = written(published)
    assert all(
        torch.equal(a, b)
        for a, b in zip(reads(ablated, outputs), reads(published, outputs), strict=True)
    )


@pytest.mark.parametrize("name", ["attn_res", "s_lr", "p_lr", "delta"])
def test_queries_that_depend_on_the_input_start_as_those_that_do_not(name: str) -> None:
    """Up to the order of a sum: one query a token is no matrix-vector product."""
    published, ablated = make(name, 3, {}), make(name, 3, {"input_queries": True})
    same_start(published, ablated)
    outputs = written(published)
    for one, other in zip(reads(ablated, outputs), reads(published, outputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_one_head_is_the_plain_read_to_the_last_bit() -> None:
    """Also where the single head has a dimension of its own."""
    values, query = list(torch.randn(5, 4, DIM).unbind()), torch.randn(RANK)
    keys = [value[:, -RANK:] for value in values]
    plain = depth_attention(query, keys, values)
    assert torch.equal(depth_attention(query, keys, values, Scoring(heads=1)), plain)
    several = depth_weights(
        query[:2].repeat(3), [key[:, :2].repeat(1, 3) for key in keys], Scoring(heads=3)
    )
    one = depth_weights(query[:2], [key[:, :2] for key in keys])
    assert several.shape == (4, 3, 5)
    torch.testing.assert_close(
        several, one.unsqueeze(1).expand(4, 3, 5)
    )  # equal slices: every head reads alike


@pytest.mark.parametrize(
    "options", [{"logit_scale": LogitScale.rsqrt}, {"key_norm": False}, {"heads": 3}], ids=str
)
@pytest.mark.parametrize("name", ["attn_res", "s_lr", "p_lr", "delta"])
def test_scores_change_nothing_while_queries_are_zero(name: str, options: dict) -> None:
    published, ablated = make(name, 3, {}), make(name, 3, options)
    torch.nn.init.zeros_(published.queries)
    ablated.load_state_dict(published.state_dict())
    outputs = written(published)
    for one, other in zip(reads(ablated, outputs), reads(published, outputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_keys_of_norm_one_need_no_normalisation() -> None:
    values, query = list(torch.randn(5, 4, DIM).double().unbind()), torch.randn(RANK).double()
    keys = [norm(torch.randn(4, RANK).double()) for _ in values]
    # ε = 2⁻²³ is all that normalising them once more changes.
    torch.testing.assert_close(
        depth_attention(query, keys, values, Scoring(normalize=False)),
        depth_attention(query, keys, values),
        rtol=1e-6,
        atol=1e-6,
    )


def test_the_factor_of_the_logits_is_a_factor_of_the_queries() -> None:
    published, scaled = make("s_lr", 3, {}), make("s_lr", 3, {"logit_scale": LogitScale.rsqrt})
    scaled.load_state_dict(published.state_dict())
    scaled.queries.data.mul_(RANK**0.5)
    outputs = written(published)
    for one, other in zip(reads(scaled, outputs), reads(published, outputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("routing", list(Routing))
def test_the_newest_state_alone_is_the_plain_residual_stream(routing: Routing) -> None:
    """One block and no embedding: the only source is o_0 + Σ o_i. Added to the stream it doubles it, and RMSNorm undoes that."""
    states = make(
        "s_lr", 1, {"sources": Sources.states, "embedding_source": False}, routing=routing
    )
    baseline = make_path("baseline", dim=DIM)
    outputs = written(states)
    for one, other in zip(reads(states, outputs), reads(baseline, outputs), strict=True):
        if routing is Routing.replace:
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_without_the_embedding_the_second_site_reads_the_first_output() -> None:
    router = make("s_lr", None, {"embedding_source": False})
    outputs = written(router)
    assert torch.equal(
        reads(router, outputs)[1], torch.nn.functional.rms_norm(outputs[1], (DIM,), eps=2.0**-23)
    )
    depth = router.begin(outputs[0])
    for site in range(SUBLAYERS):
        depth = router.write(depth, site, outputs[site + 1])
        assert (
            router.weights(depth, site + 1).shape[-1]
            == len(router.plan.sources(site + 1))
            == site + 1
        )


def test_what_is_observed_is_what_is_read() -> None:
    """`hidden` and `weights`, which diagnostics use, against the reads; weights of every head sum to one."""
    for options, name in itertools.product([*SINGLE, *TOGETHER], ["s_lr", "p_lr", "delta"]):
        router = make(name, 3, options)
        outputs = written(router)
        depth = router.begin(outputs[0])
        for site in range(SUBLAYERS):
            torch.testing.assert_close(
                norm(router.hidden(depth, site)), router.read(depth, site).x, rtol=1e-9, atol=1e-10
            )
            depth = router.write(depth, site, outputs[site + 1])
            weights = router.weights(depth, site + 1)
            if not router.attends:
                assert weights is None
                continue
            shape = (2, 5, router.heads) if router.heads > 1 else (2, 5)
            assert weights.shape == (*shape, len(router.plan.sources(site + 1)))
            torch.testing.assert_close(weights.sum(-1), torch.ones(shape).double())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 4}, "heads=4: .*rank=6"),
        ({"sources": Sources.states, "block_scale": BlockScale.mean}, "block_scale=mean"),
        ({"mixing": Mixing.scalars}, "scalars: .* write model.residual=attn_res"),
        ({"mixing": Mixing.sigmoid, "null_source": True}, "null_source=true: .*mixing=softmax"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options: dict, words: str) -> None:
    config = config_of("s_lr", 3, dim=DIM, rank=RANK, **options)
    (error,) = path_of(config).errors(config)
    assert re.search(words, error)


@pytest.mark.parametrize(
    "options",
    [{"heads": 2}, {"query_std": 0.1}, {"input_queries": True}, {"key_norm": False}],
    ids=lambda options: "-".join(options),
)
def test_scalars_have_no_queries_and_keys(options: dict) -> None:
    config = config_of("attn_res", 3, dim=DIM, mixing=Mixing.scalars, **options)
    (error,) = path_of(config).errors(config)
    assert f"model.depth.{next(iter(options))}=" in error and "no queries and keys" in error


@pytest.mark.parametrize(
    ("blocks", "options", "note"),
    [
        (3, {"window": 3}, "model.depth.window=3 has no meaning for 3 depth blocks"),
        (3, {"norm_scope": NormScope.full}, "norm_scope=full has no meaning for one head"),
        ([3, 3, 2], {}, "model.blocks=[3,3,2]: recorded as 3, the same depth blocks"),
    ],
)
def test_what_changes_nothing_is_recorded_as_the_default(blocks, options: dict, note: str) -> None:
    config = config_of("s_lr", blocks, dim=DIM, rank=RANK, **options)
    settled, notes = path_of(config).settled(config)
    assert [note in said for said in notes] == [True]
    assert settled == config_of("s_lr", 3, dim=DIM, rank=RANK)


def test_a_window_keeps_what_it_reads_and_no_more() -> None:
    router = make("attn_res", None, {"window": 2})
    outputs = written(router)
    state = router.begin(outputs[0])
    for site, output in enumerate(outputs[1:], start=1):
        state = router.write(state, site - 1, output)
        assert len(state.sources) == min(site + 1, 3)
        assert router.plan.sources(site) == (range(1), *map(one, range(max(1, site - 1), site + 1)))


def one(output: int) -> range:
    return range(output, output + 1)


def test_mixings_start_as_they_say() -> None:
    """scalars: the mean of all sources, as a softmax of zero queries; sigmoid: half of their sum."""
    plain = make_path("attn_res", 3, dim=DIM)
    torch.nn.init.zeros_(plain.queries)
    outputs = written(plain)
    for mixing in (Mixing.scalars, Mixing.sigmoid):
        config = config_of("attn_res", 3, dim=DIM, mixing=mixing)
        path = path_of(config).build(config, KERNELS["reference"]).double()
        for name, parameter in path.named_parameters():
            start = path.roles(config)[pattern_of(name)].start
            whole = start(parameter.shape, torch.Generator()) if callable(start) else start
            parameter.data.copy_(torch.as_tensor(whole))
        torch.testing.assert_close(
            reads(path, outputs), reads(plain, outputs), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("options", SINGLE, ids=str)
def test_triton_takes_what_is_a_factor_of_the_query_and_refuses_the_rest(options: dict) -> None:
    config = config_of("s_lr", 3, dim=DIM, rank=RANK, **options)
    if options == {"logit_scale": LogitScale.rsqrt}:
        assert make_together(config, "triton").steps
        return
    with pytest.raises(ValueError, match=f"model.depth.{next(iter(options))}=.* kernels=triton"):
        make_together(config, "triton")
