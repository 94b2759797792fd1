"""Where each site reads, averaged over tokens as they stream by: nothing of a token is kept.

Definitions of the papers: N_eff(t, x) = exp(entropy of α_t(x)), averaged over tokens x (Figure 2);
mean α per site and source (Figure 3); the largest α of a token, averaged (the Delta paper's
sharpness). Several heads count like tokens: each is measured by itself, and the results are means
over heads too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrattnres.residual.base import ResidualPath, State
from lrattnres.residual.coefficients import Traced


class DepthProbe:
    """An observer of forward passes: `model(tokens, mask, probe, probe.path)`. Sums are float64.

    Called with `valid`, booleans [B, T], it counts those positions alone: `partial(probe,
    valid=…)`.

    Args:
        path: the model's residual path.
        trace: whether to measure coefficients too, for which the model has to run on `probe.path`;
            a path that is not linear has none.
    """

    def __init__(self, path: ResidualPath, *, trace: bool = False):
        self.sites = 2 * path.config.layers + 1
        self.path: Any = Traced(path.definition()) if trace else path
        self.sources = [path.sources_of(site) for site in range(self.sites)]
        self.tokens, self.norm, self.effective, self.largest = (
            torch.zeros(self.sites, dtype=torch.float64) for _ in range(4)
        )
        self.weights = [torch.zeros(len(found), dtype=torch.float64) for found in self.sources]
        traced = range(self.sites) if trace and path.linear else ()
        self.coefficients = [torch.zeros(site + 1, dtype=torch.float64) for site in traced]

    @torch.no_grad()
    def __call__(self, site: int, state: State, valid: Tensor | None = None) -> None:
        path = self.path

        def counted(values: Tensor) -> Tensor:
            return values.flatten(0, -2) if valid is None else values[valid.to(values.device)]

        hidden = counted(path.hidden(state, site))
        self.tokens[site] += hidden[..., 0].numel()
        self.norm[site] += _total(hidden.float().norm(dim=-1))
        if self.coefficients:
            self.coefficients[site] += _sum_of_rows(counted(path.coefficients(state, site)))
        weights = path.weights(state, site)
        if weights is None:
            return
        weights = counted(weights)
        entropy = torch.special.entr(weights).sum(-1)
        self.effective[site] += _total(entropy.exp()) / path.heads
        self.largest[site] += _total(weights.amax(-1)) / path.heads
        self.weights[site] += _sum_of_rows(weights) / path.heads

    def sums(self) -> list[Tensor]:
        """Everything that adds up over tokens, alive: ranks make one result of theirs by summing
        these in place.
        """
        own = [self.tokens, self.norm, self.effective, self.largest]
        return [*own, *self.weights, *self.coefficients]

    def results(self) -> dict[str, Any]:
        """Plain lists for JSON, one entry a site: what is undefined where nothing attends is None.

        `coefficients` of a site: one for the embedding, then one for each output.
        """
        attends = [site > 0 and self.path.attends for site in range(self.sites)]
        count = self.tokens.clamp(min=1)

        def where_it_attends(values: list[Any]) -> list[Any]:
            return [value if there else None for value, there in zip(values, attends, strict=True)]

        def means(rows: list[Tensor]) -> list[list[float]]:
            return [(row / n).tolist() for row, n in zip(rows, count, strict=True)]

        mean_weight = where_it_attends(means(self.weights))
        results = {
            "tokens": int(self.tokens[0]),
            "sources": [[source_name(source) for source in found] for found in self.sources],
            "mean_weight": mean_weight,
            "effective_sources": where_it_attends((self.effective / count).tolist()),
            "largest_weight": where_it_attends((self.largest / count).tolist()),
            "newest_weight": [None if row is None else row[-1] for row in mean_weight],
            "hidden_norm": (self.norm / count).tolist(),
        }
        return results | ({"coefficients": means(self.coefficients)} if self.coefficients else {})


def _sum_of_rows(rows: Tensor) -> Tensor:
    return rows.flatten(0, -2).sum(0, dtype=torch.float64).cpu()


def _total(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64).cpu()


def source_name(members: range) -> str:
    """A source of a plan by the outputs that it sums, counted from 1: `null`, `embedding`, `5`,
    `1-4`; a state: `0-4`.
    """
    if not members:
        return "null"
    if members == range(1):
        return "embedding"
    return str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"
