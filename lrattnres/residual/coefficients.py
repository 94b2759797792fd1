"""What each site takes from each output: c with h_t = Σ_i c_{t,i} o_i, for every path by one means.

The mixing of a path works on the last axis of its values, whatever the width, and its weights come from the first d
columns. So each value carries M + 1 columns more, which say of which outputs it is made: the columns of o_i are the i-th
unit vector. What stands in them at h_t are the coefficients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lrattnres.residual.base import Read, ResidualPath, State


class Traced:
    """A residual path whose values carry those columns; to a model it is the path itself.

    Args:
        path: one that reads a site at a time, such as `path_of(config).build` makes with kernels=reference.
    """

    def __init__(self, path: ResidualPath):
        self.path, self.columns = path, 2 * path.config.layers + 1
        self.width = path.dim + self.columns

    def __getattr__(self, name: str) -> Any:
        return getattr(self.path, name)

    def begin(self, embedding: Tensor) -> State:
        return self.path.begin(self._marked(embedding, 0))

    def write(self, state: State, site: int, output: Tensor, raw: Any = None) -> State:
        return self.path.write(state, site, self._marked(output, site + 1), raw)

    def read(self, state: State, site: int) -> Read:
        return self.path.read(self.values(state), site)

    def hidden(self, state: State, site: int) -> Tensor:
        return self.path.hidden(self.values(state), site)[..., : self.path.dim]

    def weights(self, state: State, site: int) -> Tensor | None:
        return self.path.weights(self.values(state), site)

    def coefficients(self, state: State, site: int) -> Tensor:
        """c of a site, [..., site + 1]: of the embedding, then of each output."""
        return self.path.hidden(state, site)[..., self.path.dim : self.path.dim + site + 1]

    def values(self, state: State) -> State:
        """The state without those columns."""

        def cut(part: Any) -> Any:
            wide = isinstance(part, Tensor) and part.shape[-1:] == (self.width,)
            return part[..., : self.path.dim] if wide else part

        return tree_map(cut, state)

    def _marked(self, value: Tensor, index: int) -> Tensor:
        """A value [..., d + emitted columns] with its unit vector behind the d columns."""
        mark = torch.zeros(self.columns, dtype=value.dtype, device=value.device)
        mark[index] = 1
        own, emitted = value[..., : self.path.dim], value[..., self.path.dim :]
        return torch.cat([own, mark.expand(*own.shape[:-1], -1), emitted], dim=-1)
