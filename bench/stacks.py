"""The stack of reads and writes of residual paths, ours beside other packages, without sub-layers.

    python bench/stacks.py                                     # 16 sub-layers of width 256, CPU
    python bench/stacks.py --dim 1024 --layers 24 --device cuda

Every stack computes h of each site, takes o = RMSNorm(h) for what the sub-layer writes, and ends
with what the head reads; forward and backward are timed, with gradients of the embedding and all
parameters. All stacks are compiled whole (--eager: not at all). Each round takes one step of every
stack in turn; a ratio is the median over rounds of ours / theirs, so below one ours is faster.
Packages that are not installed are left out, and said:

    hyper-connections          hc (norm=rms) and mhc, n streams
    deep-cross-attention       dca, its GRN with three ways and with one
    transformers               mhc, DeepSeek-V4's hyper-connection
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from lrattnres.config import ModelConfig
from lrattnres.kernels.backends import KERNELS
from lrattnres.residual.base import path_of, pattern_of


def normed(x: Tensor) -> Tensor:
    """RMSNorm without a gain, over the last dimension."""
    return rms_norm(x, x.shape[-1:])


class Ours(nn.Module):
    """A path of this package.

    Args:
        residual: its name.
        layers, dim: L and d.
        options: model.path.
    """

    def __init__(self, residual: str, layers: int, dim: int, **options: Any):
        super().__init__()
        sizes = dict(zip(common.SIZES, (layers, dim, 1, dim, 8, 8), strict=True))
        config = ModelConfig(residual, None, None, path=options, **sizes)
        self.path, self.sites = path_of(config).build(config, KERNELS["reference"]), 2 * layers
        roles = path_of(config).roles(config)
        for name, parameter in self.path.named_parameters():
            start = roles[pattern_of(name)].start
            whole = start(parameter.shape, torch.Generator()) if callable(start) else start
            parameter.data.copy_(torch.as_tensor(whole))

    def forward(self, embedding: Tensor) -> Tensor:
        state = self.path.begin(embedding)
        for site in range(self.sites):
            read = self.path.read(state, site)
            parts = [part for part in read if part is not None]
            state = self.path.write(state, site, sum(parts[1:], parts[0]))
        return self.path.read(state, self.sites).x


class Hyper(nn.Module):
    """PyPI's hyper-connections: n streams, in the batch dimension."""

    def __init__(self, function: str, layers: int, dim: int, n: int):
        super().__init__()
        package = importlib.import_module("hyper_connections." + function.split(".")[0])
        kind = getattr(package, function.split(".")[1])
        expand = package.get_expand_reduce_stream_functions
        self.expand, self.reduce = expand(n)
        self.connections = nn.ModuleList(
            kind(n, dim=dim, layer_index=site) for site in range(2 * layers)
        )

    def forward(self, embedding: Tensor) -> Tensor:
        streams = self.expand(embedding)
        for connection in self.connections:
            hidden, write = connection(streams)
            streams = write(normed(hidden))
        return normed(self.reduce(streams))


class CrossAttention(nn.Module):
    """PyPI's deep-cross-attention: its GRN, wired as the package's own blocks are."""

    def __init__(self, layers: int, dim: int, ways: int):
        super().__init__()
        grn = importlib.import_module("deep_cross_attention.dca_gpt").GRN
        self.reads = nn.ModuleList(grn(dim, block, ways) for block in range(1, layers + 1))
        self.last, self.ways = grn(dim, layers + 1, 1), ways

    def forward(self, embedding: Tensor) -> Tensor:
        sources = [embedding]
        for read in self.reads:
            found = read(torch.stack(sources))
            ways = found.unbind(0) if self.ways > 1 else (found,)
            attended = sum(map(normed, ways[1:]), normed(ways[0]))
            sources.append(attended + normed(ways[0] + attended))
        return normed(self.last(torch.stack(sources)))


class DeepSeek(nn.Module):
    """transformers' DeepSeek-V4: manifold-constrained hyper-connections and their head."""

    def __init__(self, layers: int, dim: int, n: int):
        super().__init__()
        package = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
        settings = importlib.import_module(
            "transformers.models.deepseek_v4.configuration_deepseek_v4"
        ).DeepseekV4Config(
            hc_mult=n, hc_sinkhorn_iters=20, hc_eps=1e-6, hidden_size=dim, rms_norm_eps=1e-6
        )
        self.n = n
        self.connections = nn.ModuleList(
            package.DeepseekV4HyperConnection(settings) for _ in range(2 * layers)
        )
        self.head = package.DeepseekV4HyperHead(settings)
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, 0.01) if "scale" in name else nn.init.zeros_(parameter)

    def forward(self, embedding: Tensor) -> Tensor:
        streams = torch.stack([embedding] * self.n, dim=-2)
        for connection in self.connections:
            post, comb, hidden = connection(streams)
            output = normed(hidden)
            mixed = comb.to(streams.dtype).transpose(-1, -2) @ streams
            streams = post.to(streams.dtype).unsqueeze(-1) * output.unsqueeze(-2) + mixed
        return normed(self.head(streams))


Maker = Callable[[], nn.Module]


def pairs(layers: int, dim: int, n: int) -> dict[str, tuple[Maker, Maker]]:
    """What is compared: name -> (ours, theirs)."""
    sizes = (layers, dim)
    hyper = "hyper_connections.HyperConnections"
    manifold = "manifold_constrained_hyper_connections.ManifoldConstrainedHyperConnections"
    return {
        f"hyper-connections: hc n={n}": (
            lambda: Ours("hc", *sizes, n=n, norm="rms"),
            lambda: Hyper(hyper, *sizes, n),
        ),
        f"hyper-connections: mhc n={n}": (
            lambda: Ours("mhc", *sizes, n=n, head="sum"),
            lambda: Hyper(manifold, *sizes, n),
        ),
        f"transformers: mhc n={n}": (
            lambda: Ours("mhc", *sizes, n=n),
            lambda: DeepSeek(*sizes, n),
        ),
        "deep-cross-attention: dca ways=3": (
            lambda: Ours("dca", *sizes),
            lambda: CrossAttention(*sizes, 3),
        ),
        "deep-cross-attention: dca ways=1": (
            lambda: Ours("dca", *sizes, ways=1),
            lambda: CrossAttention(*sizes, 1),
        ),
    }


def step(stack: nn.Module, embedding: Tensor, probe: Tensor) -> None:
    """Forward and backward; the gradients are dropped."""
    (stack(embedding) * probe).sum().backward()
    embedding.grad = None
    for parameter in stack.parameters():
        parameter.grad = None


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--n", type=int, default=4, help="streams")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="pairs whose name contains this")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    device, rows = torch.device(chosen.device), []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (1, chosen.tokens, chosen.dim)
    embedding = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
    probe = torch.randn(shape, device=device, dtype=dtype)
    compared = pairs(chosen.layers, chosen.dim, chosen.n)
    wanted = {name: makers for name, makers in compared.items() if chosen.only in name}
    if not wanted:
        parser.error(f"--only {chosen.only}: in no name; there are {', '.join(compared)}")
    for name, makers in wanted.items():
        torch._dynamo.reset()
        try:
            ours, theirs = (make().to(device) for make in makers)
        except ImportError as error:
            print(f"{name}: left out: {error}", flush=True)
            continue
        for stack in () if chosen.eager else (ours, theirs):
            stack.compile()
        for stack in (ours, theirs) * 2:
            step(stack, embedding, probe)
        times: list[tuple[float, float]] = []
        for turn in range(chosen.rounds):
            order = (ours, theirs) if turn % 2 else (theirs, ours)
            taken = {
                stack: common.seconds(lambda stack=stack: step(stack, embedding, probe), device)
                for stack in order
            }
            times.append((taken[ours], taken[theirs]))
        ratio = statistics.median(one / other for one, other in times)
        medians = [1e3 * statistics.median(each) for each in zip(*times, strict=True)]
        rows.append({"stack": name, "ours_ms": medians[0], "theirs_ms": medians[1], "ratio": ratio})
        found = common.machine(device) | {"options": common.words(chosen), "rows": rows}
        common.write_json(chosen.json, found)
        print(f"{name:36}{medians[0]:9.2f} ms{medians[1]:9.2f} ms{ratio:8.3f} x", flush=True)


if __name__ == "__main__":
    main()
