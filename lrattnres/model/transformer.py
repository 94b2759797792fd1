"""A transformer whose sub-layers read from, and write to, a residual path. It never asks which path
runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lrattnres.config import ModelConfig
from lrattnres.kernels.backends import KERNELS, DepthKernels
from lrattnres.model.attention import BACKENDS, AttentionBackend
from lrattnres.model.head import LOSSES, Head, LossForm, OwnHead, TiedHead
from lrattnres.model.layers import Attention, Context, SwiGLU, gain, rotation
from lrattnres.residual.base import ResidualPath, Role, State, normal, path_of, pattern_of

Observer = Callable[[int, State], None]


class Transformer(nn.Module):
    """Decoder of 2L uniform sub-layers: attention, MLP, attention, …

    Weights are float32.

    Args:
        config: sizes and residual path; `config.vocabulary` is set.
        attention: how attention is computed.
        dtype: precision of the arithmetic.
        kernels: how the reads of attention residuals are computed.
        loss: how head and losses are computed.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionBackend = BACKENDS["sdpa"],
        dtype: torch.dtype = torch.float32,
        kernels: DepthKernels = KERNELS["reference"],
        loss: LossForm = LOSSES["whole"],
    ):
        super().__init__()
        assert config.vocabulary is not None, (
            "model.vocabulary must be resolved before a model is built"
        )
        self.config, self.attention, self.dtype, self.kernels = config, attention, dtype, kernels
        self._angles: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.router = path_of(config).build(config, kernels)  # the residual path
        emit = self.router.emit_dim
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.sublayers = nn.ModuleList()
        for site in range(0, 2 * config.layers, 2):
            values = self.router.value_site(config, site) == site
            self.sublayers.append(Attention(config, emit, attention, values))
            self.sublayers.append(SwiGLU(config, emit))
        self.final = gain(config.dim, config.gains)
        self.head: Head = (
            TiedHead(self.embedding, loss)
            if config.tied
            else OwnHead(config.vocabulary, config.dim, loss)
        )

    def forward(
        self,
        tokens: Tensor,
        mask: Context | None,
        observe: Observer | None = None,
        path: ResidualPath | None = None,
        targets: Tensor | None = None,
        z_loss: float = 0.0,
    ) -> Any:
        """Logits [B, T, vocabulary] in `dtype`; with targets their losses, an `Objective`.

        Args:
            tokens: int64 [B, T].
            mask: what `mask` made of their documents; None: each row is one document.
            observe: called at every site with (site, state), before the site reads.
            path: the model's residual path in another form (see residual/coefficients.py); None: as
                it is.
            targets: int64 [B, T]; negative where there is none.
            z_loss: z, the weight of the squared logsumexp in the objective.
        """
        path = path or self.router
        context = mask or Context(None, self.angles(tokens.shape[1], tokens.device))
        state = path.begin(self.embedding(tokens).to(self.dtype))
        last = len(self.sublayers)
        for site in range(last):
            if observe:
                observe(site, state)
            state = self.step(path, state, site, context)
        if observe:
            observe(last, state)
        return self.head(self.last_read(path, state), targets, z_loss)

    def step(self, path: ResidualPath, state: State, site: int, context: Context) -> State:
        """Sub-layer `site` reads and writes: the whole body of the loop, and what checkpointing can
        make again.
        """
        read = path.read(state, site).to(self.dtype)
        output, raw = self.sublayers[site](read, context, path.change(state, site))
        return path.write(state, site, output, raw)

    def last_read(self, path: ResidualPath, state: State) -> Tensor:
        """What the head takes, [B, T, d]."""
        return self.final(path.read(state, len(self.sublayers)).x.to(self.dtype))

    def mask(self, documents: Tensor | None, batch: int, length: int) -> Context:
        """Which positions see each other, and their rotary angles: made once a batch, outside of
        what is compiled.

        Args:
            documents: integers [B, T]; None: no boundaries.
            batch, length: B and T.
        """
        device = self.head.weight.device
        return Context(
            self.attention.prepare(documents, batch, length, device), self.angles(length, device)
        )

    def angles(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rotary angles of the first `length` positions: see `rotation`. They are kept."""
        known = self._angles.get(device)
        if known is None or len(known[0]) < length:
            config = self.config
            many = max(length, config.context)
            with torch.inference_mode(False):  # those of an evaluation serve training too
                known = rotation(
                    many, config.head_width, config.rope_base, device, config.rope_scaling
                )
            if not torch.compiler.is_compiling():
                self._angles[device] = known
        return known[0][:length], known[1][:length]

    def roles(self) -> dict[str, Role]:
        """How each parameter of the residual path is treated, by its name there with `*` for every
        index.
        """
        return path_of(self.config).roles(self.config)


def build_model(
    config: ModelConfig,
    *,
    seed: int | None,
    device: torch.device,
    attention: AttentionBackend,
    dtype: torch.dtype,
    kernels: DepthKernels = KERNELS["reference"],
    loss: LossForm = LOSSES["whole"],
    prepare: Callable[[Transformer], None] = lambda model: None,
) -> Transformer:
    """A model on `device` with its initial weights, or with none (seed None) for a checkpoint to
    fill.

    `prepare` changes the model before there are weights: cut into shards then, it is never whole on
    any rank. Nothing is allocated twice.
    """
    with torch.device("meta"):
        model = Transformer(config, attention, dtype, kernels, loss)
    prepare(model)
    model.to_empty(device=device)
    if seed is not None:
        initialize(model, seed)
    return model


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> None:
    """Fills every weight: gains with one, the residual path as its roles say, the others normal
    with `init_std`.

    Each weight has a random stream of its own, keyed on (seed, its name) and drawn on the CPU. So
    equal names have equal weights in every variant and on every device, in whatever order they are
    filled; and a rank that holds shards draws each weight whole, one at a time, and keeps its own
    part.
    """
    roles, usual = model.roles(), normal(model.config.init_std)
    for name, weight in model.named_parameters():
        room, _, own = name.partition(".")
        start = roles[pattern_of(own)].start if room == "router" else usual
        if name.endswith("gain.gain") or name == "final.gain":
            start = 1.0
        if isinstance(start, float):
            weight.fill_(start)
            continue
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        full = start(weight.shape, generator)
        if isinstance(weight, DTensor):  # cut on every rank alike: nothing has to be sent
            whole = full.to(weight.device)
            mesh, placements = weight.device_mesh, weight.placements
            weight.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))
        else:
            weight.copy_(full)
