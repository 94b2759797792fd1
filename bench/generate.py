"""Decoding with a cache against running the whole window again, and what depth reads cost of a step, alternating in one run.

    python bench/generate.py --json found.json                 # on a CPU: 8 blocks of width 256
    python bench/generate.py --device cuda --shape paper --context 2048

A round takes, for every model in turn: one step of the decoder at the end of a window of --context tokens, one pass over that
window without a cache, the step's depth reads alone (everything that the router does in a step, with the sub-layers'
outputs given), and those in two phases, by blocks. Shares and ratios are medians over the rounds of
quotients inside a round, so they survive a busy machine; tokens/s do not. Weights are random: no figure depends on them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from step import SHAPES
from torch import Tensor

from lrattnres.config import ModelConfig
from lrattnres.kernels.backends import choose_kernels
from lrattnres.model.attention import choose_attention
from lrattnres.model.decoder import Decoder
from lrattnres.model.transformer import Transformer, build_model

VARIANTS = [
    "baseline",
    "attn_res",
    "attn_res:4",
    "s_lr:full:32",
    "s_lr:4:32",
    "p_lr:4:32",
    "delta:4",
]


def build(name: str, options: argparse.Namespace) -> Transformer:
    """`residual[:blocks[:rank]]` as a model, with queries that are not zero."""
    residual, blocks, rank = [*name.split(":"), *("full", "")[name.count(":") :]]
    shape = SHAPES[options.shape] | {"context": options.context}
    config = ModelConfig(
        residual, int(rank) if rank else None, None if blocks == "full" else int(blocks), **shape
    )
    device, dtype = torch.device(options.device), getattr(torch, options.precision)
    attention = choose_attention("auto", device, dtype, training=False)
    kernels = choose_kernels("auto", device, dtype, compiled=False)
    model = build_model(
        config, seed=0, device=device, attention=attention, dtype=dtype, kernels=kernels
    )
    for name, parameter in model.router.named_parameters():
        if name == "queries":
            torch.nn.init.normal_(parameter, std=0.02)
    return model.requires_grad_(False)


class Subject:
    """One model with a window that is full but for one token, and four things to time."""

    def __init__(self, name: str, options: argparse.Namespace):
        self.model, self.device = build(name, options), torch.device(options.device)
        vocabulary = self.model.config.vocabulary or 0
        self.window = torch.randint(
            1, vocabulary, (options.batch, options.context), device=self.device
        )
        self.decoder = Decoder(self.model, separator=0, two_phase=False)
        self.before = self.decoder.cache(options.batch)
        self.decoder.feed(self.before, self.window[:, :-1])
        self.value = torch.randn(
            options.batch, 1, self.model.config.dim, device=self.device, dtype=self.model.dtype
        )
        path = self.decoder.one.router
        self.output = torch.randn(
            *self.value.shape[:-1],
            path.dim + path.emit_dim,
            device=self.device,
            dtype=self.model.dtype,
        )

    def step(self) -> Tensor:
        """The last token of the window; the cache is then as it was."""
        lengths = self.before.lengths
        logits = self.decoder.head(self.decoder.feed(self.before, self.window[:, -1:]))[:, 0]
        self.before.lengths = lengths
        return logits

    def whole(self) -> Tensor:
        """The same logits by a pass over the whole window, as decoding without a cache makes them."""
        return self.model(self.window, self.model.mask(None, *self.window.shape))[:, -1]

    def reads(self) -> Tensor:
        """What the residual path does in a step."""
        path, last = self.decoder.one.router, len(self.model.sublayers)
        state = path.begin(self.value)
        for site in range(last):
            path.read(state, site)
            state = path.write(state, site, self.output)
        return path.read(state, last).x

    def reads_two_phase(self) -> Tensor:
        """The same, with the closed sources read once for all sites of a block."""
        path = self.decoder.one.router
        path.decodes(together=True)
        found = self.reads()
        path.decodes(together=False)
        return found


def warm_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """One run right after another of the same: the caches hold what it needs, and not what was measured before it."""
    call()
    return common.seconds(call, device)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times of every model, and the quotients inside each round."""
    subjects = {name: Subject(name, options) for name in options.variants}
    names = ("step", "whole", "reads", "reads_two_phase")
    times: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    with torch.no_grad():
        for name, subject in subjects.items():
            apart = (subject.step() - subject.whole()).abs().max().item()
            print(f"{name}: the two ways differ by {apart:.1e} in a logit", flush=True)
        for turn in range(options.rounds + 2):
            for name, subject in subjects.items():
                found = {key: warm_seconds(getattr(subject, key), subject.device) for key in names}
                times[name] += [found] if turn >= 2 else []
    rows = []
    for name, rounds in times.items():
        middle = {
            f"{key}_ms": 1e3 * statistics.median(found[key] for found in rounds) for key in names
        }
        rows.append(
            {"model": name, **middle}
            | {"tokens_per_second": options.batch * 1e3 / middle["step_ms"]}
            | {"tokens_per_second_whole": options.batch * 1e3 / middle["whole_ms"]}
            | {"faster": statistics.median(found["whole"] / found["step"] for found in rounds)}
            | {"depth_share": statistics.median(found["reads"] / found["step"] for found in rounds)}
            | {
                "two_phase_over_single": statistics.median(
                    found["reads_two_phase"] / found["reads"] for found in rounds
                )
            }
        )
    words = {name: str(value) for name, value in vars(options).items()}
    return common.machine(torch.device(options.device)) | {"options": words, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument(
        "--variants",
        nargs="*",
        default=VARIANTS,
        help="residual[:blocks[:rank]]; blocks may be `full`",
    )
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU"
    )
    parser.add_argument(
        "--context", type=int, default=512, help="tokens of the window at whose end is measured"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.precision = options.precision or ("bfloat16" if options.device == "cuda" else "float32")
    if options.threads:
        torch.set_num_threads(options.threads)
    found = measure(options)
    print(
        f"{found['device']}, context {options.context}, batch {options.batch}, {options.rounds} rounds"
    )
    for row in found["rows"]:
        print(
            "{model:14}{tokens_per_second:9.1f} tokens/s, {faster:6.1f} x the whole pass; depth reads {depth_share:6.1%} of a "
            "step, in two phases {two_phase_over_single:.2f} x that".format(**row)
        )
    common.write_json(options.json, found)


if __name__ == "__main__":
    main()
