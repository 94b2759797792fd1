"""One run from its first step, or from its newest checkpoint, to its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lrattnres.config import TrainConfig
from lrattnres.data.dataset import Dataset
from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.streams import batch_hash
from lrattnres.depth.probe import DepthProbe
from lrattnres.evaluation.heldout import evaluate
from lrattnres.evaluation.loss import window_losses
from lrattnres.model.transformer import Transformer
from lrattnres.optim.optimizer import MuonAdam
from lrattnres.runs.checkpoint import Checkpoint, CheckpointError, Checkpoints, State
from lrattnres.training.instruments import block_norms, gradient_norm
from lrattnres.training.signals import StopRequest


class TrainingError(Exception):
    """The run cannot go on; its last checkpoint is as it was."""


@dataclass
class Progress:
    """What has been done so far: integers that travel with every checkpoint."""

    step: int = 0
    tokens: int = 0
    bad_steps: int = 0
    bad_in_a_row: int = 0


@dataclass(frozen=True)
class StepResult:
    """One step's mean losses and gradient norm, still on the device, and the hash of its batch."""

    loss: Tensor
    z_loss: Tensor
    grad_norm: Tensor
    block_grad_norm: list[Tensor] | None
    batch_hash: int
    windows: Tensor


class Trainer:
    """Holds the parts of a run and moves them forward together.

    `write(record)` receives one record for every step that has something to say; `say(text)` receives remarks.
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
    ):
        self.config, self.dataset, self.model = config, dataset, model
        self.checkpoints, self.write, self.say = checkpoints, write, say
        self.optimizer = MuonAdam(model, config.optimizer, config.steps)
        self.streams = dataset.streams()
        self.progress = Progress()
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self._restart_clock()

    # --- the loop -------------------------------------------------------------------------------------------------

    def fit(self) -> bool:
        """Trains to the last step. False if a signal stopped it before: then everything is saved.

        Raises UnreadableError, after everything is saved, where the next batch cannot be read.
        """
        self._restart_clock()
        with StopRequest() as stop, closing(self.streams):
            while self.progress.step < self.config.steps:
                with self._saved_if_unreadable():
                    result = self.train_step()
                self._record(result)
                self._check_bad_steps()
                if self._last or stop.received or self._checkpoint_due:
                    self.save()
                if stop.received and not self._last:
                    self.say(f"{stop.received.name}: saved at step {self.progress.step}; the same command continues")
                    return False
        return True

    @contextmanager
    def _saved_if_unreadable(self) -> Iterator[None]:
        """A batch that cannot be read stops the run before its step begins: all is as after the step before."""
        try:
            yield
        except DataError as fault:
            if not self.progress.bad_in_a_row:  # see _checkpoint_due
                self.save()
            step = self.progress.step
            raise UnreadableError(f"{fault}\nsaved at step {step}; once it can be read, the same command continues") from fault

    def train_step(self) -> StepResult:
        """One optimizer step over the global batch; a non-finite one changes no weight and is counted."""
        progress, step = self.progress, self.progress.step
        self.optimizer.set_step(step)
        windows = self.streams.next_batch()
        loss, z_loss, tokens = self.forward_backward(windows)
        blocks = block_norms(self.model) if self._due(self.config.instruments.gradients, step + 1) else None
        grad_norm = gradient_norm(self.model.parameters(), clip=self.config.optimizer.clip)
        # The one place where the host waits for the device: it has to know whether to take the step.
        if bool(torch.isfinite(loss + z_loss) & torch.isfinite(grad_norm)):
            self.optimizer.step()
            progress.bad_in_a_row = 0
        else:
            progress.bad_steps += 1
            progress.bad_in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += tokens
        hashed = batch_hash(step, self.streams.owned, windows)
        return StepResult(loss, z_loss, grad_norm, blocks, hashed, windows)

    def forward_backward(self, windows: Tensor) -> tuple[Tensor, Tensor, int]:
        """Gradients of (Σ cross-entropy + z·Σ logsumexp²) / tokens, the sums and the count over all windows [S, T+1].

        Returns the two parts of that quotient, detached, and the number of tokens. How the windows are cut into
        micro-batches does not change the result, but for rounding.
        """
        config, separator = self.config, self.dataset.tokenizer.separator
        tokens = int((windows[:, 1:] >= 0).sum())
        loss = z_loss = torch.zeros((), dtype=torch.float64, device=self.model.head.weight.device)
        for part in windows.split(config.micro_batch):
            sums = window_losses(self.model, part, separator, documents=config.documents).sums()
            cross_entropy, penalty = sums.cross_entropy / tokens, config.z_loss * sums.squared_logsumexp / tokens
            (cross_entropy + penalty).backward()
            loss, z_loss = loss + cross_entropy.detach(), z_loss + penalty.detach()
        return loss, z_loss, tokens

    # --- what is written ------------------------------------------------------------------------------------------

    def _record(self, result: StepResult) -> None:
        config, progress, record = self.config, self.progress, dict[str, Any]()
        if self._due(config.instruments.log) or self._last:
            record |= self._measurements(result)
        if result.block_grad_norm is not None:
            record["block_grad_norm"] = [norm.item() for norm in result.block_grad_norm]
        if self._due(config.instruments.depth):
            record |= self._depth(result.windows[: config.micro_batch])
            self._restart_clock()
        if self._due(config.evaluation.every) or self._last:
            evaluation = config.evaluation
            windows = self.dataset.held_out_windows(evaluation.tokens, evaluation.batch)
            record |= evaluate(self.model, windows, self.dataset.tokenizer, documents=config.documents).record()
            self._restart_clock()
        if record:
            try:
                self.write({"step": progress.step, "tokens": progress.tokens} | record)
            except OSError as fault:  # a full disk; without its metrics a run is not worth its while
                raise TrainingError(f"the metrics of step {progress.step} cannot be written: {fault}") from fault

    def _measurements(self, result: StepResult) -> dict[str, Any]:
        values = {
            "loss": result.loss.item(),
            "z_loss": result.z_loss.item(),
            "grad_norm": result.grad_norm.item(),
            "lr_muon": self.optimizer.lr_muon,
            "lr_adam": self.optimizer.lr_adam,
            "momentum": self.optimizer.momentum,
            "bad_steps": self.progress.bad_steps,
            "skipped_groups": self.streams.skipped,
            "batch_hash": f"{result.batch_hash:016x}",
        }
        # Read after the values above, which wait for the device to finish its step.
        seconds, tokens = time.perf_counter() - self._clock, self.progress.tokens - self._clock_tokens
        self._restart_clock()
        rate = tokens / seconds if seconds > 0 else math.nan
        return values | {"tokens_per_second": rate, "mfu": rate * self.flops_per_token / self.peak_flops}

    def _depth(self, windows: Tensor) -> dict[str, Any]:
        probe = DepthProbe(self.model.router)
        with torch.no_grad():
            separator, documents = self.dataset.tokenizer.separator, self.config.documents
            window_losses(self.model, windows, separator, documents=documents, observe=probe)
        results = probe.results()
        return {name: results[name] for name in ("hidden_norm", "newest_weight", "effective_sources")}

    def _check_bad_steps(self) -> None:
        if self.progress.bad_in_a_row >= self.config.max_bad_steps:
            raise TrainingError(
                f"{self.progress.bad_in_a_row} steps in a row had a loss or gradient that is not finite, the last of "
                f"them step {self.progress.step}; the newest checkpoint is from before. Lower optimizer.muon_lr or "
                f"optimizer.adam_lr, or raise max_bad_steps={self.config.max_bad_steps}"
            )

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Everything a continuation needs, as tensors under plain names."""
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.tensors(),
            "loader": {"streams": self.streams.state()},
            "progress": {name: torch.tensor(value) for name, value in asdict(self.progress).items()},
            "random": {"cpu": torch.get_rng_state()},
        }

    def save(self) -> None:
        """A checkpoint of this moment. Raises TrainingError where the disk refuses it."""
        try:
            self.checkpoints.save(self.progress.step, self.state(), {"tokens": self.progress.tokens})
        except CheckpointError as fault:
            raise TrainingError(str(fault)) from fault
        self._restart_clock()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continues as if there had been no stop."""
        state = self.state()
        checkpoint.load(state)
        self.streams.load_state(state["loader"]["streams"])
        self.progress = Progress(**{name: int(value) for name, value in state["progress"].items()})
        torch.set_rng_state(state["random"]["cpu"])

    # --- when -----------------------------------------------------------------------------------------------------

    @property
    def _checkpoint_due(self) -> bool:
        """Not while steps are going wrong: what comes next may stop the run, and the last good checkpoint must stay."""
        return self._due(self.config.checkpoint.every) and not self.progress.bad_in_a_row

    @property
    def _last(self) -> bool:
        return self.progress.step == self.config.steps

    def _due(self, every: int | None, step: int | None = None) -> bool:
        step = self.progress.step if step is None else step
        return every is not None and step % every == 0

    def _restart_clock(self) -> None:
        self._clock, self._clock_tokens = time.perf_counter(), self.progress.tokens
