"""Whole models with the Triton kernels against the same models with the reference, eager and compiled."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from lrattnres.config import Routing
from lrattnres.kernels.backends import KERNELS
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import Transformer, build_model
from tests.kernels.test_triton import DEVICE
from tests.residual.making import ATTENTION
from tests.test_cli import comparable, run

CASES = [(name, None) for name in ATTENTION] + [
    ("s_lr", Routing.add),
    ("p_lr", Routing.add),
]


def pair(config, **changes) -> tuple[Transformer, Transformer]:
    models = []
    for kernels in ("triton", "reference"):
        arguments = {
            "seed": 0,
            "device": DEVICE,
            "attention": BACKENDS["sdpa"],
            "dtype": torch.float32,
        } | changes
        models.append(build_model(config, kernels=KERNELS[kernels], **arguments))
    torch.nn.init.normal_(models[1].router.queries, std=0.5)
    models[0].load_state_dict(models[1].state_dict())
    return models[0], models[1]


def outcome(model: Transformer, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits, and the gradient of every parameter."""
    logits = model(tokens, model.mask(None, *tokens.shape))
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
    return [logits, *torch.autograd.grad(loss, list(model.parameters()))]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor], tolerance: float) -> None:
    for found, truth in zip(first, second, strict=True):
        assert (found - truth).norm() <= tolerance * truth.norm()


@pytest.mark.parametrize("blocks", [None, 1, 2, 3, 4, 8])
@pytest.mark.parametrize(("residual", "routing"), CASES)
def test_a_model_with_kernels_is_the_model(
    tiny_model_config, residual: str, routing: Routing | None, blocks: int | None
) -> None:
    config = dataclasses.replace(
        tiny_model_config(residual=residual, blocks=blocks, layers=4), routing=routing
    )
    kernels, reference = pair(config)
    tokens = torch.randint(31, (2, 12), device=DEVICE)
    assert sum(step.opens for step in kernels.router.steps) < len(kernels.router.steps)
    assert_same(outcome(kernels, tokens), outcome(reference, tokens), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["attn_res", "p_lr", "s_lr", "delta"])
@pytest.mark.parametrize("blocks", [None, 3])
def test_a_compiled_model_is_one_graph_and_the_same(
    tiny_model_config, residual: str, blocks: int | None
) -> None:
    torch._dynamo.reset()
    kernels, reference = pair(tiny_model_config(residual=residual, blocks=blocks, layers=4))
    tokens = torch.randint(31, (2, 12), device=DEVICE)
    kernels.compile(fullgraph=True)
    assert_same(outcome(kernels, tokens), outcome(reference, tokens), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [None, 4])
def test_the_backward_graph_adds_no_gradients_of_sources(
    tiny_model_config, blocks: int | None
) -> None:
    """Every source's gradient is handed from operator to operator: nothing is left for autograd to add, or to fill with zeros."""
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph

    model, _ = pair(tiny_model_config(blocks=blocks, layers=4))
    model.compile(
        fullgraph=True,
        backend=aot_autograd(fw_compiler=lambda graph, example: graph, bw_compiler=keep),
    )
    outcome(model, torch.randint(31, (2, 12), device=DEVICE))
    (graph,) = graphs
    filled = [
        node
        for node in graph.graph.nodes
        if node.target in (torch.ops.aten.zeros.default, torch.ops.aten.full.default)
    ]
    wide = [node for node in filled if node.meta["val"].shape == (2, 12, 16)]
    added = [
        node
        for node in graph.graph.nodes
        if node.target is torch.ops.aten.add.Tensor
        and node.meta["val"].shape == (2, 12, 16)
        and all(getattr(part.target, "__name__", "") == "getitem" for part in node.args[:2])
    ]
    assert wide == [] and added == []


def test_activation_checkpointing_of_sublayers(tiny_model_config) -> None:
    """Sub-layers run again in the backward pass; the reads, outside of them, do not."""
    from torch.utils.checkpoint import checkpoint

    kernels, reference = pair(tiny_model_config(layers=4))
    for sublayer in kernels.sublayers:
        forward = sublayer.forward
        sublayer.forward = lambda *read, forward=forward: checkpoint(
            forward, *read, use_reentrant=False
        )
    tokens = torch.randint(31, (2, 12), device=DEVICE)
    assert_same(outcome(kernels, tokens), outcome(reference, tokens), 2e-5)


def test_bfloat16_models_agree(tiny_model_config) -> None:
    kernels, reference = pair(tiny_model_config(layers=4, dim=64), dtype=torch.bfloat16)
    tokens = torch.randint(31, (4, 12), device=DEVICE)
    found, exact = outcome(kernels, tokens), outcome(reference.float(), tokens)
    assert (found[0].float() - exact[0].float()).norm() < 0.05 * exact[0].float().norm()


@pytest.mark.slow
def test_training_with_either_gives_the_same_losses(tiny_run, tmp_path) -> None:
    settings = tiny_run(
        *("steps=3", "optimizer.warmup=1", "instruments.depth=1", "evaluation.every=null"),
        *("global_batch=4", "micro_batch=2", "evaluation.tokens=100"),  # the interpreter is slow
    )
    losses = []
    for kernels in ("triton", "reference"):
        output = run("train.py", *settings, f"kernels={kernels}", f"name={kernels}")
        assert f"depth_kernels {kernels}" in output
        losses.append([record["loss"] for record in comparable(tmp_path / "runs" / kernels)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "depth kernels triton" in run("eval.py", f"run={tmp_path}/runs/triton", "kernels=triton")
