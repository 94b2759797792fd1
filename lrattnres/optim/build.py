"""The table of optimizers, and what a run asks of each of them.

A new optimizer is a class with the methods of `RunOptimizer` and an entry in `OPTIMIZERS`. The
trainer, the memory estimate and the messages of a run name no algorithm.
"""

from __future__ import annotations

import difflib
from typing import Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lrattnres.config import OptimizerConfig
from lrattnres.model.transformer import Transformer
from lrattnres.optim.groups import Named, Roles
from lrattnres.optim.muon_adam import MuonAdam


class RunOptimizer(Protocol):
    """The optimizer of a run. On many ranks, all of them call each method at the same time."""

    def set_step(self, step: int) -> None:
        """Puts the learning rates of `step`, from 0, in place; each update needs a call."""

    def step(self) -> None:
        """Updates every parameter in place from its gradient."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Removes the gradients."""

    def rates(self) -> dict[str, float]:
        """What is logged of the schedule at the step set last, by its name in metrics.jsonl."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state, by its name in checkpoints, to be saved or filled in place.

        They are there from the start, also on the meta device: so they tell the state's size.
        """

    def work(self) -> dict[str, int]:
        """What one update costs this rank: at least `flops` and `bytes_sent` to other ranks."""

    def ownership(self) -> str:
        """A table of who updates which parameter at which rate; printed when a run starts."""


class Entry(Protocol):
    """A row of the table: how an optimizer is made."""

    def __call__(
        self,
        parameters: Named,
        config: OptimizerConfig,
        steps: int,
        *,
        roles: Roles,
        mesh: DeviceMesh | None,
    ) -> RunOptimizer: ...


OPTIMIZERS: dict[str, Entry] = {"muon_adam": MuonAdam}
"""What `optimizer.name` may be."""


def unknown(name: str) -> str | None:
    """What is wrong with an `optimizer.name` that is not in the table; None for one that is."""
    if name in OPTIMIZERS:
        return None
    close = difflib.get_close_matches(name, OPTIMIZERS, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"optimizer.name={name}: must be one of {', '.join(OPTIMIZERS)}{hint}"


def build_optimizer(
    model: Transformer, config: OptimizerConfig, steps: int, mesh: DeviceMesh | None = None
) -> RunOptimizer:
    """The optimizer of a model, with all of its state.

    Args:
        model: not compiled, on the device where it is trained (or on meta), sharded already if
            it will be.
        config: the optimizer's settings; `config.name` chooses the entry of the table.
        steps: optimizer steps of the whole run, on which the schedules depend.
        mesh: all ranks of a job whose parameters are whole on each of them: the work is then
            divided among them. Sharded parameters bring their own mesh.

    Raises:
        ValueError: the name is unknown, or some parameter cannot be optimized.
    """
    if (error := unknown(config.name)) is not None:
        raise ValueError(error)
    return OPTIMIZERS[config.name](
        model.named_parameters(remove_duplicate=False),
        config,
        steps,
        roles=model.roles(),
        mesh=mesh,
    )
