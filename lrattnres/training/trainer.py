"""The training loop: one run from its first step, or from a checkpoint, to its end.

Every rank of a job runs it, over its own streams. All ranks decide together: they skip the same
step, write the same checkpoint and obey the same signal.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lrattnres.config import TrainConfig
from lrattnres.data.dataset import Dataset
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.streams import batch_hash
from lrattnres.distributed.parallel import Parallel
from lrattnres.distributed.ranks import RankError, network_failed
from lrattnres.distributed.traffic import KINDS, Traffic
from lrattnres.model.loss import window_losses, window_objective
from lrattnres.model.transformer import Transformer
from lrattnres.optim.build import build_optimizer
from lrattnres.residual.probe import DepthProbe
from lrattnres.runs.checkpoint import Checkpoint, CheckpointError, Checkpoints, State
from lrattnres.runs.files import from_json, to_json
from lrattnres.training.evaluations import Interrupted, measure
from lrattnres.training.instruments import block_norms, due, gradient_norm
from lrattnres.training.machine import peak_memory
from lrattnres.training.signals import StopRequest


class TrainingError(Exception):
    """The run cannot continue; its last checkpoint is unchanged."""


@dataclass
class Progress:
    """What has been done so far; it is stored in every checkpoint.

    Attributes:
        step: Steps done, skipped ones included.
        tokens: Targets of these steps, over all ranks.
        bad_steps: Steps that were skipped, as loss or gradient were not finite.
        bad_in_a_row: How many of the last steps were skipped.
    """

    step: int = 0
    tokens: int = 0
    bad_steps: int = 0
    bad_in_a_row: int = 0


@dataclass
class Spent:
    """Seconds that a run took so far, over all its starts; it is stored in every checkpoint.

    What was done after the last checkpoint before a crash was lost, and does not count.

    Attributes:
        total: Of the training loop.
        waiting_for_data: For batches.
        evaluation: For held-out losses and depth diagnostics.
        saving: For checkpoints, as far as training stood still.
    """

    total: float = 0.0
    waiting_for_data: float = 0.0
    evaluation: float = 0.0
    saving: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What one step gave. Tensors are still on the device.

    Attributes:
        loss: Mean cross-entropy over all ranks, in nats per token: a scalar.
        z_loss: The other summand of the objective.
        grad_norm: 2-norm of the whole gradient before clipping.
        block_grad_norm: The same of each transformer block; None: not measured.
        batch_hash: Hash of this rank's part of the batch.
        windows: int64 [streams of this rank, context + 1], this rank's part of the batch.
        sent: Bytes that this rank sent, by kind of collective; None: not counted.
    """

    loss: Tensor
    z_loss: Tensor
    grad_norm: Tensor
    block_grad_norm: list[Tensor] | None
    batch_hash: int
    windows: Tensor
    sent: dict[str, int] | None = None


class Trainer:
    """Holds the parts of a run and advances them together, on every rank of a job.

    Attributes:
        progress: What has been done.
        stopped_by: Number of the signal that stopped the run; 0: none.
        unevaluated: The record of the current step, if its evaluation was left out; else None.
        recorded: The last step with a record; None: not known.
        shares: What each rank sent and used, as counted last; None: not counted.
        spent: Where the time of the whole run went; None: it began with a version that did not
            count it.
    """

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        model: Transformer,
        checkpoints: Checkpoints,
        *,
        flops_per_token: float,
        peak_flops: float,
        write: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
        write_diagnostics: Callable[[int, dict[str, Any]], None] = lambda step, diagnostics: None,
        parallel: Parallel | None = None,
    ):
        """Builds the optimizer and opens the streams. Collective.

        Args:
            config: Checked and resolved.
            dataset: The corpus.
            model: With its initial weights, whole or sharded; trained in place.
            checkpoints: Of the run.
            flops_per_token: FLOPs of a token's forward and backward pass.
            peak_flops: FLOP/s that all ranks together could do.
            write: Receives a record for each step that has something to record. It is called on
                every rank with the same values; rank 0 writes them.
            say: Receives notes for the user, in the same way.
            write_diagnostics: Receives a step and its depth diagnostics, in the same way.
            parallel: How the model is spread over the ranks; None: a single process.

        Raises:
            DataError: This rank cannot open its streams.
            RankError: Another rank cannot.
        """
        self.config, self.dataset, self.model = config, dataset, model
        self.checkpoints, self.write, self.say, self.write_diagnostics = (
            checkpoints,
            write,
            say,
            write_diagnostics,
        )
        self.parallel = parallel or Parallel()
        self.ranks = self.parallel.ranks
        self.optimizer = build_optimizer(
            model, config.optimizer, config.steps, mesh=self.parallel.mesh
        )
        self.streams = self.ranks.all_succeed(
            lambda: dataset.streams(self.ranks.rank, self.ranks.world)
        )
        self.progress = Progress()
        # Sum over the steps that were not skipped.
        self.grad_norms = torch.zeros((), dtype=torch.float64, device=model.head.weight.device)
        self._signals, self.stopped_by = StopRequest(), 0
        self.unevaluated: dict[str, Any] | None = None
        self.recorded: int | None = 0
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.shares: dict[str, Any] | None = None
        self.spent: Spent | None = Spent()
        self._restart_clock()
        self._counted = self._clock

    # --- the loop ---------------------------------------------------------------------------------

    def fit(self) -> bool:
        """Trains to the last step. Collective.

        Returns:
            Whether the run is finished. If a signal stopped it, everything is saved.

        Raises:
            UnreadableError: The next batch cannot be read; everything is saved.
            TrainingError: The loss is not finite any more, a rank is lost, or a file cannot be
                written.
            RankError: Another rank raised one of these.
        """
        self._restart_clock()
        self._counted = time.perf_counter()  # until when `spent.total` counts
        with self._signals, closing(self.streams):
            try:
                return self._fit()
            except (TrainingError, RankError):
                with suppress(CheckpointError):  # of two errors the first is raised
                    self.checkpoints.wait()  # a save in the background is of a good step
                raise
            except Exception as error:
                if not network_failed(error):
                    raise
                alive = self.ranks.liveness
                who = (
                    alive and alive.lost()
                ) or "a rank that is too slow, or behind a broken network,"
                first_line = str(error).partition("\n")[0]
                raise TrainingError(
                    f"{who} no longer answers rank {self.ranks.rank} in step "
                    f"{self.progress.step + 1}; the "
                    f"same command continues from the newest whole checkpoint ({first_line})"
                ) from error

    def _fit(self) -> bool:
        if self.unevaluated is not None:
            self._write(self.unevaluated)
            if self.stopped_by:
                return self._stopped()
        while self.progress.step < self.config.steps:
            if (alive := self.ranks.liveness) is not None:
                alive.step = self.progress.step + 1
            with self._saved_if_unreadable():
                result = self.train_step()
            self._record(result)
            self._check_bad_steps()
            if self._last or self.stopped_by or self._checkpoint_due:
                self.save()
            if self.stopped_by and (not self._last or self.unevaluated is not None):
                return self._stopped()
        return True

    def _stopped(self) -> bool:
        how = "" if self.config.resume == "auto" else " with resume=auto"
        name = signal.Signals(self.stopped_by).name
        self.say(f"{name}: saved at step {self.progress.step}; the same command{how} continues")
        return False

    @contextmanager
    def _saved_if_unreadable(self) -> Iterator[None]:
        """A context for one step, which saves the run if any rank cannot read its batch.

        What is saved is the state after the last step.

        Raises:
            UnreadableError: This rank cannot read its batch.
            RankError: Another rank cannot.
            TrainingError: A checkpoint cannot be written either.
        """
        places = self.streams.state()
        try:
            yield
        except (DataError, RankError) as error:
            if isinstance(error, RankError):  # this rank has read its part, and must read it again
                self.streams.go_back(places)
            raise self._saved(error) from error

    def _saved(self, error: DataError | RankError) -> Exception:
        """Saves everything, and returns what to raise for data that cannot be read."""
        good = not self.progress.bad_in_a_row  # see _checkpoint_due
        if good:
            self.save()
        try:
            self.checkpoints.wait()
        except CheckpointError as refused:
            return TrainingError(f"{error}\n{refused}")
        if isinstance(error, RankError):
            return error
        where = (
            f"saved at step {self.progress.step}"
            if good
            else "not saved, since the last steps were not finite"
        )
        return UnreadableError(f"{error}\n{where}; once it can be read, the same command continues")

    def train_step(self) -> StepResult:
        """Takes one optimizer step over the global batch. Collective.

        A step whose loss or gradient is not finite is counted, and changes no weight.
        """
        every, step = self.config.instruments.ranks, self.progress.step + 1
        if not due(every, step, last=self.config.steps):
            return self._train_step()
        with Traffic() as traffic:
            result = self._train_step()
        return replace(result, sent=traffic.sent)

    def _train_step(self) -> StepResult:
        progress, step = self.progress, self.progress.step
        self.optimizer.set_step(step)
        with self._spending("waiting_for_data"):
            windows = self.ranks.all_succeed(self.streams.next_batch)
        loss, z_loss, tokens = self.forward_backward(windows)
        blocks = (
            block_norms(self.model) if due(self.config.instruments.gradients, step + 1) else None
        )
        grad_norm = gradient_norm(self.model.parameters(), clip=self.config.optimizer.clip)
        # Only here does the host wait for the device, as it must know whether to take the step.
        # A signal to any rank reaches all ranks here, so that all stop after the same step. It
        # costs 16 bytes on the host.
        bad = not bool(torch.isfinite(loss + z_loss) & torch.isfinite(grad_norm))
        decision = self.ranks.largest(torch.tensor([bad, self._signals.number], dtype=torch.int64))
        bad, self.stopped_by = bool(decision[0]), int(decision[1])
        if bad:
            progress.bad_steps += 1
            progress.bad_in_a_row += 1
        else:
            self.optimizer.step()
            self.grad_norms += grad_norm
            progress.bad_in_a_row = 0
        self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += tokens
        hashed = batch_hash(step, self.streams.owned, windows)
        return StepResult(loss, z_loss, grad_norm, blocks, hashed, windows)

    def forward_backward(self, windows: Tensor) -> tuple[Tensor, Tensor, int]:
        """Adds the gradients of (Σ cross-entropy + z·Σ logsumexp²) / N. Collective.

        Sums and N are over all ranks. How the windows are cut into micro-batches and ranks does not
        change the result, except for rounding.

        Args:
            windows: int64 [S, T + 1], those of this rank.

        Returns:
            The two summands, detached float64 scalars; and N, the number of targets.
        """
        config, separator, mesh = self.config, self.dataset.tokenizer.separator, self.parallel.mesh
        tokens = int(self.ranks.sum((windows[:, 1:] >= 0).sum()))
        losses = torch.zeros(2, dtype=torch.float64, device=self.model.head.weight.device)
        parts = windows.split(config.micro_batch)
        for number, part in enumerate(parts, start=1):
            if mesh is not None and mesh.ndim == 2:  # replicas add their gradients once a step
                cast(FSDPModule, self.model).set_requires_all_reduce(number == len(parts))
            objective = window_objective(
                self.model, part, separator, documents=config.documents, z_loss=config.z_loss
            )
            # Divided by the global number of targets, not averaged: the shares of all micro-batches
            # and ranks add up to the loss of the whole batch, also where they differ in size.
            (objective.total / tokens).backward()
            sums = objective.losses.sums()
            losses += torch.stack([sums.cross_entropy, config.z_loss * sums.squared_logsumexp])
        loss, z_loss = self.ranks.sum(losses) / tokens
        return loss, z_loss, tokens

    # --- what is written --------------------------------------------------------------------------

    def _record(self, result: StepResult) -> None:
        config, progress, record = self.config, self.progress, dict[str, Any]()
        if due(config.instruments.log, progress.step, last=config.steps):
            record |= self._measurements(result)
        if result.block_grad_norm is not None:
            record["block_grad_norm"] = [norm.item() for norm in result.block_grad_norm]
        if result.sent is not None:
            self.shares = self._shares(result.sent)
            record |= self.shares
        if due(config.instruments.depth, progress.step):
            record |= self._depth(result.windows)
            self._restart_clock()
        self._write({"step": progress.step, "tokens": progress.tokens} | record)

    def _write(self, record: dict[str, Any]) -> None:
        """Writes the record of this step, with what is due on held-out tokens.

        If a signal comes before that is measured, or the tokens cannot be read, the record is
        stored in the next checkpoint. A run that continues from there writes it first.
        """
        step, self.unevaluated = self.progress.step, None
        try:
            with self._spending("evaluation"):
                held_out, diagnostics = measure(
                    self.config, self.dataset, self.model, self.ranks, step, self._pause
                )
        except Interrupted:
            self.unevaluated = record
            return
        except (DataError, RankError) as error:
            self.unevaluated = record
            raise self._saved(error) from error
        if held_out or diagnostics:
            self._restart_clock()
        whole = record | held_out

        def write() -> None:
            try:
                if diagnostics is not None:
                    self.write_diagnostics(step, diagnostics)
                if whole.keys() > {"step", "tokens"}:
                    self.write(whole)
            except OSError as error:  # a full disk; without its metrics a run is of no use
                raise TrainingError(
                    f"the metrics of step {step} cannot be written: {error}"
                ) from error

        self.ranks.all_succeed(write)
        if whole.keys() > {"step", "tokens"}:
            self.recorded = step

    def _pause(self) -> None:
        """Lets a signal stop an evaluation. Collective.

        Raises:
            Interrupted: On all ranks, if any of them has received a signal.
        """
        self.stopped_by = int(self.ranks.largest(torch.tensor(self._signals.number)))
        if self.stopped_by:
            raise Interrupted

    def _measurements(self, result: StepResult) -> dict[str, Any]:
        """The numbers of a step for its record; waits for the device."""
        values = {
            "loss": result.loss.item(),
            "z_loss": result.z_loss.item(),
            "grad_norm": result.grad_norm.item(),
            **self.optimizer.rates(),
            "bad_steps": self.progress.bad_steps,
            "skipped_groups": int(self.ranks.sum(torch.tensor(self.streams.skipped))),
            "skipped_rows": int(self.ranks.sum(torch.tensor(self.streams.skipped_rows))),
            "batch_hash": f"{self._global_hash(result.batch_hash):016x}",
        }
        # Read after the values above, which wait for the device to finish its step.
        seconds, tokens = (
            time.perf_counter() - self._clock,
            self.progress.tokens - self._clock_tokens,
        )
        self._restart_clock()
        rate = tokens / seconds if seconds > 0 else math.nan
        return values | {
            "tokens_per_second": rate,
            "mfu": rate * self.flops_per_token / self.peak_flops,
        }

    def _shares(self, sent: dict[str, int]) -> dict[str, Any]:
        """What every rank used and sent, in bytes, in the order of the ranks. Collective.

        Args:
            sent: What this rank sent in this step, by kind of collective.

        Returns:
            `bytes_sent` by kind, and `peak_memory` so far.
        """
        mine = [*(sent[kind] for kind in KINDS), peak_memory(self.model.head.weight.device)]
        *kinds, peaks = self.ranks.gather(torch.tensor(mine)).T.tolist()
        return {"bytes_sent": dict(zip(KINDS, kinds, strict=True)), "peak_memory": peaks}

    def _global_hash(self, part: int) -> int:
        """The hash of the whole batch: the sum of all parts modulo 2**64."""
        signed = part - 2**64 if part >= 2**63 else part
        return int(self.ranks.sum(torch.tensor(signed))) % 2**64

    def _depth(self, windows: Tensor) -> dict[str, Any]:
        """Depth diagnostics over the windows of the first `micro_batch` streams. Collective.

        A rank that owns none of these streams runs the model too, but does not count.

        Args:
            windows: int64 [S, T + 1], those of this rank.
        """
        mine = [
            row for row, stream in enumerate(self.streams.owned) if stream < self.config.micro_batch
        ]
        probe, unseen = DepthProbe(self.model.router), DepthProbe(self.model.router)
        with torch.no_grad():
            separator, documents, observe = (
                self.dataset.tokenizer.separator,
                self.config.documents,
                probe if mine else unseen,
            )
            window_losses(
                self.model, windows[mine or [0]], separator, documents=documents, observe=observe
            )
        for sums in probe.sums():
            self.ranks.sum(sums)
        results = probe.results()
        return {
            name: results[name] for name in ("hidden_norm", "newest_weight", "effective_sources")
        }

    @property
    def mean_grad_norm(self) -> float:
        """The gradient's norm before clipping, averaged over all steps so far that were finite."""
        return self.grad_norms.item() / max(self.progress.step - self.progress.bad_steps, 1)

    def _check_bad_steps(self) -> None:
        """Stops a run that diverges.

        Raises:
            TrainingError: `max_bad_steps` steps in a row were not finite.
        """
        if self.progress.bad_in_a_row >= self.config.max_bad_steps:
            raise TrainingError(
                f"{self.progress.bad_in_a_row} steps in a row had a loss or gradient that is not "
                f"finite, the last of them step {self.progress.step}; no checkpoint was saved "
                "since then. Lower the learning rates of `optimizer`, or raise "
                f"max_bad_steps={self.config.max_bad_steps}"
            )

    # --- state ------------------------------------------------------------------------------------

    def state(self) -> State:
        """Everything that a continuation needs: top-level name -> key -> tensor. Collective."""
        # [world, owned, k]; stream s is row s // world of rank s % world.
        places = self.ranks.gather(self.streams.state())
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.tensors(),
            "loader": {
                "streams": places[..., :4].transpose(0, 1).flatten(0, 1).contiguous(),
                "skipped_rows": places[..., 4].T.flatten(),
            },
            "progress": {
                name: torch.tensor(value) for name, value in asdict(self.progress).items()
            },
            "gradients": {"norm_sum": self.grad_norms.cpu()},
            "random": {f"cpu.rank{self.ranks.rank}": torch.get_rng_state()},
        }

    def save(self) -> None:
        """Saves a checkpoint of this moment. Collective.

        The last checkpoint of a start is on the disk when this returns; others may still be in the
        background.

        Raises:
            TrainingError: It cannot be written.
        """
        details: dict[str, Any] = {"tokens": self.progress.tokens, "recorded": self.recorded}
        self._count()
        if self.spent is not None:
            details["seconds"] = asdict(self.spent)
        if self.unevaluated is not None:
            details["unevaluated"] = to_json(self.unevaluated)
        try:
            with self._spending("saving"):
                self.checkpoints.save(self.progress.step, self.state(), details)
                if self._last or self.stopped_by:
                    self.checkpoints.wait()
        except CheckpointError as error:
            raise TrainingError(str(error)) from error
        self._restart_clock()
        self._count()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Sets everything to the state of a checkpoint, written by any number of ranks. Collective.

        A rank that did not exist then keeps its random state, which the seed gave.

        Raises:
            CheckpointError: The checkpoint does not fit, or cannot be read.
        """
        state = self.state()
        state["random"] = {
            name: torch.empty_like(torch.get_rng_state()) for name in checkpoint.keys("random")
        }
        loader = state["loader"]
        rows = loader["skipped_rows"].zero_()
        if "skipped_rows" not in checkpoint.keys("loader"):  # an older version did not count them
            state["loader"] = {"streams": loader["streams"]}
        checkpoint.load(state)
        self.grad_norms.copy_(state["gradients"]["norm_sum"])
        places = torch.column_stack([loader["streams"], rows])
        places = places[self.ranks.rank :: self.ranks.world]
        self.ranks.all_succeed(lambda: self.streams.load_state(places))
        self.progress = Progress(**{name: int(value) for name, value in state["progress"].items()})
        self.recorded = checkpoint.details.get("recorded")
        seconds = checkpoint.details.get("seconds")
        self.spent = None if seconds is None else Spent(**seconds)
        waiting = checkpoint.details.get("unevaluated")
        self.unevaluated = None if waiting is None else from_json(waiting)
        if (own := state["random"].get(f"cpu.rank{self.ranks.rank}")) is not None:
            torch.set_rng_state(own)

    # --- when -------------------------------------------------------------------------------------

    @property
    def _checkpoint_due(self) -> bool:
        """Whether to save now.

        Not after a bad step: the run may end soon, and the last good checkpoint must stay.
        """
        return (
            due(self.config.checkpoint.every, self.progress.step) and not self.progress.bad_in_a_row
        )

    @property
    def _last(self) -> bool:
        return self.progress.step == self.config.steps

    @contextmanager
    def _spending(self, part: str) -> Iterator[None]:
        """A context whose time is counted as a part of the run's."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self.spent is not None:
                now = time.perf_counter()
                setattr(self.spent, part, getattr(self.spent, part) + now - begin)

    def _count(self) -> None:
        now = time.perf_counter()
        if self.spent is not None:
            self.spent.total += now - self._counted
        self._counted = now

    def _restart_clock(self) -> None:
        self._clock, self._clock_tokens = time.perf_counter(), self.progress.tokens
