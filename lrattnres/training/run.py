"""From a resolved configuration to a finished run folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from lrattnres.checks import DTYPES, resolve_device
from lrattnres.config import Compile, TrainConfig, plain
from lrattnres.data.dataset import Dataset, open_dataset
from lrattnres.depth.cost import Cost, cost
from lrattnres.kernels.backends import choose_kernels
from lrattnres.model.attention import choose_attention
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.optim.groups import assign, ownership_table
from lrattnres.runs.checkpoint import Checkpoint, CheckpointError, Checkpoints
from lrattnres.runs.folder import RunFolder
from lrattnres.runs.metrics import MetricsFile
from lrattnres.training.machine import peak_flops
from lrattnres.training.progress import ProgressBar
from lrattnres.training.sinks import build_sink
from lrattnres.training.trainer import Trainer

Say = Callable[[str], None]


def train(config: TrainConfig, notes: list[str]) -> tuple[RunFolder, bool]:
    """Trains, or continues, the run of `config.name`; returns its folder, and False if a signal stopped it before its end.

    `notes` are printed with what was chosen for this machine. Raises what the folder, the data and the checkpoints
    raise, and TrainingError when the run diverges.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    dataset = open_dataset(config)
    folder = RunFolder.open(config, extra_identity=dataset.identity)
    with closing(folder):
        summary = folder.finished()
        if summary is not None and not config.resume.isdigit():
            print(f"{folder.path}: finished at step {summary['step']}, held-out loss {summary['val_loss']:.4f}")
            return folder, True
        return folder, _train(config, notes, dataset, folder)


def _train(config: TrainConfig, notes: list[str], dataset: Dataset, folder: RunFolder) -> bool:
    model, choices = _build(config)
    price = cost(config.model, model.router.variant.keys)
    peak, source = peak_flops(model.head.weight.device, model.dtype)
    choices |= {"peak_flops": peak, "peak_from": source}
    folder.record_choices(choices)
    print(_opening(config, notes, dataset, folder, model, price, choices), flush=True)

    metrics = MetricsFile(folder.metrics_path)
    checkpoints = Checkpoints(
        folder.checkpoints_path, keep_last=config.checkpoint.keep_last, keep_every=config.checkpoint.keep_every
    )
    start = _starting_point(config, checkpoints)
    bar = ProgressBar(config.steps, start.step if start else 0)
    sink = build_sink(config.logger, folder, plain(config), bar.note)

    def write(record: dict[str, Any]) -> None:
        metrics.write(record)
        sink.write(record)
        bar.update(record["step"], record)

    torch.manual_seed(config.seed)  # nothing draws from it today; a checkpoint carries it for whatever does
    trainer = Trainer(
        config,
        dataset,
        model,
        checkpoints,
        flops_per_token=price.training_flops,
        peak_flops=peak,
        write=write,
        say=bar.note,
    )
    with closing(sink), closing(bar), closing(metrics):
        _rewind(trainer, start, metrics, checkpoints, folder)
        finished = trainer.fit()
    if finished:
        _finish(folder, trainer)
    return finished


def _build(config: TrainConfig) -> tuple[Transformer, dict[str, Any]]:
    """The model with its initial weights, and what was chosen for this machine."""
    device, dtype = resolve_device(config.device), DTYPES[config.precision]
    attention = choose_attention(config.attention.name, device, dtype, training=True)
    kernels = choose_kernels(config.kernels.name, device, dtype, compiled=config.compile is not Compile.off)
    model = build_model(config.model, seed=config.seed, device=device, attention=attention, dtype=dtype, kernels=kernels)
    compile_model(model, config.compile)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    choices = {"device": name, "precision": config.precision.name, "attention": attention.name}
    return model, choices | {"depth_kernels": kernels.name, "compile": config.compile.name}


def compile_model(model: Transformer, how: Compile) -> None:
    """In place, so that parameters keep their plain names."""
    targets = {Compile.off: (), Compile.model: (model,), Compile.regions: tuple(model.sublayers)}
    for module in targets[how]:
        module.compile()


def _starting_point(config: TrainConfig, checkpoints: Checkpoints) -> Checkpoint | None:
    """The checkpoint to continue from; None for the beginning.

    Raises CheckpointError if there are checkpoints and none of them is whole: starting over would be no continuation.
    """
    if config.resume.isdigit():
        return checkpoints.at(int(config.resume))
    newest = checkpoints.newest(print)
    if newest is None and checkpoints.steps():
        raise CheckpointError(
            f"{checkpoints.folder}: no checkpoint is whole; restore one, or remove the folder to start from the beginning"
        )
    return newest


def _rewind(
    trainer: Trainer, start: Checkpoint | None, metrics: MetricsFile, checkpoints: Checkpoints, folder: RunFolder
) -> None:
    """Puts everything where it was at the checkpoint; what came after it did not happen."""
    step = start.step if start else 0
    if start:
        trainer.restore(start)
        trainer.say(f"continuing from step {step}")
    metrics.rewind(step)
    checkpoints.rewind(step)
    folder.summary_path.unlink(missing_ok=True)


def _finish(folder: RunFolder, trainer: Trainer) -> None:
    """The summary holds the last record: the trainer evaluates at its last step before it saves."""
    last = MetricsFile.read(folder.metrics_path)[-1]
    names = ("step", "tokens", "loss", "val_loss", "val_tokens", "val_bytes", "val_perplexity", "val_bits_per_byte")
    summary = {name: last[name] for name in names} | {"bad_steps": trainer.progress.bad_steps}
    folder.finish(summary)
    print(
        f"{folder.path}: finished at step {summary['step']}: held-out loss {summary['val_loss']:.4f} nats per token, "
        f"{summary['val_bits_per_byte']:.4f} bits per byte over {summary['val_tokens']:,} tokens"
    )


def _opening(
    config: TrainConfig,
    notes: list[str],
    dataset: Dataset,
    folder: RunFolder,
    model: Transformer,
    price: Cost,
    choices: dict[str, Any],
) -> str:
    """What a person reads first: what runs, on what, and who updates which parameter."""
    router = config.model
    blocks = f"{router.blocks} blocks" if router.blocks else "every sub-layer a source"
    depth = f"{router.residual}, {blocks}, rank {model.router.rank}" if model.router.variant.keys else router.residual
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts = {
        "run": folder.path,
        "residual": f"{depth}: {price.added_percent:.4f}% more compute than the plain core",
        "model": f"{router.layers} blocks of width {router.dim}, {parameters:,} parameters",
        "data": f"{dataset.corpus.description}; {len(dataset.training):,} to train, {len(dataset.held_out):,} held out",
        "batch": f"{config.global_batch} x {router.context} tokens a step, {config.steps:,} steps",
        "machine": ", ".join(f"{name} {value}" for name, value in choices.items() if not name.startswith("peak")),
        "peak": f"{choices['peak_flops'] / 1e12:.3g} TFLOP/s ({choices['peak_from']})",
    }
    lines = [f"{name:<10}{value}" for name, value in facts.items()]
    return "\n".join([*lines, *(f"note      {note}" for note in notes), "", ownership_table(assign(model)), ""])
