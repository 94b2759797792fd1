"""Decoding with a cache, compared with a pass over the whole window; and the share of depth reads.

    python bench/generate.py --json found.json        # on a CPU: 8 transformer blocks of width 256
    python bench/generate.py --device cuda --shape paper --context 2048

A round times for every model in turn: one step of the decoder at the end of a window of --context
tokens; one pass over that window without a cache; the depth reads of the step alone (all that the
residual path does, with the outputs of the sub-layers given); and these reads in two phases, by
depth blocks. Shares and ratios are medians over the rounds of quotients inside a round, so they
also hold on a busy machine; tokens/s do not. Weights are random, and no figure depends on them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import Tensor

from lrattnres.model.decoder import Decoder
from lrattnres.model.transformer import Transformer

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
    """A model whose queries are not zero, for a window of --context tokens."""
    shape = common.SHAPES[options.shape] | {"context": options.context}
    model = common.build(name, shape, options, training=False)
    for name, parameter in model.router.named_parameters():
        if name == "queries":
            torch.nn.init.normal_(parameter, std=0.02)
    return model.requires_grad_(False)


class Subject:
    """One model with a window that is full except for one token, and four things to time.

    Args:
        name: residual[:blocks[:rank]].
        options: Of this script.
    """

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
        """Logits of the last token by the decoder; the cache is then as it was."""
        lengths = self.before.lengths
        logits = self.decoder.head(self.decoder.feed(self.before, self.window[:, -1:]))[:, 0]
        self.before.lengths = lengths
        return logits

    def whole(self) -> Tensor:
        """The same logits by a pass over the whole window, as without a cache."""
        return self.model(self.window, self.model.mask(None, *self.window.shape))[:, -1]

    def reads(self) -> Tensor:
        """All that the residual path does in a step."""
        path, last = self.decoder.one.router, len(self.model.sublayers)
        state = path.begin(self.value)
        for site in range(last):
            path.read(state, site)
            state = path.write(state, site, self.output)
        return path.read(state, last).x

    def reads_two_phase(self) -> Tensor:
        """The same, with the closed sources read once for all sites of a depth block."""
        path = self.decoder.one.router
        path.decodes(together=True)
        found = self.reads()
        path.decodes(together=False)
        return found


def warm_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call right after another one, so that the caches are warm."""
    call()
    return common.seconds(call, device)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times every model; returns medians, and medians of the quotients inside each round."""
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
    chosen = {"options": common.words(options), "rows": rows}
    return common.machine(torch.device(options.device)) | chosen


def main() -> None:
    parser = common.options(__doc__, model=True)
    parser.set_defaults(variants=VARIANTS)
    parser.add_argument(
        "--context", type=int, default=512, help="tokens of the window at whose end is measured"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    common.settle(options)
    found = measure(options)
    print(
        f"{found['device']}, context {options.context}, batch {options.batch}, "
        f"{options.rounds} rounds"
    )
    line = (
        "{model:14}{tokens_per_second:9.1f} tokens/s, {faster:6.1f} x the whole pass; depth reads "
        "{depth_share:6.1%} of a step, in two phases {two_phase_over_single:.2f} x that"
    )
    for row in found["rows"]:
        print(line.format(**row))
    common.write_json(options.json, found)


if __name__ == "__main__":
    main()
