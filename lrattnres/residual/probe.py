"""Where each site reads, averaged over tokens as they stream by: nothing of a token is kept.

Definitions of the papers: N_eff(t, x) = exp(entropy of α_t(x)), averaged over tokens x (Figure 2); mean α per site and
source (Figure 3); the largest α of a token, averaged (the Delta paper's sharpness). Several heads count like tokens: each
is measured by itself, and the results are means over heads too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrattnres.residual.router import Depth, DepthRouter


class DepthProbe:
    """An observer of forward passes: `model(tokens, mask, observe=probe)`. Sums are float64.

    Called with `valid`, booleans [B, T], it counts those positions alone: `observe=partial(probe, valid=…)`.
    """

    def __init__(self, router: DepthRouter):
        self.router = router
        self.tokens = torch.zeros(len(router.plan.sites), dtype=torch.float64)
        self.norm = torch.zeros_like(self.tokens)
        self.effective = torch.zeros_like(self.tokens)
        self.largest = torch.zeros_like(self.tokens)
        self.weights = [
            torch.zeros(len(router.plan.sources(site)), dtype=torch.float64)
            for site in router.plan.sites
        ]

    @torch.no_grad()
    def __call__(self, site: int, depth: Depth, valid: Tensor | None = None) -> None:
        def counted(values: Tensor) -> Tensor:
            return values.flatten(0, -2) if valid is None else values[valid.to(values.device)]

        hidden = counted(self.router.hidden(depth, site))
        self.tokens[site] += hidden[..., 0].numel()
        self.norm[site] += _total(hidden.float().norm(dim=-1))
        weights = self.router.weights(depth, site)
        if weights is None:
            return
        weights = counted(weights)
        entropy = torch.special.entr(weights).sum(-1)
        heads = self.router.heads
        self.effective[site] += _total(entropy.exp()) / heads
        self.largest[site] += _total(weights.amax(-1)) / heads
        self.weights[site] += weights.flatten(0, -2).sum(0, dtype=torch.float64).cpu() / heads

    def sums(self) -> list[Tensor]:
        """Everything that adds up over tokens, alive: ranks make one result of theirs by summing these in place."""
        return [self.tokens, self.norm, self.effective, self.largest, *self.weights]

    def results(self) -> dict[str, Any]:
        """Plain lists for JSON, one entry a site: what is undefined where nothing routes is None."""
        routes = [
            site > 0 and self.router.variant.keys is not None for site in self.router.plan.sites
        ]
        count = self.tokens.clamp(min=1)

        def per_site(sums: Tensor) -> list[float | None]:
            means = (sums / count).tolist()
            return [mean if routed else None for mean, routed in zip(means, routes, strict=True)]

        means = [(weights / n).tolist() for weights, n in zip(self.weights, count, strict=True)]
        return {
            "tokens": int(self.tokens[0]),
            "sources": [
                [source_name(s) for s in self.router.plan.sources(site)]
                for site in self.router.plan.sites
            ],
            "mean_weight": [
                mean if routed else None for mean, routed in zip(means, routes, strict=True)
            ],
            "effective_sources": per_site(self.effective),
            "largest_weight": per_site(self.largest),
            "newest_weight": [
                mean[-1] if routed else None for mean, routed in zip(means, routes, strict=True)
            ],
            "hidden_norm": (self.norm / count).tolist(),
        }


def _total(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64).cpu()


def source_name(members: range) -> str:
    """A source of a plan by the outputs that it sums, counted from 1: `null`, `embedding`, `5`, `1-4`; a state: `0-4`."""
    if not members:
        return "null"
    if members == range(1):
        return "embedding"
    return str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"
