"""Everything that only a GPU can tell, in one run that ends itself.

    python bench/gpu.py --json gpu.json          (make gpu)

Needs torch and Triton; what else is missing (hydra-core for train.py, other packages to compare
with) is said, and left out. The file is written anew after every figure, so that a run that is cut
leaves all that it had. A figure that fails is recorded with its error, and the next one follows. At
--limit seconds the script ends, whatever it does. The parts, in this order:

    0  what the rest is read against: a copy, products of the model's shapes, the head with and
       without padded rows, the forms of the loss, attention with and without documents
    1  kernels against float64, where memory that nobody wrote to holds NaN
    2  a training step, baseline against s_lr, in alternating rounds
    3  train.py itself, and the optimizer
    4  the operators of depth attention, as CUDA graphs over rotating inputs
    5  steps of other residual paths
    6  other packages: a read of nine sources, and a chain of 48 sites
    7  a profile of one step

Kernels are compiled by parallel processes from the first second on. `TRITON_INTERPRET=1 python
bench/gpu.py --rehearse` goes the same way on a CPU with a tiny model, to see whether it would run.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import common
import rivals
import torch
from torch import Tensor

from lrattnres import depth_attention
from lrattnres.config import ModelConfig
from lrattnres.kernels.backends import KERNELS
from lrattnres.kernels.launch import INTERPRETED
from lrattnres.model.attention import BACKENDS
from lrattnres.model.head import LOSSES, padded
from lrattnres.model.loss import window_objective
from lrattnres.model.transformer import Transformer
from lrattnres.residual.base import path_of
from lrattnres.residual.fused.schedule import (
    Step,
    backward_traffic,
    cheapest,
    forward_traffic,
    steps,
)
from lrattnres.residual.plan import DepthPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2}  # products of streams lose most
SEPARATOR = 0  # every so many tokens of a window, so that there are documents
OURS = "s_lr:8:64"
OTHERS = ("s_lr:4:64", "s_lr:full:64", "p_lr:8:64", "attn_res:8", "s_lr:16:64")


@dataclass(frozen=True)
class Size:
    """How large everything is. `rounds` alternate in part 2, `fewer` in part 5."""

    shape: dict[str, Any]
    batch: int
    compile: str
    rounds: int
    fewer: int
    repeats: int
    tokens: int  # of part 1
    path: dict[str, int]  # sizes of a model of part 1
    training: tuple[str, ...]  # settings of train.py
    errors: tuple[tuple[int, int, int], ...]  # sources, d and r of single reads in part 1
    variants: tuple[str, ...] = OTHERS
    ours: str = OURS


PAPER = Size(
    common.SHAPES["paper"],
    batch=8,
    compile="model",
    rounds=30,
    fewer=10,
    repeats=20,
    tokens=300,
    path={"layers": 6, "dim": 256, "heads": 4, "mlp_width": 512, "context": 64, "vocabulary": 64},
    training=(
        *("experiment=paper", "data=docstrings", "tokenizer=bytes", "model.vocabulary=100277"),
        *("steps=20", "global_batch=32", "evaluation.tokens=100000"),
        *("evaluation.tokens_in_training=null", "checkpoint.every=1000", "optimizer.warmup=4"),
        *("optimizer.momentum_rise=0", "optimizer.momentum_fall=0"),
    ),
    errors=((1, 96, 8), (9, 1024, 32), (9, 1024, 1024), (2, 4096, 33), (17, 1000, 64)),
)
REHEARSAL = Size(
    common.SHAPES["tiny"],
    batch=2,
    compile="off",
    rounds=1,
    fewer=1,
    repeats=1,
    tokens=5,
    path={"layers": 2, "dim": 16, "heads": 2, "mlp_width": 32, "context": 8, "vocabulary": 8},
    training=(
        *("experiment=demo", "model=demo", "model.layers=2", "model.dim=32", "model.heads=2"),
        *("model.mlp_width=48", "model.context=16", "steps=2", "global_batch=2", "micro_batch=2"),
        *("optimizer.warmup=1", "evaluation.tokens=32", "evaluation.every=null", "device=cpu"),
        *("evaluation.diagnostics_every=null", "evaluation.diagnostics_tokens=32"),
    ),
    errors=((2, 16, 4),),
    variants=("attn_res:full",),
    ours="s_lr:3:4",
)


# --- the run -------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """part: its number; name: unique in it; measure: returns what is recorded; needs: seconds that
    must be left for it to be tried.
    """

    part: int
    name: str
    measure: Callable[[], dict[str, Any]]
    needs: float = 3.0


@dataclass
class Report:
    """All figures so far, in a file that is complete after every one."""

    path: Path | None
    limit: float
    begin: float = field(default_factory=lambda: time.monotonic())
    figures: list[dict[str, Any]] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=dict)
    ahead: list[subprocess.Popen[bytes]] = field(default_factory=list)  # what compiles kernels

    @property
    def left(self) -> float:
        return self.limit - (time.monotonic() - self.begin)

    def take(self, figure: Figure) -> dict[str, Any]:
        """Measures a figure, or records why it could not be."""
        record: dict[str, Any] = {"part": figure.part, "figure": figure.name}
        start = time.monotonic()
        if self.left < figure.needs:
            record["left_out"] = f"{self.left:.0f} seconds were left, {figure.needs:.0f} needed"
        else:
            try:
                record |= figure.measure()
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {error}"[:2000]
                if DEVICE.type == "cuda":
                    torch.cuda.empty_cache()
        record["seconds"] = round(time.monotonic() - start, 2)
        self.figures.append(record)
        self.write()
        shown = {key: _rounded(value) for key, value in record.items() if key not in HIDDEN}
        print(f"{record['part']} {figure.name}: {json.dumps(shown)}", flush=True)
        return record

    def end(self, by_limit: bool) -> None:
        """Stops what compiles ahead, and says how it went: None for a process that was not done."""
        self.head["ended_by_limit"] = by_limit
        self.head["exit_codes_of_compiling_ahead"] = [process.poll() for process in self.ahead]
        self.write()
        for process in self.ahead:
            process.kill()

    def write(self) -> None:
        """Never leaves half a file."""
        if self.path is None:
            return
        record = self.head | {"limit": self.limit, "figures": self.figures}
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(record, indent=1) + "\n")
        draft.replace(self.path)


HIDDEN = ("part", "figure", "kernels", "table", "times_ms")


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _end(report: Report) -> None:
    """Called by a timer: what runs is not waited for."""
    report.end(by_limit=True)
    print(f"{report.limit:.0f} seconds are over", flush=True)
    os._exit(0)


# --- how time is taken ---------------------------------------------------------------------------


class Time(NamedTuple):
    """Milliseconds of a call: on the device, and until it returned to the host."""

    device: float
    host: float


def timed(call: Callable[[], Any]) -> Time:
    """One call, with the device idle before it; on a CPU both times are the same."""
    if DEVICE.type != "cuda":
        begin = time.perf_counter()
        call()
        spent = 1e3 * (time.perf_counter() - begin)
        return Time(spent, spent)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    first.record()
    call()
    last.record()
    host = 1e3 * (time.perf_counter() - begin)
    torch.cuda.synchronize()
    return Time(first.elapsed_time(last), host)


def figures_of(times: list[Time]) -> dict[str, float]:
    """Median and spread (half the distance between the quartiles) of calls."""
    device = sorted(each.device for each in times)
    quarter = len(device) // 4
    return {
        "ms": statistics.median(device),
        "spread_ms": (device[-1 - quarter] - device[quarter]) / 2,
        "fastest_ms": device[0],
        "host_ms": statistics.median(each.host for each in times),
    }


def several(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Of a call, after two that compile and warm up, and the most memory that it took."""
    for _ in range(2):
        call()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    found = figures_of([timed(call) for _ in range(repeats)])
    if DEVICE.type == "cuda":
        found["peak_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    return found


@cache
def copy_rate() -> float:
    """Bytes a second, reads and writes counted."""
    return common.copy_rate(DEVICE)


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE).requires_grad_(grad)


def gradients(call: Callable[..., Tensor], *leaves: Tensor) -> None:
    """Forward and backward pass, without the accumulation of gradients."""
    result = call(*leaves)
    torch.autograd.grad(result, leaves, torch.ones_like(result))


# --- 0: what the rest is read against ------------------------------------------------------------


def yardsticks(size: Size) -> Iterator[Figure]:
    yield Figure(0, "copy", lambda: {"gb_s": copy_rate() / 1e9})
    shape = size.shape
    tokens, d, m = size.batch * shape["context"], shape["dim"], shape["mlp_width"]

    def product(inputs: int, outputs: int) -> dict[str, Any]:
        left, right = random(tokens, inputs), random(inputs, outputs)
        found = several(lambda: left @ right, size.repeats)
        return found | {"tflop_s": 2e-9 * tokens * inputs * outputs / found["ms"]}

    for inputs, outputs in ((d, 3 * d), (d, d), (d, 2 * m), (m, d)):
        yield Figure(
            0, f"product {tokens} x {inputs} x {outputs}", partial(product, inputs, outputs)
        )

    def head(rows: int) -> dict[str, Any]:
        hidden, weight = random(tokens, d, grad=True), random(rows, d, grad=True)
        found = several(lambda: gradients(torch.nn.functional.linear, hidden, weight), size.repeats)
        return found | {"tflop_s": 6e-9 * tokens * d * rows / found["ms"]}

    vocabulary = shape["vocabulary"]
    for rows in (vocabulary, -(-vocabulary // 128) * 128):
        yield Figure(0, f"head, forward and backward, {rows} rows", partial(head, rows))
    yield from losses(size, tokens)
    yield from attentions(size)


def losses(size: Size, tokens: int) -> Iterator[Figure]:
    """The forms of head and loss: time, memory, and error against float64 of the first tokens."""
    d, vocabulary = size.shape["dim"], size.shape["vocabulary"]

    @cache
    def given() -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        weight = 0.02 * torch.randn(vocabulary, d, device=DEVICE)
        targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
        return random(tokens, d), weight, targets

    def liger() -> Callable[..., Tensor]:
        module = importlib.import_module("liger_kernel.transformers.functional")

        def compute(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            found = module.liger_fused_linear_cross_entropy(
                hidden,
                padded(weight, hidden.dtype),
                targets,
                lse_square_scale=1e-5,
                reduction="sum",
            )
            return found[0] if isinstance(found, tuple) else found

        return compute

    def ours(name: str, compiled: bool) -> Callable[..., Tensor]:
        compute = partial(LOSSES[name].compute, z_loss=1e-5)
        if compiled and name == "whole":
            compute = torch.compile(compute)
        if name == "chunked":
            compute = partial(compute, compiled=compiled)
        return lambda *parts: compute(*parts).total

    def measure(make: Callable[[], Callable[..., Tensor]]) -> dict[str, Any]:
        hidden, weight, targets = given()
        compute, few = make(), min(tokens, 512)
        exact = [part.double().requires_grad_() for part in (hidden[:few], weight.to(DTYPE))]
        total = LOSSES["whole"].compute(*exact, targets[:few], 1e-5).total
        truth = [total.detach(), *torch.autograd.grad(total, exact)]
        leaves = [part.clone().requires_grad_() for part in (hidden[:few], weight)]
        total = compute(*leaves, targets[:few])
        found = [total.detach(), *torch.autograd.grad(total, leaves)]
        errors = [worst([one], [other]) for one, other in zip(found, truth, strict=True)]
        del exact, truth, leaves, found, total
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]

        def step() -> None:
            torch.autograd.grad(compute(*leaves, targets), leaves)

        return several(step, size.repeats) | {"errors_of_norm": errors}

    for name, compiled in itertools.product(LOSSES, (False, True)):
        if compiled and size.compile == "off":
            continue
        title = f"loss, {name}{', compiled' * compiled}"
        yield Figure(0, title, partial(measure, partial(ours, name, compiled)), 8)
    if importlib.util.find_spec("liger_kernel") and DEVICE.type == "cuda":
        yield Figure(0, "loss, liger-kernel", partial(measure, liger), 8)


def windows(size: Size) -> Tensor:
    """Windows of random tokens, with a document some five times in each: int64 [B, T + 1]."""
    context, vocabulary = size.shape["context"], size.shape["vocabulary"]
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(1, vocabulary, (size.batch, context + 1), generator=generator)
    starts = torch.randint(context, (size.batch, 5), generator=generator)
    return found.scatter(1, starts, SEPARATOR)


def attentions(size: Size) -> Iterator[Figure]:
    heads, width = size.shape["heads"], size.shape["dim"] // size.shape["heads"]
    shape = (size.batch, size.shape["context"])

    def measure(name: str, documents: bool) -> dict[str, Any]:
        backend = BACKENDS[name]
        obstacle = backend.obstacle(DEVICE, DTYPE, True)
        if obstacle is not None:
            return {"left_out": obstacle}
        numbers = (windows(size)[:, :-1] == SEPARATOR).cumsum(1) if documents else None
        mask = backend.prepare(numbers, *shape, DEVICE)
        leaves = [random(*shape, heads, width, grad=True) for _ in range(3)]
        call = partial(gradients, lambda *qkv: backend.attend(*qkv, mask), *leaves)
        found = several(call, size.repeats)
        flops = 12 * size.batch * shape[1] ** 2 * heads * width / 2  # causal, forward and backward
        return found | ({} if documents else {"tflop_s": 1e-9 * flops / found["ms"]})

    for name, documents in itertools.product(BACKENDS, (False, True)):
        title = f"attention {name}{', documents' * documents}"
        yield Figure(0, title, partial(measure, name, documents), 8)


# --- 1: correctness ------------------------------------------------------------------------------


def worst(found: list[Tensor], truths: list[Tensor]) -> float:
    """The largest error relative to the norm; a truth that is only rounding does not count."""
    pairs = [
        (x.double(), truth) for x, truth in zip(found, truths, strict=True) if truth.norm() > 1e-6
    ]
    return max(((x - truth).norm() / truth.norm()).item() for x, truth in pairs)


def poisoned(error: Callable[[], float], dtype: torch.dtype) -> dict[str, Any]:
    """An error, found while new memory holds NaN: what a kernel leaves unwritten is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(1, device=DEVICE).isnan(), "memory is not filled"
        found = error()
    finally:
        torch.use_deterministic_algorithms(False)
    return {"error_of_norm": found, "right": found < TOLERANCE[dtype]}


def read_error(sources: int, dim: int, rank: int, separate: bool, dtype: torch.dtype, tokens: int):
    """Of one read and all its gradients."""
    query, count = 2 * torch.randn(rank, device=DEVICE) / rank**0.5, sources
    values = [torch.randn(tokens, dim, device=DEVICE).to(dtype) for _ in range(sources)]
    keys = [torch.randn(tokens, rank, device=DEVICE).to(dtype) for _ in range(sources * separate)]
    probe, results = torch.randn(tokens, dim, device=DEVICE), []
    for kernels, double in (("triton", False), ("reference", True)):
        leaves = [
            (x.double() if double else x).detach().requires_grad_() for x in (query, *values, *keys)
        ]
        made = leaves[count + 1 :] or None
        out = depth_attention(
            leaves[0], leaves[1 : count + 1], made, normalize=True, kernels=kernels
        )
        results.append([out, *torch.autograd.grad((out.double() * probe).sum(), leaves)])
    return worst(*results)


def path_error(
    name: str, blocks: int | None, dtype: torch.dtype, tokens: int, sizes: dict[str, int]
) -> float:
    """Of a path: the reads of all sub-layers, and all gradients."""
    rank, dim = sizes["dim"] // 8 if name.endswith("_lr") else None, sizes["dim"]
    config = ModelConfig(name, rank, blocks, **sizes)  # type: ignore[arg-type]
    config = path_of(config).settled(config)[0]
    path = path_of(config).build(config, KERNELS["triton"]).to(DEVICE)
    truth = path_of(config).build(config, KERNELS["reference"]).double().to(DEVICE)
    for parameter in path.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    truth.load_state_dict(path.state_dict())
    sites = 2 * config.layers + 1
    outputs = [
        torch.randn(tokens, dim + path.emit_dim * (i > 0), device=DEVICE).to(dtype)
        for i in range(sites)
    ]
    probes, results = torch.randn(sites, tokens, dim, device=DEVICE), []
    for model, kind in ((path, dtype), (truth, torch.float64)):
        leaves = [output.to(kind).requires_grad_() for output in outputs]
        state = model.begin(leaves[0])
        reads = [model.read(state, 0).x]
        for site, output in enumerate(leaves[1:]):
            state = model.write(state, site, output)
            reads.append(model.read(state, site + 1).x)
        loss = sum((read.double() * probe).sum() for read, probe in zip(reads, probes, strict=True))
        results.append([*reads, *torch.autograd.grad(loss, [*leaves, *model.parameters()])])
    return worst(*results)


def correctness(size: Size) -> Iterator[Figure]:
    dtypes = TOLERANCE if DEVICE.type == "cuda" else (torch.float32,)
    named = (
        ("s_lr", 4),
        ("p_lr", None),
        ("attn_res", 3),
        ("delta", 4),
        ("hc", None),
        ("mhc", None),
    )
    for (name, blocks), dtype in itertools.product(named, dtypes):
        error = partial(path_error, name, blocks, dtype, size.tokens, size.path)
        title = f"path {name}, N={blocks}, {dtype}".replace("torch.", "")
        yield Figure(1, title, partial(poisoned, error, dtype), 8)
    for (n, dim, rank), separate, dtype in itertools.product(size.errors, (False, True), dtypes):
        error = partial(read_error, n, dim, rank, separate, dtype, size.tokens)
        title = f"{n} sources, d={dim}, r={rank}{', own keys' * separate}, {dtype}"
        yield Figure(1, title.replace("torch.", ""), partial(poisoned, error, dtype), 8)


# --- 2 and 5: training steps ---------------------------------------------------------------------


@dataclass
class Steps:
    """Training steps of several models, each built once and kept."""

    size: Size
    models: dict[str, Transformer] = field(default_factory=dict)

    def build(self, name: str) -> dict[str, Any]:
        """Builds a model and takes two steps, in which it is compiled."""
        from lrattnres.config import Compile
        from lrattnres.distributed.parallel import COMPILE_MODES

        torch._dynamo.config.recompile_limit = 1000
        chosen = argparse.Namespace(
            device=DEVICE.type, precision=str(DTYPE).removeprefix("torch."), seed=0
        )
        begin = time.perf_counter()
        compiled = self.size.compile != "off"
        model = common.build(
            name,
            self.size.shape,
            chosen,
            kernels="auto" if DEVICE.type == "cuda" or name == "baseline" else "triton",
            training=True,
            compiled=compiled,
            batch=self.size.batch,
        )
        COMPILE_MODES[Compile(self.size.compile)](model)
        for _ in range(2):
            self.step(model)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        self.models[name] = model
        return {
            "compile_seconds": time.perf_counter() - begin,
            "attention": model.attention.name,
            "depth_kernels": model.kernels.name,
            "loss_form": model.head.form.name,
            "loss_reason": model.head.form.reason,
        }

    def step(self, model: Transformer) -> None:
        """Forward and backward pass of a micro-batch; the gradients are dropped."""
        objective = window_objective(model, self.windows, SEPARATOR, documents=True, z_loss=1e-5)
        (objective.total / self.windows[:, 1:].numel()).backward()
        model.zero_grad(set_to_none=True)

    @cached_property
    def windows(self) -> Tensor:
        return windows(self.size)

    def compare(self, name: str, rounds: int) -> dict[str, Any]:
        """Alternating rounds of the baseline and one other."""
        names, times = ("baseline", name), dict[str, list[Time]](baseline=[], **{name: []})
        peaks = {}
        for number in range(rounds):
            for each in names if number % 2 else names[::-1]:
                if DEVICE.type == "cuda" and number == 0:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                times[each].append(timed(partial(self.step, self.models[each])))
                if DEVICE.type == "cuda" and number == 0:
                    peaks[each] = (torch.cuda.max_memory_allocated() - before) / 1e9
        ratios = sorted(
            one.device / base.device
            for one, base in zip(times[name], times["baseline"], strict=True)
        )
        quarter = len(ratios) // 4
        tokens = self.windows[:, 1:].numel()
        found = {each: figures_of(spent) for each, spent in times.items()}
        for each, values in found.items():
            values["tokens_s"] = 1e3 * tokens / values["ms"]
            values["peak_gb_above_weights"] = peaks.get(each, 0.0)
            values["mfu"] = self.flops(each) * values["tokens_s"] / self.peak
        return {
            "ratio": statistics.median(ratios),
            "ratio_spread": (ratios[-1 - quarter] - ratios[quarter]) / 2,
            "rounds": rounds,
            **found,
        }

    def flops(self, name: str) -> float:
        """Of the forward and backward pass of a token, as train.py counts them."""
        from lrattnres.residual.cost import cost

        return cost(self.models[name].config).training_flops

    @cached_property
    def peak(self) -> float:
        from lrattnres.training.machine import peak_flops

        return peak_flops(DEVICE, DTYPE)[0]

    def optimizer(self) -> dict[str, Any]:
        """One step of Muon and Adam over all weights."""
        from lrattnres.config.training import OptimizerConfig
        from lrattnres.optim.build import build_optimizer

        settings = OptimizerConfig(
            muon_lr=0.01, adam_lr=0.003, warmup=1, momentum_rise=0, momentum_fall=0
        )
        model = self.models["baseline"]
        optimizer = build_optimizer(model, settings, 100)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)

        def step() -> None:
            optimizer.set_step(1)
            optimizer.step()

        found = several(step, self.size.repeats)
        model.zero_grad(set_to_none=True)
        return found

    def profile(self, name: str) -> dict[str, Any]:
        """The kernels that one step spends most time in."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if DEVICE.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as found:
            self.step(self.models[name])
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
        on_device = DEVICE.type == "cuda"
        rows = [
            {
                "kernel": event.key[:120],
                "ms": (event.self_device_time_total if on_device else event.self_cpu_time_total)
                / 1e3,
                "calls": event.count,
            }
            for event in found.key_averages()
        ]
        rows.sort(key=lambda row: -row["ms"])
        return {"total_ms": sum(row["ms"] for row in rows), "table": rows[:40]}

    def figures(self) -> Iterator[Figure]:
        yield Figure(2, "build baseline", partial(self.build, "baseline"), 20)
        yield Figure(2, f"build {self.size.ours}", partial(self.build, self.size.ours), 20)
        compare = partial(self.compare, self.size.ours, self.size.rounds)
        yield Figure(2, f"{self.size.ours} against baseline", compare, 15)

    def others(self) -> Iterator[Figure]:
        for name in self.size.variants:
            yield Figure(5, f"build {name}", partial(self.build, name), 30)
            yield Figure(
                5, f"{name} against baseline", partial(self.compare, name, self.size.fewer), 8
            )
            yield Figure(5, f"drop {name}", partial(self.drop, name), 0)

    def drop(self, name: str) -> dict[str, Any]:
        """Frees a model."""
        return {"was_there": self.models.pop(name, None) is not None}


# --- 3: train.py ---------------------------------------------------------------------------------


def residual_of(name: str) -> list[str]:
    """A variant, as train.py is told of it."""
    residual, blocks, rank = [*name.split(":"), "full", ""][:3]
    return [
        f"model.residual={residual}",
        f"model.blocks={'null' if blocks == 'full' else blocks}",
        f"model.rank={rank or 'null'}",
    ]


def training(size: Size, report: Report) -> Iterator[Figure]:
    def measure(name: str) -> dict[str, Any]:
        if missing := [p for p in ("hydra", "omegaconf", "torchmetrics") if not _there(p)]:
            return {"left_out": f"not installed: {', '.join(missing)}"}
        root = Path(__file__).parent.parent
        with tempfile.TemporaryDirectory() as folder:
            begin = time.time()
            ended = subprocess.run(
                [
                    *(
                        sys.executable,
                        root / "train.py",
                        *size.training,
                        *residual_of(name),
                        "name=run",
                    ),
                    *("instruments.log=1", f"runs={folder}", "logger=none"),
                ],
                cwd=root,
                capture_output=True,
                text=True,
                timeout=max(20.0, min(150.0, report.left - 60)),
            )
            file = Path(folder) / "run" / "metrics.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
        records = [json.loads(line) for line in lines]
        late = [record for record in records[len(records) // 2 :] if "tokens_per_second" in record]
        if ended.returncode or not late:
            return {"error": (ended.stdout + ended.stderr)[-1500:], "exit": ended.returncode}
        return {
            "seconds_of_all": time.time() - begin,
            "tokens_s": statistics.median(record["tokens_per_second"] for record in late),
            "mfu": statistics.median(record["mfu"] for record in late),
            "loss": records[-1]["loss"],
            "said": [line for line in ended.stdout.splitlines() if line.startswith(SAID)],
        }

    for name in ("baseline", size.ours):
        needs = 60 if DEVICE.type == "cuda" else 20
        yield Figure(3, f"train.py {name}", partial(measure, name), needs)


SAID = ("machine", "kernels", "loss ", "time:")


def _there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# --- 4: operators --------------------------------------------------------------------------------


def kinds(name: str, size: Size) -> list[Step]:
    """The operators of a variant, each kind once."""
    _, blocks, rank = [*name.split(":"), "", ""][:3]
    plan = DepthPlan(2 * size.shape["layers"], int(blocks) if blocks.isdigit() else None)
    share = int(rank) / size.shape["dim"] if rank else 1.0
    return sorted(set(steps(plan, cheapest(plan, share))))


def operators(size: Size) -> Iterator[Figure]:
    rank, dim = int(size.ours.split(":")[2]), size.shape["dim"]
    tokens = size.batch * size.shape["context"]

    def measure(step: Step) -> dict[str, Any]:
        from lrattnres.kernels import ops  # noqa: F401 — defines the operators
        from lrattnres.kernels.sample import backward_arguments, forward_arguments

        given = {"tokens": tokens, "dim": dim, "rank": rank, "device": DEVICE, "dtype": DTYPE}
        sets = [
            forward_arguments(step.owned, step.parts, step.later, step.addend, **given)
            for _ in range(4)
        ]
        back = [
            backward_arguments(one, torch.ops.lrattnres.read(*one), step.passes) for one in sets
        ]
        record: dict[str, Any] = {}
        for name, calls, traffic in (
            ("forward", [partial(torch.ops.lrattnres.read, *one) for one in sets], forward_traffic),
            (
                "backward",
                [partial(torch.ops.lrattnres.read_backward, *one) for one in back],
                backward_traffic,
            ),
        ):
            spent = 1e-3 * graphed(calls, size.repeats)
            moved = tokens * traffic(step, dim, rank, False).bytes(DTYPE.itemsize)
            record |= {f"{name}_us": 1e6 * spent, f"{name}_of_copy": moved / spent / copy_rate()}
            record[f"{name}_host_us"] = 1e3 * statistics.median(
                timed(calls[0]).host for _ in range(size.repeats)
            )
        return record

    for step in kinds(size.ours, size):
        title = f"{step.owned} sources, {step.parts} parts, {step.later} later"
        title += ", open block" * step.addend
        yield Figure(4, title, partial(measure, step), 6)


def graphed(calls: list[Callable[[], Any]], repeats: int) -> float:
    """Milliseconds of one of several calls, replayed as a CUDA graph: no host, and inputs that are
    not in the cache any more. On a CPU, of plain calls.
    """
    if DEVICE.type != "cuda":
        return statistics.median(timed(call).device for call in calls)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    del results
    times = [timed(graph.replay).device for _ in range(repeats + 2)]
    return statistics.median(times[2:]) / len(calls)


# --- 6: other packages ---------------------------------------------------------------------------


def packages(size: Size) -> Iterator[Figure]:
    dim, tokens = size.shape["dim"], size.batch * size.shape["context"]
    rank = min(64, dim)
    ours = ("triton", "compiled") if DEVICE.type == "cuda" else ("triton",)
    found = rivals.installed(DEVICE)

    def reader(name: str) -> tuple[Callable[..., Tensor], torch.dtype]:
        if name in ours:
            return partial(depth_attention, normalize=True, kernels=name), torch.float32
        return rivals.RIVALS[name].load(), rivals.RIVALS[name].query

    def read(name: str, width: int) -> dict[str, Any]:
        call, dtype = reader(name)
        values = [random(tokens, dim, grad=True) for _ in range(9)]
        query = torch.randn(width, device=DEVICE, dtype=dtype, requires_grad=True)
        gradient = torch.randn_like(values[0])
        return several(
            lambda: torch.autograd.grad(call(query, values), [query, *values], gradient),
            size.repeats,
        )

    def chain(name: str, width: int) -> dict[str, Any]:
        """Every site reads all before it, and its read is the next source."""
        call, dtype = reader(name)
        sites = 2 * size.shape["layers"]
        queries = [
            torch.randn(width, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(sites)
        ]
        first = random(tokens, dim, grad=True)

        def run() -> None:
            values = [first]
            for query in queries:
                values.append(call(query, values))
            torch.autograd.grad(values[-1], [first, *queries], torch.ones_like(first))

        return several(run, max(1, size.repeats // 4))

    contestants = [(name, width) for name in ours for width in dict.fromkeys((rank, dim))]
    contestants += [(name, rivals.RIVALS[name].rank(rank, dim)) for name in found]
    for (title, measure), (name, width) in itertools.product(
        (("read of nine sources", read), ("chain of all sites", chain)), contestants
    ):
        yield Figure(6, f"{title}, {name}, r={width}", partial(measure, name, width), 15)
    missing = sorted(rivals.RIVALS.keys() - set(found))
    if missing:
        yield Figure(6, "left out", lambda: {"not_installed": missing}, 0)


# --- compiling ahead -----------------------------------------------------------------------------


def compile_ahead(size: Size, number: int, of: int) -> None:
    """Compiles every `of`-th kernel of the operators into Triton's cache, and runs none of them."""
    from lrattnres.kernels import launch, ops, sample

    def only_compile(one: launch.Launch) -> None:
        if all(one.grid):
            launch.function(one).warmup(grid=one.grid, **one.arguments, num_warps=one.warps)

    launch.fire = ops.fire = only_compile  # type: ignore[attr-defined]
    dim, tokens = size.shape["dim"], size.batch * size.shape["context"]
    wanted = dict.fromkeys(
        (step, int(name.split(":")[2]) if name.count(":") == 2 else dim)
        for name in (size.ours, *size.variants)
        for step in kinds(name, size)
    )
    for step, rank in itertools.islice(wanted, number, None, of):
        given = {"tokens": tokens, "dim": dim, "rank": rank, "device": DEVICE, "dtype": DTYPE}
        forward = sample.forward_arguments(step.owned, step.parts, step.later, step.addend, **given)
        backward = sample.backward_arguments(
            forward, torch.ops.lrattnres.read(*forward), step.passes
        )
        torch.ops.lrattnres.read_backward(*backward)


def helpers(options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Processes that compile ahead; none where nothing is compiled."""
    if DEVICE.type != "cuda":
        return []
    count = max(1, (os.cpu_count() or 2) - 4)
    words = [sys.executable, __file__, *(["--rehearse"] if options.rehearse else [])]
    return [
        subprocess.Popen(
            [*words, "--ahead", f"{number}/{count}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in range(count)
    ]


def main() -> None:
    parser = common.options(__doc__, device=False)
    parser.add_argument("--limit", type=float, default=540, help="seconds, at which it ends itself")
    parser.add_argument("--parts", type=int, nargs="*", help="numbers; default: all")
    parser.add_argument(
        "--rehearse", action="store_true", help="a tiny model; on a CPU, interpreted"
    )
    parser.add_argument("--ahead", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = REHEARSAL if options.rehearse else PAPER
    if options.ahead:
        number, of = map(int, options.ahead.split("/"))
        compile_ahead(size, number, of)
        return
    if DEVICE.type != "cuda" and not (options.rehearse and INTERPRETED):
        sys.exit(
            "gpu.py: torch sees no CUDA GPU here; on a CPU, `TRITON_INTERPRET=1 python "
            "bench/gpu.py --rehearse` shows whether it would run"
        )
    report = Report(options.json, options.limit)
    timer = threading.Timer(options.limit, _end, [report])
    timer.daemon = True
    timer.start()
    report.head = common.machine(DEVICE) | {"shape": size.shape, "batch": size.batch}
    report.ahead, models = helpers(options), Steps(size)
    parts: list[Iterator[Figure]] = [
        yardsticks(size),
        correctness(size),
        models.figures(),
        itertools.chain([Figure(3, "optimizer", models.optimizer, 10)], training(size, report)),
        operators(size),
        models.others(),
        packages(size),
        iter([Figure(7, f"profile {size.ours}", partial(models.profile, size.ours), 10)]),
    ]
    for number, part in enumerate(parts):
        for figure in part if options.parts is None or number in options.parts else ():
            report.take(figure)
    report.end(by_limit=False)
    bad = [each["figure"] for each in report.figures if isinstance(each.get("error"), str)]
    wrong = [each["figure"] for each in report.figures if each.get("right") is False]
    print(f"{len(report.figures)} figures; failed: {bad or 'none'}; wrong: {wrong or 'none'}")
    sys.exit(bool(wrong or bad))


if __name__ == "__main__":
    main()
