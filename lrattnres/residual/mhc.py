"""Manifold-constrained hyper-connections: streams that are mixed by doubly stochastic matrices.

Xie et al., "mHC: Manifold-Constrained Hyper-Connections" (arXiv 2512.24880, equations 7 to 9).
S has n rows S_j, each of width d, and starts as S_j = o_0. With x = RMSNorm(vec S), over all
n·d numbers, stream after stream, site t = 1 … M computes

    (p, q, c) = F_t x, F_t [n² + 2n, n·d]        pre = σ(a_0 p + b^p) + ε     post = 2σ(a_1 q + b^q)
    C = Sinkhorn(a_2 c + b^c), n × n, row after row
    h_t = Σ_j pre_j S_j          S_k ← post_k o_t + Σ_j C_{j,k} S_j

and the head reads h_{M+1} = Σ_j (σ(a^h F^h x + b^h)_j + ε) S_j, or with `head=sum` Σ_j S_j.
Sinkhorn is a softmax over rows, + ε, and a division by the column sums; then `iterations` − 1
times a division by the row sums and one by the column sums, each sum + ε.

Start: "other", near the baseline times n/2. With F zero, C is 1/n everywhere, pre ½ and post
1, so every read is (n/2)·h of the baseline to 3e-6 (relative; 3e-5 after 48 sub-layers, for ε
shrinks each column sum by 1e-6); F as drawn, N(0, init_std²), makes it 1.3e-3. a is 0.01 and b
zero.

Where paper and code differ: the paper takes exp, and then columns before rows, 20 times.
DeepSeek-V4's code (in transformers) is taken, which does the above, with ε = 1e-6. Both come
to the same matrix. The paper does not say how the streams are joined; the head is V4's. The
starts of F and b are not published: those of transformers, whose scales start at one, a
placeholder of code without training; the paper's a is taken. DeepSeek-V4 gives F to Muon, which
`projections=muon` does: F is then one matrix a site, and decays. By default F of all sites is
one tensor, which Adam updates at the rate of all routing weights, and nothing decays.

With K = n² + 2n, costs M(K·n·d + K + 3) + n²d + n + 1 parameters and M(K·n·d + K·d) + n²d +
n·d multiply-adds a token; the last n²d + n + 1 and n²d + n·d are the learned head's. A state
holds n + 1 vectors of width d and n numbers. Sinkhorn's iterates, 2·iterations matrices n × n
a site and token, are not kept for the backward pass but made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lrattnres.config import ModelConfig
from lrattnres.config.schema import option
from lrattnres.kernels.reference import weighted_sum, wide
from lrattnres.residual.base import Added, Role, normal
from lrattnres.residual.hc import Streams, sum_of


class Head(Enum):
    learned = "learned"
    sum = "sum"


class Owner(Enum):
    adam = "adam"
    muon = "muon"


@torch.compiler.nested_compile_region  # compiled once, and not again for each site
def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """A matrix [..., n, n] whose rows and columns sum to one, but for eps."""
    matrix = torch.softmax(logits, dim=-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


class ManifoldConstrained(Streams):
    residual, start = "mhc", "other"

    @dataclass(frozen=True)
    class Options:
        n: int = option("streams", 4, at_least=1, at_most=64)
        iterations: int = option(
            "how often Sinkhorn divides by columns", 20, at_least=1, at_most=1000
        )
        eps: float = option("added to weights and sums", 1e-6, at_least=0, at_most=0.1)
        head: Head = option(
            "how the head joins the streams: learned weights, or their sum", Head.learned
        )
        projections: Owner = option("who updates the projections: adam or muon", Owner.adam)

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        n, sites = self.options.n, 2 * config.layers
        shape = (n * n + 2 * n, n * self.dim)
        self.projection: nn.Parameter | nn.ParameterList  # [K, n·d] of each site
        if self.options.projections is Owner.muon:
            self.projection = nn.ParameterList(torch.zeros(shape) for _ in range(sites))
        else:
            self.projection = nn.Parameter(torch.zeros(sites, *shape))
        self.scale = nn.Parameter(torch.zeros(sites, 3))
        self.bias = nn.Parameter(torch.zeros(sites, n * n + 2 * n))
        if self.options.head is Head.learned:
            self.head_projection = nn.Parameter(torch.zeros(n, n * self.dim))
            self.head_scale = nn.Parameter(torch.zeros(1))
            self.head_bias = nn.Parameter(torch.zeros(n))

    def connections(self, streams: Sequence[Tensor], site: int) -> tuple[Tensor, Tensor]:
        return self.formed(self.projected(self.projection[site], streams), site)

    def formed(self, found: Tensor, site: int) -> tuple[Tensor, Tensor]:
        """(pre | C) and post of (p, q, c), float32 [..., n² + 2n]."""
        n, eps = self.options.n, self.options.eps
        sizes = (n, n, n * n)
        p, q, c = (
            scale * part + bias
            for scale, part, bias in zip(
                self.scale[site],
                found.split(sizes, dim=-1),
                self.bias[site].split(sizes),
                strict=True,
            )
        )
        read, write = torch.sigmoid(p) + eps, 2 * torch.sigmoid(q)
        mixing = self.balanced(c.unflatten(-1, (n, n)))
        return torch.cat([read.unsqueeze(-1), mixing], dim=-1), write

    def projected(self, projection: Tensor, streams: Sequence[Tensor]) -> Tensor:
        """F·RMSNorm(vec S), float32: the norm divides the product, which is the same."""
        parts = [wide(stream[..., : self.dim]) for stream in streams]
        product = sum_of(
            [
                F.linear(part, weight.to(part.dtype))
                for part, weight in zip(parts, projection.split(self.dim, dim=-1), strict=True)
            ]
        )
        return self.divided(product, sum_of([torch.linalg.vecdot(part, part) for part in parts]))

    def divided(self, product: Tensor, squares: Tensor) -> Tensor:
        """A product with vec S, and the sum of its squares, as the product with x."""
        mean = squares / (self.options.n * self.dim)
        return product * torch.rsqrt(mean + self.eps).unsqueeze(-1)

    def balanced(self, logits: Tensor) -> Tensor:
        """Sinkhorn's matrix; a backward pass makes its iterates again."""
        given = (logits, self.options.iterations, self.options.eps)
        if not torch.is_grad_enabled():
            return sinkhorn(*given)
        return checkpoint(sinkhorn, *given, use_reentrant=False, preserve_rng_state=False)

    def joined(self, streams: Sequence[Tensor]) -> Tensor:
        if self.options.head is Head.sum:
            return sum_of(streams)
        found = self.projected(self.head_projection, streams)
        weights = torch.sigmoid(self.head_scale * found + self.head_bias) + self.options.eps
        return weighted_sum(weights, streams)

    @classmethod
    def roles(cls, config: ModelConfig) -> dict[str, Role]:
        options = cls.options_of(config)
        projection = Role(options.projections.value, True, normal(config.init_std))

        def of(prefix: str, index: str = "") -> dict[str, Role]:
            return {
                f"{prefix}projection{index}": projection,
                f"{prefix}scale": Role("adam", False, 0.01),
                f"{prefix}bias": Role("adam", False, 0.0),
            }

        own = of("", ".*" if options.projections is Owner.muon else "")
        return own | (of("head_") if options.head is Head.learned else {})

    @classmethod
    def cost(cls, config: ModelConfig) -> Added:
        n, dim, sites = cls.options_of(config).n, config.dim, 2 * config.layers
        learned = cls.options_of(config).head is Head.learned
        rows = n * n + 2 * n
        return Added(
            parameters=sites * (rows * n * dim + rows + 3) + learned * (n * n * dim + n + 1),
            mixing=sites * rows * dim + learned * n * dim,
            projections=sites * rows * n * dim + learned * n * n * dim,
            carried=(n + 1) * dim,
        )
