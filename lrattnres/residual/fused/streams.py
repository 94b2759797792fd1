"""Hyper-connections with Triton kernels: what hc.py and mhc.py compute, in two passes over the
streams.

The first pass multiplies the streams with the maps, of which the weights of a site are made; the
second reads and mixes. Both write the last output into the streams as they read them, so that the
written streams are never stored. A norm divides the product, not the streams. The first site and
the head, one of each a pass, are those of the definition.
"""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from torch import Tensor

from lrattnres.kernels.reference import wide
from lrattnres.kernels.stream_ops import Projected, mix, project
from lrattnres.residual.base import ResidualPath, path_of
from lrattnres.residual.hc import HyperConnections, Norm, State, Streams
from lrattnres.residual.mhc import ManifoldConstrained


class InTriton(Streams):
    """A path of several streams whose inner sites are computed by Triton kernels.

    Attributes:
        joint: whether each stream has maps of its own, and the products are summed.
    """

    joint: ClassVar[bool]

    def site_maps(self, site: int) -> Tensor:
        """The maps of a site, float32 [n if `joint` else 1, K, d]."""
        raise NotImplementedError

    def site_weights(self, found: Projected, maps: Tensor, site: int) -> tuple[Tensor, Tensor]:
        """What `connections` returns, of the products with the maps."""
        raise NotImplementedError

    def write(self, state: State, site: int, output: Tensor, raw: object = None) -> State:
        if site + 1 == 2 * self.config.layers:
            return super().write(state, site, output, raw)
        assert state.write is not None
        maps = self.site_maps(site + 1)
        found = project(state.streams, state.write, output, maps, joint=self.joint)
        mixing, write = self.site_weights(found, maps, site + 1)
        hidden, streams = mix(found.written, mixing)
        return State(streams, write, hidden)

    def definition(self) -> ResidualPath:
        definition = copy.copy(self)  # a module's copy has the same parameters
        definition.__class__ = path_of(self.config)  # type: ignore[assignment]
        return definition


class HyperConnectionsInTriton(InTriton, HyperConnections):
    joint = False

    def site_maps(self, site: int) -> Tensor:
        """One more than the definition has: of ones, so that its product is the sum of a stream."""
        maps = self.maps(site).mT
        return torch.cat([maps, torch.ones_like(maps[:1])]).unsqueeze(0)

    def site_weights(self, found: Projected, maps: Tensor, site: int) -> tuple[Tensor, Tensor]:
        products, sums = found.products.split((maps.shape[1] - 1, 1), dim=-1)
        squares = found.squares.unsqueeze(-1) / self.dim
        if self.options.norm is Norm.rms:
            return self.formed(products * torch.rsqrt(squares + self.eps), site)
        mean = sums / self.dim
        scale = torch.rsqrt((squares - mean.square()).clamp(min=0) + 1e-5)
        return self.formed((products - mean * maps[0, :-1].sum(-1)) * scale, site)


class ManifoldConstrainedInTriton(InTriton, ManifoldConstrained):
    joint = True

    def site_maps(self, site: int) -> Tensor:
        return wide(self.projection[site]).unflatten(-1, (self.options.n, self.dim)).movedim(1, 0)

    def site_weights(self, found: Projected, maps: Tensor, site: int) -> tuple[Tensor, Tensor]:
        return self.formed(self.divided(found.products, found.squares.sum(-1)), site)


IN_TRITON: dict[type[Streams], type[InTriton]] = {
    HyperConnections: HyperConnectionsInTriton,
    ManifoldConstrained: ManifoldConstrainedInTriton,
}
