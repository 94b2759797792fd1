"""Training steps (forward, loss, backward) of every variant, compared with the baseline's.

Head and loss are those of training.

    python bench/step.py                            # on a CPU: 8 transformer blocks of width 256
    python bench/step.py --device cuda --shape paper --compile regions

Each round takes one step of every model in turn; a ratio is the median over rounds of variant /
baseline. Ratios hold on a busy machine, times do not. With --compile regions the baseline's
addition and norm are one compiled kernel all the same, so that it does not look slower than it is.
At --budget seconds it ends after the current round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import common
import torch
from torch import Tensor

from lrattnres.config import Compile
from lrattnres.distributed.parallel import COMPILE_MODES
from lrattnres.model.transformer import Transformer
from lrattnres.residual.cost import cost

VARIANTS = {
    "tiny": ["s_lr:3:4", "p_lr:3:4", "attn_res:full"],
    "demo": ["s_lr:4:16", "p_lr:4:16", "attn_res:4", "attn_res:full"],
    "small": ["s_lr:4:16", "p_lr:4:16", "attn_res:4", "attn_res:full"],
    "paper": ["s_lr:8:64", "s_lr:4:64", "p_lr:8:64", "attn_res:8", "s_lr:16:64", "s_lr:full:64"],
}


def build(name: str, options: argparse.Namespace) -> Transformer:
    """The model of a variant, compiled as the options say."""
    compiled, shape = options.compile != "off", common.SHAPES[options.shape]
    model = common.build(
        name,
        shape,
        options,
        kernels=options.kernels,
        training=True,
        compiled=compiled,
        batch=options.batch,
    )
    COMPILE_MODES[Compile(options.compile)](model)
    if options.compile == "regions" and not model.router.attends:
        # a few additions and a norm, slow if they are not compiled
        model.router.write = torch.compile(model.router.write)  # type: ignore[method-assign]
        model.router.read = torch.compile(model.router.read)  # type: ignore[method-assign]
    return model


def step(model: Transformer, tokens: Tensor) -> None:
    """One forward and backward pass; the gradients are dropped."""
    targets = tokens.roll(-1, 1)
    objective = model(tokens, model.mask(None, *tokens.shape), targets=targets, z_loss=1e-5)
    (objective.total / tokens.numel()).backward()
    for parameter in model.parameters():
        parameter.grad = None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times of every model, and their ratios to the baseline."""
    torch._dynamo.config.recompile_limit = 1000
    shape, device = common.SHAPES[options.shape], torch.device(options.device)
    start = time.monotonic()
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
            times[name].append(common.seconds(partial(step, model, tokens), device))
        rates.append(
            common.matmul_rate(
                tokens.numel(),
                shape["dim"],
                2 * shape["mlp_width"],
                models["baseline"].dtype,
                device,
            )
        )
    base = times["baseline"]
    flops = cost(models["baseline"].config).training_flops * tokens.numel()
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
        "options": common.words(options),
        "rounds": len(base),
        "share_of_matmul_rate": share,
        "rows": rows,
    }


def main() -> None:
    parser = common.options(__doc__, model=True)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--compile", default="model", choices=("model", "regions", "off"))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--budget", type=float, default=3600, help="seconds after which no further round begins"
    )
    options = parser.parse_args()
    options.variants = VARIANTS[options.shape] if options.variants is None else options.variants
    common.settle(options)
    found = measure(options)
    print(
        f"{found['device']}, {found['rounds']} rounds; the baseline's products, with attention, at "
        f"{found['share_of_matmul_rate']:.0%} of the rate of one large product"
    )
    line = "{model:16}{kernels:12}{median_ms:10.2f} ms{ratio:9.4f} x{ratio_of_minima:9.4f} x min"
    for row in found["rows"]:
        print(line.format(**row))
    common.write_json(options.json, found)


if __name__ == "__main__":
    main()
