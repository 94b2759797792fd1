"""A training step (forward, loss, backward) of every variant over the baseline's, alternating in one run.

    python bench/step.py                            # on a CPU: 8 blocks of width 256
    python bench/step.py --device cuda --shape paper --compile regions

Each round takes one step of every model in turn; a ratio is the median over rounds of variant / baseline. Time another
program's absence too: ratios survive a busy machine, times do not. With --compile regions the baseline's addition and
norm are still one compiled kernel, so that it is not made to look slow. Ends early, after whole rounds, at --budget seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import Tensor

from lrattnres.config import ModelConfig
from lrattnres.kernels.backends import choose_kernels
from lrattnres.model.attention import choose_attention
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import path_of

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 3, "dim": 32, "heads": 2, "mlp_width": 48, "context": 8, "vocabulary": 64},
    "demo": {
        "layers": 6,
        "dim": 128,
        "heads": 4,
        "mlp_width": 352,
        "context": 256,
        "vocabulary": 257,
    },
    "small": {
        "layers": 8,
        "dim": 256,
        "heads": 4,
        "mlp_width": 704,
        "context": 512,
        "vocabulary": 4096,
    },
    "paper": {
        "layers": 24,
        "dim": 1024,
        "heads": 16,
        "mlp_width": 2816,
        "context": 2048,
        "vocabulary": 100277,
    },
}
VARIANTS = {
    "tiny": ["s_lr:3:4", "p_lr:3:4", "attn_res:full"],
    "demo": ["s_lr:4:16", "p_lr:4:16", "attn_res:4", "attn_res:full"],
    "small": ["s_lr:4:16", "p_lr:4:16", "attn_res:4", "attn_res:full"],
    "paper": ["s_lr:8:32", "s_lr:4:32", "p_lr:8:32", "attn_res:8", "s_lr:16:32", "s_lr:full:32"],
}


def build(name: str, options: argparse.Namespace) -> Transformer:
    """`residual[:blocks[:rank]]` as a model."""
    residual, blocks, rank = [*name.split(":"), *("full", "")[name.count(":") :]]
    shape = SHAPES[options.shape]
    config = ModelConfig(
        residual, int(rank) if rank else None, None if blocks == "full" else int(blocks), **shape
    )
    config = path_of(config).settled(config)[0]
    device, dtype = torch.device(options.device), getattr(torch, options.precision)
    attention = choose_attention("auto", device, dtype, training=True)
    kernels = choose_kernels(options.kernels, device, dtype, compiled=options.compile != "off")
    model = build_model(
        config, seed=0, device=device, attention=attention, dtype=dtype, kernels=kernels
    )
    if options.compile == "model":
        model.compile(fullgraph=True)
    if options.compile == "regions":
        for sublayer in model.sublayers:
            sublayer.compile()
        if not model.router.attends:  # a few additions and a norm, which are not to look slow
            model.router.write = torch.compile(model.router.write)  # type: ignore[method-assign]
            model.router.read = torch.compile(model.router.read)  # type: ignore[method-assign]
    return model


def step(model: Transformer, tokens: Tensor) -> None:
    logits = model(tokens, model.mask(None, *tokens.shape))
    F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten()).backward()
    for parameter in model.parameters():
        parameter.grad = None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times of every model, and their ratios to the baseline."""
    torch._dynamo.config.recompile_limit = 1000
    shape, device, start = SHAPES[options.shape], torch.device(options.device), time.monotonic()
    tokens = torch.randint(shape["vocabulary"], (options.batch, shape["context"]), device=device)
    models: dict[str, Transformer] = {}
    for name in ["baseline", *options.variants]:
        if models and time.monotonic() - start > 0.7 * options.budget:
            print(f"{name}: no time left to compile it", flush=True)
            continue
        models[name] = build(name, options)
        for _ in range(3):
            step(models[name], tokens)
        print(f"{name}: ready after {time.monotonic() - start:.0f} s", flush=True)
    times: dict[str, list[float]] = {name: [] for name in models}
    rates = []
    for _ in range(options.rounds):
        if times["baseline"] and time.monotonic() - start > options.budget:
            break
        for name, model in models.items():
            times[name].append(common.seconds(lambda model=model: step(model, tokens), device))  # type: ignore[misc]
        rates.append(
            common.matmul_rate(
                tokens.numel(),
                shape["dim"],
                2 * shape["mlp_width"],
                models["baseline"].dtype,
                device,
            )
        )
    base, flops = (
        times["baseline"],
        6 * sum(p.numel() for p in models["baseline"].parameters()) * tokens.numel(),
    )
    rows = [
        {
            "model": name,
            "kernels": models[name].kernels.name,
            "median_ms": 1e3 * statistics.median(found),
            "min_ms": 1e3 * min(found),
            "ratio": statistics.median(
                time / reference for time, reference in zip(found, base, strict=True)
            ),
            "ratio_of_minima": min(found) / min(base),
        }
        for name, found in times.items()
    ]
    share = flops / min(base) / max(rates)
    return common.machine(device) | {
        "options": vars(options),
        "rounds": len(base),
        "share_of_matmul_rate": share,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument(
        "--variants", nargs="*", help="residual[:blocks[:rank]]; blocks may be `full`"
    )
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU"
    )
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--compile", default="model", choices=("model", "regions", "off"))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--budget", type=float, default=3600, help="seconds after which no further round begins"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.variants = VARIANTS[options.shape] if options.variants is None else options.variants
    options.precision = options.precision or ("bfloat16" if options.device == "cuda" else "float32")
    if options.threads:
        torch.set_num_threads(options.threads)
    found = measure(options)
    print(f"{found['device']}, {found['rounds']} rounds; baseline: 6·parameters·tokens at {found['share_of_matmul_rate']:.0%}"
          " of the matmul rate")  # fmt: skip
    for row in found["rows"]:
        print(
            "{model:16}{kernels:12}{median_ms:10.2f} ms{ratio:9.4f} x{ratio_of_minima:9.4f} x of minima".format(
                **row
            )
        )
    found["options"] = {name: str(value) for name, value in vars(options).items()}
    common.write_json(options.json, found)


if __name__ == "__main__":
    main()
