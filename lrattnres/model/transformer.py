"""The decoder: 2L uniform sub-layers that read from, and write to, a depth router. It never asks which variant runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lrattnres.config import ModelConfig
from lrattnres.kernels.backends import KERNELS, DepthKernels
from lrattnres.model.attention import BACKENDS, AttentionBackend, Mask
from lrattnres.model.layers import Attention, Context, Linear, SwiGLU, TiedHead, gain, rotation
from lrattnres.residual.ablations import beyond_plain
from lrattnres.residual.plan import plan_of
from lrattnres.residual.router import VARIANTS, Depth, DepthRouter

Observer = Callable[[int, Depth], None]
# Weights that start at a constant, by the last part of their names; queries do too, unless they are asked to be normal.
CONSTANTS = {
    "queries": 0.0,
    "query_projections": 0.0,
    "source_scales": 1.0,
    "gates": 0.0,
    "gain": 1.0,
}


def build_router(config: ModelConfig, kernels: DepthKernels) -> DepthRouter:
    """The router that `model.residual`, `rank`, `blocks`, `routing` and `depth` describe."""
    variant = VARIANTS[config.residual]
    if config.routing is not None:
        variant = variant._replace(routing=config.routing)
    plan = plan_of(config)
    return DepthRouter(
        plan,
        variant,
        config.dim,
        config.rank,
        kernels,
        options=config.depth,
        gated=config.gate,
        eps=config.norm_eps,
    )


def beyond_kernels(config: ModelConfig) -> list[str]:
    """The settings of the residual path that only plain torch computes, as key=value."""
    variant = VARIANTS.get(config.residual)
    return beyond_plain(config.depth) if variant and variant.keys else []


class Transformer(nn.Module):
    """PreNorm decoder; by default with untied embedding and head, and without biases and norm gains.

    `dtype` is the precision of the arithmetic; weights stay float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionBackend = BACKENDS["sdpa"],
        dtype: torch.dtype = torch.float32,
        kernels: DepthKernels = KERNELS["reference"],
    ):
        super().__init__()
        assert config.vocabulary is not None, (
            "model.vocabulary must be resolved before a model is built"
        )
        self.config, self.attention, self.dtype = config, attention, dtype
        self.router = build_router(config, kernels)
        emit = self.router.emit_dim
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.sublayers = nn.ModuleList()
        for _ in range(config.layers):
            self.sublayers.append(Attention(config, emit, attention))
            self.sublayers.append(SwiGLU(config, emit))
        self.final = gain(config.dim, config.gains)
        self.head = (
            TiedHead(self.embedding) if config.tied else Linear(config.dim, config.vocabulary)
        )

    def mask(self, documents: Tensor | None, batch: int, length: int) -> Mask:
        """Which positions see each other, once a batch; documents: integers [B, T], or None for no boundaries."""
        return self.attention.prepare(documents, batch, length, self.head.weight.device)

    def angles(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rotary angles of the first `length` positions: see `rotation`."""
        config = self.config
        return rotation(length, config.head_width, config.rope_base, device, config.rope_scaling)

    def forward(self, tokens: Tensor, mask: Mask, observe: Observer | None = None) -> Tensor:
        """Logits [B, T, vocabulary] in `dtype` for tokens [B, T]; `observe(site, depth)` is called at every site."""
        router = self.router
        context = Context(mask, self.angles(tokens.shape[1], tokens.device))
        depth = router.begin(self.embedding(tokens).to(self.dtype))
        for site in range(len(self.sublayers)):
            if observe:
                observe(site, depth)
            depth = self.step(depth, site, context)
        last = len(self.sublayers)
        if observe:
            observe(last, depth)
        return self.head(self.final(router.read(depth, last)))

    def step(self, depth: Depth, site: int, context: Context) -> Depth:
        """The state after sub-layer `site` has read and written: what activation checkpointing can make again."""
        output = self.sublayers[site](self.router.read(depth, site), context)
        return self.router.write(depth, site, output)


def build_model(
    config: ModelConfig,
    *,
    seed: int | None,
    device: torch.device,
    attention: AttentionBackend,
    dtype: torch.dtype,
    kernels: DepthKernels = KERNELS["reference"],
    prepare: Callable[[Transformer], None] = lambda model: None,
) -> Transformer:
    """A model on `device` with its initial weights, or with none (seed None) for a checkpoint to fill.

    `prepare` changes the model before there are weights: cut into shards then, it is never whole on any rank.
    Nothing is allocated twice.
    """
    with torch.device("meta"):
        model = Transformer(config, attention, dtype, kernels)
    prepare(model)
    model.to_empty(device=device)
    if seed is not None:
        initialize(model, seed)
    return model


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> None:
    """Normal with `init_std` everywhere; queries normal with `depth.query_std`, zero unless it is set; the rest of CONSTANTS.

    Each weight has a random stream of its own, keyed on (seed, its name) and drawn on the CPU. So equal names have
    equal weights in every variant and on every device, in whatever order they are filled; and a rank that holds shards
    draws each weight whole, one at a time, and keeps its own part.
    """
    config = model.config
    for name, weight in model.named_parameters():
        kind = name.rpartition(".")[2]
        std = (
            config.depth.query_std
            if kind == "queries"
            else 0.0
            if kind in CONSTANTS
            else config.init_std
        )
        if std == 0:
            weight.fill_(CONSTANTS.get(kind, 0.0))
            continue
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        full = torch.empty(weight.shape).normal_(std=std, generator=generator)
        if isinstance(weight, DTensor):  # cut on every rank alike: nothing has to be sent
            weight.copy_(
                distribute_tensor(
                    full.to(weight.device),
                    weight.device_mesh,
                    weight.placements,
                    src_data_rank=None,
                )
            )
        else:
            weight.copy_(full)
