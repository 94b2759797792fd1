"""The paths of the papers against their equations written out naively in float64, and the identities of the method."""

import math

import pytest
import torch
from torch import Tensor

from lrattnres.config import Routing
from lrattnres.residual.attention import AttentionResiduals
from lrattnres.residual.base import ResidualPath, path_of
from tests.residual.making import ATTENTION, config_of, make
from tests.residual.making import run as reads_of

DIM, RANK, SUBLAYERS = 8, 3, 8
FIVE = ["baseline", *ATTENTION]
EPSILON = 2.0**-23
GRANULARITIES = [None, 1, 2, 3, 8]


def norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPSILON)


def naive_reads(
    name: str, routing: Routing, blocks: int | None, outputs, keys, queries
) -> list[Tensor]:
    """RMSNorm(h) at every site, straight from the definitions; output 0 is the embedding."""
    count = blocks or SUBLAYERS
    ends = [math.ceil(SUBLAYERS * j / count) for j in range(1, count + 1)]
    reads = [norm(outputs[0])]
    for site in range(1, SUBLAYERS + 1):
        groups, start = [[0]], 1
        for end in [*[e for e in ends if e <= site], site]:
            if end >= start:
                groups.append(list(range(start, end + 1)))
                start = end + 1
        values = [sum(outputs[i] for i in group) for group in groups]
        stream = sum(outputs[: site + 1])
        if name == "baseline":
            reads.append(norm(stream))
            continue
        made = {
            "attn_res": values,
            "delta": values,
            "s_lr": [value[..., -RANK:] for value in values],
            "p_lr": [
                keys[0] if group == [0] else sum(norm(keys[i]) for i in group) for group in groups
            ],
        }[name]
        logits = torch.stack([norm(key) @ queries[site - 1] for key in made], -1)
        weights = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
        mixture = sum(weights[..., i : i + 1] * value for i, value in enumerate(values))
        reads.append(norm(stream + mixture if routing is Routing.add else mixture))
    return reads


def run(path: ResidualPath, outputs, keys=None) -> list[Tensor]:
    """The path's reads when sub-layer i writes outputs[i + 1] (and keys[i + 1])."""
    if path.emit_dim:
        outputs = [
            outputs[0],
            *(torch.cat(pair, -1) for pair in zip(outputs[1:], keys[1:], strict=True)),
        ]
    return reads_of(path, outputs)


def outputs_and_keys(router: ResidualPath | None = None):
    outputs = [
        torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True)
        for _ in range(SUBLAYERS + 1)
    ]
    keys = [
        torch.randn(2, 5, RANK, dtype=torch.float64, requires_grad=True)
        for _ in range(SUBLAYERS + 1)
    ]
    if router is not None and router.emit_dim:
        keys[0] = router.embedding_key(outputs[0])
    return outputs, keys


CASES = [(name, None) for name in FIVE] + [
    (name, r) for name in ("s_lr", "p_lr", "attn_res") for r in Routing
]


@pytest.mark.parametrize("blocks", GRANULARITIES)
@pytest.mark.parametrize(("name", "routing"), CASES)
def test_reads_and_gradients_follow_the_definitions(
    name: str, routing: Routing | None, blocks: int | None
) -> None:
    router = make(name, blocks, routing=routing)
    outputs, keys = outputs_and_keys(router)
    published = Routing.add if name == "delta" else Routing.replace
    queries = getattr(router, "queries", None)
    expected = naive_reads(name, routing or published, blocks, outputs, keys, queries)
    found = run(router, outputs, keys)
    probes = [torch.randn_like(read) for read in expected]
    wanted = [*outputs, *router.parameters()] + (keys[1:] if router.emit_dim else [])
    for read, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(read, truth, rtol=1e-10, atol=1e-12)
    gradients = [
        torch.autograd.grad(
            sum((r * p).sum() for r, p in zip(reads, probes, strict=True)),
            wanted,
            retain_graph=True,
        )
        for reads in (found, expected)
    ]
    for gradient, truth in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("blocks", GRANULARITIES)
def test_slice_of_full_width_is_attn_res(blocks: int | None) -> None:
    sliced, full = make("s_lr", blocks, rank=DIM), make("attn_res", blocks)
    full.load_state_dict(sliced.state_dict())
    outputs, _ = outputs_and_keys()
    for a, b in zip(run(sliced, outputs), run(full, outputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", FIVE)
def test_as_many_blocks_as_sublayers_is_full(name: str) -> None:
    blocked, full = make(name, SUBLAYERS), make(name, None)
    full.load_state_dict(blocked.state_dict())
    outputs, keys = outputs_and_keys(blocked)
    for a, b in zip(run(blocked, outputs, keys), run(full, outputs, keys), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["attn_res", "s_lr", "p_lr"])
@pytest.mark.parametrize("blocks", GRANULARITIES)
def test_zero_queries_read_the_mean_of_the_sources(name: str, blocks: int | None) -> None:
    router = make(name, blocks)
    torch.nn.init.zeros_(router.queries)
    outputs, keys = outputs_and_keys(router)
    for site, read in enumerate(run(router, outputs, keys)):
        sources = [sum(outputs[i] for i in members) for members in router.plan.sources(site)]
        torch.testing.assert_close(read, norm(sum(sources) / len(sources)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", FIVE)
def test_the_first_site_reads_the_embedding_once(name: str) -> None:
    router = make(name, 2)
    outputs, _ = outputs_and_keys()
    assert torch.equal(router.hidden(router.begin(outputs[0]), 0), outputs[0])


def test_baseline_is_bitwise_a_running_sum() -> None:
    router = make("baseline")
    outputs = [torch.randn(2, 5, DIM).bfloat16() for _ in range(SUBLAYERS + 1)]
    depth, stream = router.begin(outputs[0]), outputs[0]
    for site in range(SUBLAYERS):
        assert torch.equal(router.hidden(depth, site), stream)
        depth, stream = router.write(depth, site, outputs[site + 1]), stream + outputs[site + 1]
    assert torch.equal(router.hidden(depth, SUBLAYERS), stream)
    assert list(router.parameters()) == []


@pytest.mark.parametrize("name", ["attn_res", "s_lr", "p_lr", "delta"])
def test_weights_sum_to_one_and_one_source_gets_all(name: str) -> None:
    router = make(name, 3)
    outputs, keys = outputs_and_keys(router)
    depth = router.begin(outputs[0])
    assert router.weights(depth, 0) is None
    for site in range(SUBLAYERS):
        written = (
            torch.cat([outputs[site + 1], keys[site + 1]], -1)
            if router.emit_dim
            else outputs[site + 1]
        )
        depth = router.write(depth, site, written)
        weights = router.weights(depth, site + 1)
        assert weights.shape[-1] == len(router.plan.sources(site + 1))
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5).double(), rtol=1e-12, atol=0)


def test_a_write_leaves_the_state_before_it_as_it_was() -> None:
    router = make("s_lr", 2)
    outputs, _ = outputs_and_keys()
    before = router.write(router.begin(outputs[0]), 0, outputs[1])
    copies = [source.value.clone() for source in (*before.sources, before.partial)]
    router.write(before, 1, outputs[2])
    for source, copy in zip((*before.sources, before.partial), copies, strict=True):
        assert torch.equal(source.value, copy)


@pytest.mark.parametrize("rank", [None, 0, DIM + 1])
def test_an_impossible_rank_is_refused(rank: int | None) -> None:
    config = config_of("s_lr", rank=rank)
    (error,) = path_of(config).errors(config)
    assert error.startswith(f"model.rank={'null' if rank is None else rank}: ")


def test_a_rule_that_is_no_tail_is_beyond_the_kernels() -> None:
    """The kernels read the last r columns of a value in place; a rule that slices others must not be computed by them."""
    import dataclasses

    from lrattnres.kernels.backends import KERNELS
    from lrattnres.residual.keys import SLICED

    class HeadSlice(AttentionResiduals):
        rule = dataclasses.replace(SLICED, key=lambda source, r, d: source.value[..., :r])
        uses = AttentionResiduals.uses | {"rank"}

    config = config_of("s_lr", 2)
    assert HeadSlice.beyond_kernels(config) and not path_of(config).beyond_kernels(config)
    path = HeadSlice.build(config, KERNELS["triton"])
    assert type(path) is HeadSlice  # the definition, which asks the rule
    torch.nn.init.normal_(path.queries)
    state = path.write(path.begin(torch.randn(3, DIM)), 0, torch.randn(3, DIM))
    keys = [source.value[..., :RANK] for source in path.sources(state, 1)]
    logits = torch.stack([norm(key) @ path.queries[0] for key in keys], -1)
    torch.testing.assert_close(path.weights(state, 1), logits.softmax(-1))
