"""Smallest and largest value of every number that has bounds of its own; None: no bound on that side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

Bounds = dict[str, tuple[float | None, float | None]]

BOUNDS: Bounds = {
    "seed": (0, 2**63 - 1),
    "steps": (1, None),
    "global_batch": (1, None),
    "micro_batch": (1, None),
    "max_bad_steps": (1, None),
    "z_loss": (0, None),
    "threads": (1, None),
    "model.layers": (1, None),
    "model.dim": (1, None),
    "model.heads": (1, None),
    "model.mlp_width": (1, None),
    "model.context": (1, None),
    "model.rope_base": (1, None),
    "model.init_std": (0, None),
    "model.kv_heads": (1, None),
    "model.head_dim": (2, None),
    "model.norm_eps": (0, 0.1),
    "model.rope_scaling.factor": (1, None),
    "model.rope_scaling.low": (1e-9, None),
    "model.rope_scaling.high": (1e-9, None),
    "model.rope_scaling.first_context": (1, None),
    "model.depth.heads": (1, None),
    "model.depth.query_std": (0, None),
    "optimizer.muon_lr": (0, None),
    "optimizer.adam_lr": (0, None),
    "optimizer.routing_lr": (0, None),
    "optimizer.warmup": (0, None),
    "optimizer.warmdown": (0, 1),
    "optimizer.final": (0, 1),
    "optimizer.momentum": (0, 0.9999),
    "optimizer.momentum_low": (0, 0.9999),
    "optimizer.momentum_rise": (0, None),
    "optimizer.momentum_fall": (0, None),
    "optimizer.muon_weight_decay": (0, None),
    "optimizer.iterations": (1, 20),
    "optimizer.adam_beta1": (0, 0.9999),
    "optimizer.adam_beta2": (0, 0.99999),
    "optimizer.adam_eps": (1e-30, None),
    "optimizer.clip": (1e-12, None),
    "checkpoint.every": (1, None),
    "checkpoint.keep_last": (1, None),
    "checkpoint.keep_every": (1, None),
    "evaluation.every": (1, None),
    "evaluation.tokens": (1, None),
    "evaluation.batch": (1, None),
    "evaluation.diagnostics_every": (1, None),
    "evaluation.diagnostics_tokens": (1, None),
    "data.max_files": (1, None),
    "data.max_tokens": (1, None),
    "data.workers": (0, 256),
    "data.ahead": (1, None),
    "data.memory": (0, None),
    "data.timeout": (0.001, None),
    "data.retries": (0, 100),
    "instruments.log": (1, None),
    "instruments.gradients": (1, None),
    "instruments.depth": (1, None),
    "instruments.ranks": (1, None),
    "parallel.shard_degree": (1, None),
    "parallel.prefetch": (0, None),
    "parallel.timeout": (1, None),
}

GENERATE_BOUNDS: Bounds = {
    "tokens": (1, None),
    "samples": (1, None),
    "seed": (0, 2**63 - 1),
    "temperature": (0, None),
    "top_k": (1, None),
    "top_p": (1e-12, 1),
    "min_p": (0, 1),
    "batch": (1, None),
    "threads": (1, None),
}
INSPECT_BOUNDS: Bounds = {"first": (0, None), "shown": (1, 512), "threads": (1, None)}


def limits(values: dict[str, Any], bounds: Bounds) -> Iterator[str]:
    """A fault for each of `values` (dotted key -> value) that lies outside its bounds."""
    for key, (low, high) in bounds.items():
        value = values.get(key)
        if isinstance(value, float) and math.isinf(value):
            yield f"{key}={value}: must be a finite number"
        elif value is not None and not (
            (low is None or value >= low) and (high is None or value <= high)
        ):
            span = (
                f"between {low} and {high}"
                if high is not None and low is not None
                else f"at least {low}"
            )
            yield f"{key}={value}: must be {span}"
