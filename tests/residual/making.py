"""Residual paths of small models, without the models."""

from __future__ import annotations

import torch
from torch import Tensor

from lrattnres.config import DepthConfig, ModelConfig, Routing
from lrattnres.kernels.backends import KERNELS
from lrattnres.residual.attention import AttentionResiduals
from lrattnres.residual.base import ResidualPath, path_of, paths
from lrattnres.residual.fused.executor import ReadTogether, together

ATTENTION = [name for name, path in paths().items() if issubclass(path, AttentionResiduals)]


def config_of(
    residual: str,
    blocks: int | None = None,
    *,
    layers: int = 4,
    dim: int = 8,
    rank: int | None = 3,
    routing: Routing | None = None,
    gate: bool = False,
    path: dict | None = None,
    **ablations,
) -> ModelConfig:
    """Settings of which only the residual path's count."""
    sizes = {"layers": layers, "dim": dim, "heads": 2, "mlp_width": 2 * dim, "context": 8}
    given = {"residual": residual, "rank": rank, "blocks": blocks, "routing": routing, "gate": gate}
    depth = DepthConfig(**ablations)
    return ModelConfig(**sizes, **given, vocabulary=11, depth=depth, path=path or {})


def make(residual: str, blocks: int | None = None, **settings) -> ResidualPath:
    """The definition in float64, its queries drawn."""
    config = config_of(residual, blocks, **settings)
    path = path_of(config).build(config, KERNELS["reference"]).double()
    for name, parameter in path.named_parameters():
        torch.nn.init.normal_(parameter) if name == "queries" else None
    return path


def make_together(
    config: ModelConfig, kernels: str = "reference", starts: tuple[int, ...] | None = None
) -> ReadTogether:
    """The same path, with sites read together."""
    return together(path_of(config))(config, KERNELS[kernels], starts)


def run(path: ResidualPath, outputs: list[Tensor]) -> list[Tensor]:
    """The reads at every site when sub-layer i writes outputs[i]; outputs[0] is the embedding."""
    state, reads = path.begin(outputs[0]), []
    for site, output in enumerate(outputs[1:]):
        reads.append(path.read(state, site).x)
        state = path.write(state, site, output)
    return [*reads, path.read(state, len(outputs) - 1).x]
