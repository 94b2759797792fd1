"""What a model may see: nothing of the future, of another document, or of another call."""

import dataclasses
import itertools
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from lrattnres.model.attention import BACKENDS, choose_attention
from lrattnres.model.transformer import Transformer, build_model, initialize
from lrattnres.residual.base import paths

CPU = torch.device("cpu")


def make(config, dtype=torch.float32, backend="sdpa") -> Transformer:
    model = build_model(config, seed=0, device=CPU, attention=BACKENDS[backend], dtype=dtype)
    with torch.no_grad():  # far from the initial state, where nearly everything is symmetric
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.requires_grad_(False)


def logits(
    model: Transformer, tokens: torch.Tensor, documents: torch.Tensor | None = None
) -> torch.Tensor:
    return model(tokens, model.mask(documents, *tokens.shape))


every_variant = pytest.mark.parametrize("residual", list(paths()))


@every_variant
@pytest.mark.parametrize("blocks", [None, 2])
def test_no_position_sees_the_future(tiny_model_config, residual: str, blocks: int | None) -> None:
    model = make(tiny_model_config(residual=residual, blocks=blocks))
    tokens = torch.randint(31, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 31
    before, after = logits(model, tokens), logits(model, changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


@every_variant
def test_a_document_does_not_see_the_one_before_it(tiny_model_config, residual: str) -> None:
    model = make(tiny_model_config(residual=residual, context=96))
    numbers = torch.tensor([[0] * 37 + [1] * 59])
    tokens = torch.randint(31, (1, 96))
    changed = tokens.clone()
    changed[:, :37] = torch.randint(31, (1, 37))
    packed = logits(model, tokens, numbers)[:, 37:]
    assert torch.equal(logits(model, changed, numbers)[:, 37:], packed)
    alone = logits(model, tokens[:, 37:])
    torch.testing.assert_close(packed, alone, rtol=1e-3, atol=2e-4)
    unmasked = logits(model, tokens)[:, 37:]
    assert (unmasked - packed).abs().max() > 0.1  # the mask is what keeps it out


@every_variant
def test_nothing_stays_from_one_call_to_the_next(tiny_model_config, residual: str) -> None:
    model = make(tiny_model_config(residual=residual))
    tokens, other = torch.randint(31, (2, 12)), torch.randint(31, (3, 9))
    before = logits(model, tokens)
    logits(model, other)
    assert torch.equal(logits(model, tokens), before)


@every_variant
def test_sequences_of_a_batch_do_not_meet(tiny_model_config, residual: str) -> None:
    model = make(tiny_model_config(residual=residual))
    tokens = torch.randint(31, (4, 12))
    together = logits(model, tokens)
    for row in range(4):
        torch.testing.assert_close(
            logits(model, tokens[row : row + 1])[0], together[row], rtol=1e-4, atol=1e-4
        )


def test_rotation_is_of_interleaved_pairs_and_relative() -> None:
    from lrattnres.model.layers import rotate, rotation

    cosines, sines = rotation(6, 4, 500_000.0, CPU)
    x = torch.randn(1, 6, 1, 4)
    turned = torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous())
    angles = torch.arange(6.0)[:, None] * torch.tensor([1.0, 500_000.0**-0.5])
    truth = torch.view_as_real(
        turned * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    ).flatten(-2)
    torch.testing.assert_close(rotate(x, cosines, sines), truth)
    for x in (torch.randn(2, 6, 3, 4), torch.randn(2, 6, 5, 4)[..., 1:3, :].bfloat16()):
        x.requires_grad_()
        found = [rotate(x, cosines, sines)]
        with patch("torch.compiler.is_compiling", lambda: True):
            found.append(rotate(x, cosines, sines))
        probe = torch.randn_like(x)
        gradients = [torch.autograd.grad((each * probe).sum(), x)[0] for each in found]
        torch.testing.assert_close(*found)  # eager and compiled arithmetic
        torch.testing.assert_close(*gradients)


def test_angles_are_made_once_and_outside_of_what_is_compiled(tiny_model_config) -> None:
    """Those that an evaluation made serve a training pass; a longer window makes longer ones."""
    from lrattnres.model.layers import rotation

    model, names = make(tiny_model_config()), []

    def record(graph: torch.fx.GraphModule, _: object) -> object:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with torch.inference_mode():
        first = model.mask(None, 1, 5).rotation
    again = model.mask(None, 2, 5).rotation
    assert all(one.data_ptr() == other.data_ptr() for one, other in zip(first, again, strict=True))
    tokens = torch.randint(31, (2, 12))
    model.requires_grad_(True)
    torch.compile(model, backend=record, fullgraph=True)(
        tokens, model.mask(None, 2, 12)
    ).sum().backward()
    assert len(names) > 20 and not [name for name in names if name in ("cos", "sin", "outer")]
    config = model.config
    longer = model.mask(None, 1, 40).rotation
    truth = rotation(40, config.head_width, config.rope_base, CPU)
    assert all(map(torch.equal, longer, truth))


def test_another_number_of_segments_is_not_compiled_again() -> None:
    """The second batch; a kernel takes the edges and no shape is fixed by them."""
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda x, edges: x + edges.diff().max(), backend=count, fullgraph=True)
    for cut in ([[0, 0, 1, 1]], [[0, 1, 2, 3]], [[0, 0, 0, 1]]):
        edges = BACKENDS["varlen"].prepare(torch.tensor(cut), 1, 4, CPU)
        assert function(torch.zeros(1), edges).item() == edges.diff().max()
    assert len(graphs) == 1


def test_equal_names_start_equal_in_every_variant(tiny_model_config) -> None:
    models = [
        build_model(
            tiny_model_config(residual=name),
            seed=3,
            device=CPU,
            attention=BACKENDS["sdpa"],
            dtype=torch.float32,
        )
        for name in ("baseline", "s_lr", "delta")
    ]
    states = [model.state_dict() for model in models]
    for name, weight in states[0].items():
        assert all(torch.equal(weight, state[name]) for state in states[1:])
    assert not states[1]["router.queries"].any()
    for name, weight in states[1].items():
        if name != "router.queries":
            assert weight.std().item() == pytest.approx(0.02, rel=0.25), name
    initialize(models[0], seed=4)
    assert not torch.equal(models[0].head.weight, models[1].head.weight)


@pytest.mark.parametrize("numbers", [None, torch.tensor([[0] * 50 + [1] * 78, [0] * 128])])
def test_flex_attention_agrees_with_the_dense_mask(numbers: torch.Tensor | None) -> None:
    query, key, value = torch.randn(3, 2, 128, 2, 16).unbind(0)
    reads = []
    for name in ("sdpa", "flex"):
        mask = BACKENDS[name].prepare(numbers, 2, 128, CPU)
        if name == "flex":
            from torch.nn.attention.flex_attention import flex_attention

            parts = (part.transpose(1, 2) for part in (query, key, value))
            reads.append(flex_attention(*parts, block_mask=mask).transpose(1, 2))
        else:
            reads.append(BACKENDS[name].attend(query, key, value, mask))
    torch.testing.assert_close(*reads, rtol=1e-4, atol=1e-5)


def test_segment_edges_of_packed_kernels() -> None:
    documents = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 2]])
    edges = BACKENDS["varlen"].prepare(documents, 3, 4, CPU)
    assert edges.tolist() == [0, 2, 4, 8, 9, 10, 12]
    assert edges.dtype == torch.int32
    assert BACKENDS["flash"].prepare(None, 3, 4, CPU).tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("name", ["flash3", "flash", "varlen", "flex"])
def test_a_backend_that_cannot_train_here_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"attention={name}: .*write attention="):
        choose_attention(name, CPU, torch.float32, training=True)
    assert choose_attention("auto", CPU, torch.float32, training=True).name == "sdpa"


@pytest.mark.parametrize(
    ("name", "package", "capability"),
    [("flash3", "flash_attn_interface", (9, 0)), ("flash", "flash_attn", (8, 0))],
)
def test_packages_get_packed_sequences(monkeypatch, name: str, package: str, capability) -> None:
    """As the versions of FlashAttention take them: 2 returns a tensor, some of 3 a tuple."""

    def attend(query, key, value, first, second, longest, most, *, causal: bool):
        assert causal and first is second and longest == most == 4
        pieces = [slice(*pair) for pair in itertools.pairwise(first.tolist())]
        parts = [
            F.scaled_dot_product_attention(
                *(part[piece].transpose(0, 1) for part in (query, key, value)), is_causal=True
            ).transpose(0, 1)
            for piece in pieces
        ]
        found = torch.cat(parts)
        return (found, None) if name == "flash3" else found

    module = ModuleType(package)
    module.flash_attn_varlen_func = attend
    module.__spec__ = ModuleSpec(package, None)
    monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (
        choose_attention("auto", torch.device("cuda"), torch.bfloat16, training=True).name == name
    )
    documents = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 2]])
    query, key, value = torch.randn(3, 3, 4, 2, 8).unbind(0)
    reads = [
        BACKENDS[each].attend(query, key, value, BACKENDS[each].prepare(documents, 3, 4, CPU))
        for each in ("sdpa", name)
    ]
    torch.testing.assert_close(*reads)


@pytest.mark.parametrize("residual", ["baseline", "attn_res", "p_lr"])
def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(
    tiny_model_config, residual: str
) -> None:
    config = tiny_model_config(residual=residual)
    exact, low = make(config), make(config, torch.bfloat16)
    low.load_state_dict(exact.state_dict())
    tokens = torch.randint(31, (2, 12))
    low.requires_grad_(True)
    out = logits(low, tokens)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), logits(exact, tokens), rtol=0.1, atol=0.25)
    out.float().sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in low.parameters())


def test_observers_see_every_site_and_change_nothing(tiny_model_config) -> None:
    model = make(tiny_model_config())
    tokens, sites = torch.randint(31, (2, 12)), []
    mask = model.mask(None, 2, 12)
    observed = model(tokens, mask, observe=lambda site, depth: sites.append(site))
    assert sites == list(range(7))
    assert torch.equal(observed, model(tokens, mask))


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["baseline", "attn_res", "p_lr", "s_lr", "delta"])
def test_the_compiled_model_agrees_and_keeps_plain_names(tiny_model_config, residual: str) -> None:
    config = tiny_model_config(residual=residual, layers=2)
    eager, compiled = make(config), make(config)
    compiled.load_state_dict(eager.state_dict())
    compiled.requires_grad_(True)
    eager.requires_grad_(True)
    compiled.compile(fullgraph=True)
    tokens = torch.randint(31, (2, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7] * 2)
    for model in (eager, compiled):
        logits(model, tokens, documents).square().mean().backward()
    assert list(compiled.state_dict()) == list(eager.state_dict())
    for (name, a), b in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_configs_of_a_model_are_not_shared(tiny_model_config) -> None:
    config = tiny_model_config()
    assert make(dataclasses.replace(config, routing=None)).router.replaces
