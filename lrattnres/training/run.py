"""From a resolved configuration to a finished run folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lrattnres.config import Compile, ConfigError, TrainConfig, flatten, plain
from lrattnres.config.checks import DTYPES, resolve_device
from lrattnres.data.dataset import Dataset, open_dataset
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.distributed.parallel import Parallel, parallelize, start_parallel
from lrattnres.distributed.ranks import PATIENCE, RankError, Ranks, placement, start_ranks
from lrattnres.exchange.folder import read_exported
from lrattnres.model.attention import choose_attention
from lrattnres.model.head import choose_loss
from lrattnres.model.transformer import Transformer, build_model
from lrattnres.residual.base import path_of
from lrattnres.residual.cost import Cost, cost
from lrattnres.runs.checkpoint import Checkpoint, CheckpointError, Checkpoints
from lrattnres.runs.folder import RunError, RunFolder
from lrattnres.runs.metrics import MetricsFile
from lrattnres.training.machine import peak_flops
from lrattnres.training.memory import GB, available_memory, check_memory, estimate_memory
from lrattnres.training.progress import ProgressBar
from lrattnres.training.signals import Stopped, requeue
from lrattnres.training.sinks import build_sink
from lrattnres.training.trainer import Spent, Trainer, TrainingError

Say = Callable[[str], None]
APART = ("peak_flops", "peak_from", "notes")  # choices that are printed on lines of their own
# Settings that may differ between the machines of a job.
LOCAL = (
    "threads",
    "data.cache",
    "data.workers",
    "data.ahead",
    "data.memory",
    "data.timeout",
    "data.retries",
)


def train(config: TrainConfig, notes: list[str]) -> tuple[RunFolder, bool]:
    """Trains, or continues, a run. Every rank of a job calls this.

    Args:
        config: Checked and resolved.
        notes: Printed with what was chosen for this machine.

    Returns:
        The folder of the run, and whether it is finished; False if a signal stopped it.

    Raises:
        ConfigError: The settings cannot be used.
        DataError: The texts cannot be used, or not read at the start.
        RunError: The run folder cannot be used.
        CheckpointError: There is no checkpoint to continue from.
        FolderError: The folder of initial weights cannot be used.
        UnreadableError: The texts cannot be read any more; the run is saved.
        TrainingError: The loss is not finite any more, a rank is lost, or a file cannot be written.
        RankError: Another rank raised one of these.
        Stopped: A signal came before or after the training loop.
    """
    try:
        folder, finished = _trained(config, notes)
    except Stopped:
        _requeue(config)
        raise
    if not finished:
        _requeue(config)
    return folder, finished


def _requeue(config: TrainConfig) -> None:
    """Puts the SLURM job of a stopped run back into the queue, if the settings say so.

    Rank 0 does it.

    Raises:
        TrainingError: SLURM refuses.
    """
    if config.cluster.requeue and placement()[0] == 0:
        try:
            job = requeue()
        except RuntimeError as error:
            raise TrainingError(
                f"the run is saved, but will not go on by itself: {error}"
            ) from error
        print(f"SLURM job {job} is in the queue again and will go on from here", flush=True)


def _trained(config: TrainConfig, notes: list[str]) -> tuple[RunFolder, bool]:
    """As `train`, without the SLURM queue."""
    if config.threads:
        torch.set_num_threads(config.threads)
    ranks = start_ranks(resolve_device(config.device).type, config.parallel.timeout)
    settings = {key: value for key, value in flatten(plain(config)).items() if key not in LOCAL}
    _refuse_different(ranks, settings, "start all ranks with the same settings")
    parallel = start_parallel(config)
    ranks.all_succeed(
        lambda: check_memory(config, ranks.world, *available_memory(resolve_device(config.device)))
    )
    try:
        dataset = _open_data(config, ranks)
    except (DataError, RankError) as error:
        folder = RunFolder.of(config)
        if ranks.of_first(partial(_say_finished, config, folder, error)):
            return folder, True
        if isinstance(error, UnreadableError):
            raise DataError(str(error)) from error  # a refusal: nothing was done yet
        raise
    _refuse_different(
        ranks,
        dataset.identity,
        "all machines must have the same texts, and the same versions of packages",
    )
    folder = ranks.all_succeed(
        lambda: _open_folder(config, dataset) if ranks.first else RunFolder.of(config)
    )
    with closing(folder):
        if ranks.of_first(lambda: _say_finished(config, folder)):
            return folder, True
        return folder, _train(config, [*folder.notes, *notes], dataset, folder, parallel)


def _refuse_different(ranks: Ranks, values: dict[str, Any], remedy: str) -> None:
    """Refuses values that differ between ranks: each rank would train another run. Collective.

    Args:
        ranks: The ranks that take part.
        values: By name.
        remedy: What to do, for the message.

    Raises:
        ConfigError: On rank 0, lists every value that differs.
        RankError: The same on the other ranks.
    """
    if errors := ranks.differing(values):
        ranks.of_first(lambda: _refuse([f"{error}: {remedy}" for error in errors]))


def _refuse(errors: list[str]) -> None:
    raise ConfigError(errors)


def _say_finished(config: TrainConfig, folder: RunFolder, unread: Exception | None = None) -> bool:
    """Whether a run is finished, and not to continue from an earlier step.

    Then it prints the result.

    Args:
        config: The settings of this start.
        folder: Of the run.
        unread: Why the texts cannot be read, which a finished run does not need; None: they can.

    Raises:
        CheckpointError: The last checkpoint is missing or damaged.
    """
    with folder.usable():
        summary = folder.finished() if not config.resume.isdigit() else None
    if summary is None or not folder.config_path.exists():
        return False
    if unread is not None:
        try:
            folder.check_settings(config)
        except RunError:
            return False
    try:
        Checkpoints(folder.checkpoints_path).at(summary["step"])
    except CheckpointError as error:
        raise CheckpointError(
            f"the run is finished, but {error}\nwrite resume=STEP to go on from an older "
            f"checkpoint, or remove {folder.path}"
        ) from error
    print(
        f"{folder.path}: finished at step {summary['step']}, held-out loss "
        f"{summary['val_loss']:.4f}"
    )
    if unread is not None:
        print(f"note      its texts cannot be read any more: {unread}")
    return True


def _open_data(config: TrainConfig, ranks: Ranks) -> Dataset:
    """Opens the corpus. Collective.

    Rank 0 opens it first, and tells the others what it found. Then one process of every other
    machine prepares the files there that the rest of them use.

    Raises:
        DataError: The corpus cannot be used, or is too small. Then no run folder was made yet.
        RankError: Another rank raised it.
    """

    def opened(told: list[dict[str, Any] | None]) -> Dataset:
        pinned = told[0] if told else RunFolder.pinned_listing(config)
        dataset = open_dataset(config, pinned, fresh=bool(told))
        dataset.streams(ranks.rank, ranks.world).close()
        if ranks.local == 0:
            dataset.prepare_held_out()
        return dataset

    first = ranks.apart(PATIENCE).all_succeed(lambda: opened([]) if ranks.first else None)
    told = [ranks.of_first(lambda: first.documents.listing if first else None)]
    early = ranks.apart(PATIENCE).all_succeed(
        lambda: opened(told) if ranks.local == 0 and not first else first
    )
    return ranks.all_succeed(lambda: early or opened(told))


def _open_folder(config: TrainConfig, dataset: Dataset) -> RunFolder:
    """Makes or continues the run folder, with the fingerprints of data and initial weights."""
    identity = dataset.identity
    if config.initial is not None:
        identity |= {"initial weights": read_exported(Path(config.initial)).fingerprint()}
    return RunFolder.open(config, extra_identity=identity, listing=dataset.documents.listing)


def _train(
    config: TrainConfig, notes: list[str], dataset: Dataset, folder: RunFolder, parallel: Parallel
) -> bool:
    """Builds all parts of a run, and trains. Returns whether the run is finished."""
    ranks = parallel.ranks
    model, choices = _build(config, parallel)
    chosen = {"attention": choices["attention"], "kernels": choices["depth_kernels"]}
    _refuse_different(
        ranks, chosen, "what `auto` means differs between the machines; write one of them"
    )
    price = cost(config.model)
    peak, source = ranks.of_first(lambda: peak_flops(model.head.weight.device, model.dtype))
    choices |= {"peak_flops": peak, "peak_from": source}
    choices |= {"notes": notes} if notes else {}

    def open_run() -> None:
        folder.record_choices(choices)
        print(_opening(config, notes, dataset, folder, model, price, choices), flush=True)

    ranks.of_first(open_run)

    checkpoints = Checkpoints(
        folder.checkpoints_path,
        keep_last=config.checkpoint.keep_last,
        keep_every=config.checkpoint.keep_every,
        ranks=ranks.apart(config.parallel.timeout),
        asynchronous=config.checkpoint.asynchronous,
    )
    start = _starting_point(config, checkpoints, ranks)
    if start is None and config.initial is not None:
        initial = read_exported(Path(config.initial))
        ranks.all_succeed(lambda: initial.load({"model": dict(model.state_dict())}))
    with ExitStack() as open_parts:
        write, say = (
            _reporters(config, folder, start.step if start else 0, open_parts)
            if ranks.first
            else (_quiet, _quiet)
        )
        # Nothing draws from it today. A checkpoint holds its state, for whatever will.
        torch.manual_seed(config.seed + ranks.rank)
        trainer = Trainer(
            config,
            dataset,
            model,
            checkpoints,
            flops_per_token=price.training_flops,
            peak_flops=peak * ranks.world,
            write=write,
            say=say,
            write_diagnostics=folder.write_diagnostics if ranks.first else _quiet,
            parallel=parallel,
        )
        say(trainer.optimizer.ownership() + "\n")
        if ranks.world > 1:
            say(_share(trainer, config))
        _rewind(trainer, start, folder)
        finished = trainer.fit()
        if trainer.shares is not None:
            say(_counted(trainer.shares))
    if finished and ranks.first:
        _finish(folder, trainer)
    return finished


def _share(trainer: Trainer, config: TrainConfig) -> str:
    """What rank 0 of several has to hold and to send, as a line."""
    work, memory = trainer.optimizer.work(), estimate_memory(config, trainer.ranks.world)
    return (
        f"rank 0 of {trainer.ranks.world}: {memory.total / GB:.3g} GB at most; its share of an "
        f"update: {work['flops'] / 1e9:.3g} GFLOP, and sends {work['bytes_sent'] / 1e6:.3g} MB a "
        "step\n"
    )


def _counted(shares: dict[str, Any]) -> str:
    """What the rank with most of it sent and used, as counted last."""
    sent = {kind: max(ranks) for kind, ranks in shares["bytes_sent"].items()}
    most = max(map(sum, zip(*shares["bytes_sent"].values(), strict=True)))
    kinds = ", ".join(f"{kind} {size / 1e6:.3g}" for kind, size in sent.items())
    peak = max(shares["peak_memory"]) / GB
    return f"a rank sends at most {most / 1e6:.3g} MB a step ({kinds}); peak memory {peak:.3g} GB"


def _reporters(
    config: TrainConfig, folder: RunFolder, step: int, parts: ExitStack
) -> tuple[Callable[[dict[str, Any]], None], Say]:
    """Where records and notes go on rank 0.

    Args:
        config: Names the sink.
        folder: Of the run.
        step: The number of steps done.
        parts: Closes what is opened here.
    """
    metrics = parts.enter_context(closing(MetricsFile(folder.metrics_path)))
    bar = parts.enter_context(closing(ProgressBar(config.steps, step)))
    sink = parts.enter_context(closing(build_sink(config.logger, folder, plain(config), bar.note)))

    def write(record: dict[str, Any]) -> None:
        metrics.write(record)
        sink.write(record)
        bar.update(record["step"], record)

    return write, bar.note


def _quiet(*_: object) -> None:
    """For other ranks than 0, which write and print nothing."""


def _build(config: TrainConfig, parallel: Parallel) -> tuple[Transformer, dict[str, Any]]:
    """Builds the model.

    Returns:
        The model with its initial weights, or this rank's shards of it; and what was chosen for
        this machine.
    """
    device, dtype = resolve_device(config.device), DTYPES[config.precision]
    attention = choose_attention(config.attention.name, device, dtype, training=True)
    compiled = config.compile is not Compile.off
    kernels = path_of(config.model).choose_kernels(
        config.model, config.kernels.name, device, dtype, compiled=compiled
    )
    tokens = config.micro_batch * config.model.context
    loss = choose_loss(config.loss.name, device, tokens, config.model.vocabulary, compiled=compiled)
    model = build_model(
        config.model,
        seed=config.seed,
        device=device,
        attention=attention,
        dtype=dtype,
        kernels=kernels,
        loss=loss,
        prepare=partial(parallelize, config=config, parallel=parallel),
    )
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )
    choices = {"device": name, "precision": config.precision.name, "attention": attention.name}
    choices |= {"depth_kernels": kernels.name, "loss_form": model.head.form.name}
    choices |= {"compile": config.compile.name, "ac": config.ac.name}
    shape = " x ".join(map(str, parallel.mesh.shape)) if parallel.mesh else "1"
    return model, choices | {"parallel": parallel.mode.name, "ranks": shape}


def _starting_point(
    config: TrainConfig, checkpoints: Checkpoints, ranks: Ranks
) -> Checkpoint | None:
    """The checkpoint to continue from; None for the beginning. Collective.

    Raises:
        CheckpointError: There are checkpoints, but none is complete. A start from the beginning
            would be no continuation.
    """
    if config.resume.isdigit():
        return checkpoints.at(int(config.resume))
    newest = checkpoints.newest(print if ranks.first else _quiet)
    if newest is None and ranks.of_first(lambda: checkpoints.steps() + checkpoints.superseded()):
        raise CheckpointError(
            f"{checkpoints.folder}: no checkpoint is whole; restore one, or remove the folder to "
            "start from the beginning"
        )
    return newest


def _rewind(trainer: Trainer, start: Checkpoint | None, folder: RunFolder) -> None:
    """Sets everything to the state of a checkpoint, and drops what was written after it.

    Args:
        trainer: Of the run.
        start: None: the beginning.
        folder: Of the run.

    Raises:
        RunError: A file cannot be written.
    """
    step = start.step if start else 0
    if start:
        trainer.restore(start)
        trainer.say(f"continuing from step {step}")

    def forget() -> None:
        metrics = folder.metrics_path
        if start is None and metrics.exists() and metrics.stat().st_size:
            trainer.say("no checkpoint was saved: starting again from the beginning")
        kept = step - (trainer.unevaluated is not None)  # that step's record is to come
        for gap in MetricsFile(metrics).rewind(kept, trainer.recorded):
            trainer.say(f"note      {gap}; the run goes on without them")
        if later := trainer.checkpoints.rewind(step):
            trainer.say(
                f"note      resume={step}: the checkpoints of steps {', '.join(map(str, later))} "
                f"are set aside in {folder.checkpoints_path} as .step_NNNNNN.superseded, and "
                "removed when the next one is "
                f"saved; until then resume={later[-1]} finds them. What was measured after step "
                f"{step} is dropped"
            )
        for file in (folder.path / "evaluation").glob("step_*.json"):  # of weights that are gone
            number = file.name.removeprefix("step_").partition(".")[0]
            if number.isdigit() and int(number) > step:
                file.unlink()
        folder.summary_path.unlink(missing_ok=True)

    with folder.usable():
        trainer.ranks.of_first(forget)


def _finish(folder: RunFolder, trainer: Trainer) -> None:
    """Writes the summary, made of the last record.

    The trainer evaluates at its last step before it saves.

    Raises:
        RunError: That record is missing.
        TrainingError: The summary cannot be written.
    """
    last = (MetricsFile.read(folder.metrics_path) or [{"step": 0}])[-1]
    names = (
        "step",
        "tokens",
        "loss",
        "val_loss",
        "val_tokens",
        "val_bytes",
        "val_perplexity",
        "val_bits_per_byte",
    )
    if missing := [name for name in names if name not in last]:
        raise RunError(
            f"{folder.metrics_path}: the record of step {trainer.progress.step} is missing (it "
            f"ends at step {last['step']}, without {', '.join(missing)}); write resume=STEP, an "
            "earlier checkpoint, to measure it again"
        )
    summary = {name: last[name] for name in names} | {"bad_steps": trainer.progress.bad_steps}
    summary |= {"mean_grad_norm": trainer.mean_grad_norm}
    summary |= {"seconds": trainer.spent and asdict(trainer.spent)}
    try:
        folder.finish(summary)
    except OSError as error:
        raise TrainingError(
            f"the run is finished and saved, but its summary cannot be written: {error}; the same "
            "command writes it"
        ) from error
    print(
        f"{folder.path}: finished at step {summary['step']}: held-out loss "
        f"{summary['val_loss']:.4f} nats "
        f"per token, {summary['val_bits_per_byte']:.4f} bits per byte over "
        f"{summary['val_tokens']:,} tokens"
    )
    if trainer.spent is not None:
        print(_times(trainer.spent))


def _times(spent: Spent) -> str:
    """Where the time of a run went, as a line."""
    whole, *parts = asdict(spent).items()
    shares = (f"{seconds / whole[1]:.1%} {name.replace('_', ' ')}" for name, seconds in parts)
    return f"time: {whole[1]:,.0f} s, of which {', '.join(shares)}"


def _opening(
    config: TrainConfig,
    notes: list[str],
    dataset: Dataset,
    folder: RunFolder,
    model: Transformer,
    price: Cost,
    choices: dict[str, Any],
) -> str:
    """What a person reads first: what runs, and on which machine."""
    shape = config.model
    depth = path_of(shape).description(shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    percent, side = price.added_percent, "less" if price.added_percent < 0 else "more"
    facts = {
        "run": folder.path,
        "residual": f"{depth}: {abs(percent):.4f}% {side} compute than the plain core",
        "model": f"{shape.layers} blocks of width {shape.dim}, {parameters:,} parameters",
        "data": dataset.description,
        "batch": f"{config.global_batch} x {shape.context} tokens a step, {config.steps:,} steps",
        "machine": ", ".join(
            f"{name} {value}" for name, value in choices.items() if name not in APART
        ),
        "kernels": f"{model.kernels.name}, {model.kernels.reason}",
        "loss": f"{model.head.form.name}, {model.head.form.reason}",
        "peak": f"{choices['peak_flops'] / 1e12:.3g} TFLOP/s ({choices['peak_from']})",
    }
    lines = [f"{name:<10}{value}" for name, value in facts.items()]
    return "\n".join([*lines, *(f"note      {note}" for note in notes), ""])
