"""The optimizer of a run: Muon and Adam behind one `step` and one state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.optim.adam import adam

from lrattnres.config import OptimizerConfig
from lrattnres.optim import muon, schedule
from lrattnres.optim.groups import Named, assign
from lrattnres.optim.sharding import Exchange, Layout, layout, local, owners, staggered


@dataclass(frozen=True)
class Bucket:
    """Equal matrices [rows, cols] that lie on the ranks alike."""

    parameters: list[Parameter]
    exchange: Exchange
    rows: int
    cols: int


class MuonAdam(torch.optim.Optimizer):
    """Muon on the matrices inside the blocks, Adam on embedding, head and queries (see groups.py).

    Takes the uncompiled model, or its named parameters (see `assign`), on the device where they will be trained.
    All moments are allocated at once, as zeros in the parameters' dtype, so that a checkpoint can be read into them.

    `set_step(s)` puts the schedule's values of step s in place, and each `step()` needs a `set_step` of its own. Adam
    corrects its bias by the number of updates it made, so a step that is left out does not count.

    Parameters that `fully_shard` has divided keep their moments divided alike, and each matrix is made orthogonal by
    one rank (see sharding.py), so that every step moves the weights as one process would. `mesh` is for parameters
    that are whole on every rank of a job: then the work is divided over its ranks as well. All ranks step together.

    Raises ValueError for a parameter that cannot be optimized or for `iterations` without coefficients.
    """

    def __init__(
        self, parameters: Named, config: OptimizerConfig, steps: int, mesh: DeviceMesh | None = None
    ):
        muon.ITERATIONS[config.orthogonalizer].take(config.iterations)
        owned = assign(parameters)
        # `fused` in the group tells torch's `load_state_dict` to put Adam's step counts on the parameters' device.
        groups: list[dict[str, Any]] = [
            {"params": owned["muon"]},
            {"params": owned["adam"], "fused": True},
        ]
        super().__init__(groups, {"lr": 0.0})
        self.config, self.steps = config, steps
        for parameter in self._muon["params"]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        for parameter in self._adam["params"]:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self._world, self._buckets = self._divide(mesh)
        self.set_step(0)
        self._ready = False

    # Looked up each time: `load_state_dict` replaces the groups.
    @property
    def _muon(self) -> dict[str, Any]:
        return self.param_groups[0]

    @property
    def _adam(self) -> dict[str, Any]:
        return self.param_groups[1]

    @property
    def lr_muon(self) -> float:
        """Muon's learning rate at the step set last."""
        return float(self._muon["lr"])

    @property
    def lr_adam(self) -> float:
        """Adam's learning rate at the step set last."""
        return float(self._adam["lr"])

    @property
    def momentum(self) -> float:
        """Muon's momentum at the step set last."""
        return float(self._muon["momentum"])

    @property
    def iteration_dtype(self) -> torch.dtype:
        """Arithmetic of Muon's iteration on the device of its parameters."""
        return muon.iteration_dtype(self._muon["params"][0].device)

    def set_step(self, step: int) -> None:
        """Puts learning rates and momentum of `step`, from 0, in place. Raises ValueError for a step outside the run."""
        factor = schedule.learning_rate_factor(step, self.config, self.steps)
        self._muon["lr"], self._adam["lr"] = (
            factor * self.config.muon_lr,
            factor * self.config.adam_lr,
        )
        self._muon["momentum"] = schedule.momentum(step, self.config, self.steps)
        self._step = step
        self._ready = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter in place from its gradient; takes no closure.

        Raises RuntimeError that names every parameter without a gradient, or when `set_step` was not called since the
        last update; nothing has changed then.
        """
        if not self._ready:
            raise RuntimeError("step() without set_step(); call set_step(step) before each step()")
        idle = [
            name
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if parameter.grad is None
        ]
        if idle:
            raise RuntimeError(
                f"no gradient for {', '.join(idle)}; every parameter must take part in the loss"
            )
        self._step_muon()
        routing = self.config.routing_lr
        if routing is None:
            self._step_adam(self._adam["params"], self.lr_adam)
        else:
            pairs = list(zip(self._adam["param_names"], self._adam["params"], strict=True))
            factor = schedule.learning_rate_factor(self._step, self.config, self.steps)
            for lr, router in ((self.lr_adam, False), (factor * routing, True)):
                self._step_adam(
                    [
                        parameter
                        for name, parameter in pairs
                        if name.startswith("router.") is router
                    ],
                    lr,
                )
        self._ready = False

    def _divide(self, mesh: DeviceMesh | None) -> tuple[int, list[Bucket]]:
        """The number of ranks, and Muon's matrices in one bucket for each shape and layout, owned by equal work."""
        matrices = self._muon["params"]
        layouts = [layout(parameter, mesh) for parameter in matrices]
        world = layouts[0].world
        shapes, steps = [tuple(parameter.shape) for parameter in matrices], self.config.iterations
        owner = owners([muon.flops(rows, cols, steps) for rows, cols in shapes], world)
        alike: dict[tuple[torch.Size, Layout], list[Parameter]] = defaultdict(list)
        owned: dict[tuple[torch.Size, Layout], list[int]] = defaultdict(lambda: [0] * world)
        for parameter, where, rank in zip(matrices, layouts, owner, strict=True):
            alike[parameter.shape, where].append(parameter)
            owned[parameter.shape, where][rank] += (
                1  # which of its equals a rank owns does not matter
            )
        buckets = [Bucket(alike[key], Exchange(key[1], owned[key]), *key[0]) for key in alike]
        return world, buckets

    def work(self) -> dict[str, int]:
        """What one step of Muon costs this rank: matrices it makes orthogonal, the floating-point operations of that,
        and bytes it sends to other ranks.
        """
        steps, work = self.config.iterations, {"matrices": 0, "flops": 0, "bytes_sent": 0}
        for bucket in self._buckets:
            gathered, scattered = bucket.exchange.rows_sent()
            dtype = bucket.parameters[0].dtype
            size = gathered * dtype.itemsize + scattered * self._result_dtype(dtype).itemsize
            work["matrices"] += bucket.exchange.mine
            work["flops"] += bucket.exchange.mine * muon.flops(bucket.rows, bucket.cols, steps)
            work["bytes_sent"] += bucket.cols * size
        return work

    def _step_muon(self) -> None:
        staggered(
            (self._update(bucket) for bucket in self._buckets), alive=3 if self._world > 1 else 1
        )

    def _update(self, bucket: Bucket) -> Iterator[None]:
        """One batched orthogonalisation of the matrices this rank owns; a yield wherever rows travel."""
        config, parameters, exchange = self.config, bucket.parameters, bucket.exchange
        look_ahead = muon.nesterov(
            _gradients(parameters), self._moments(parameters, "momentum_buffer"), self.momentum
        )
        gathered = exchange.gather(look_ahead)
        del look_ahead
        yield
        updates = muon.orthogonalize(gathered(), config.orthogonalizer, config.iterations)
        scattered = exchange.scatter(updates.to(self._result_dtype(updates.dtype)))
        del gathered, updates
        yield
        muon.apply_updates(
            [local(parameter) for parameter in parameters],
            scattered().to(parameters[0].dtype),
            scale=muon.update_scale(bucket.rows, bucket.cols),
            lr=self.lr_muon,
            weight_decay=config.muon_weight_decay,
            cautious=config.cautious,
        )

    def _result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which an update travels: the iteration's own where that is shorter, so nothing is lost."""
        return (
            dtype
            if self._world == 1
            else min(dtype, self.iteration_dtype, key=lambda either: either.itemsize)
        )

    def _step_adam(self, parameters: list[Parameter], lr: float) -> None:
        """Torch's own fused kernel: one pass over each tensor, no temporaries of the size of the embedding."""
        adam(
            [local(parameter) for parameter in parameters],
            _gradients(parameters),
            self._moments(parameters, "exp_avg"),
            self._moments(parameters, "exp_avg_sq"),
            [],
            self._moments(parameters, "step"),
            fused=True,
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=lr,
            weight_decay=0.0,
            eps=self.config.adam_eps,
            maximize=False,
        )

    def _moments(self, parameters: list[Parameter], moment: str) -> list[Tensor]:
        return [local(self.state[parameter][moment]) for parameter in parameters]

    def tensors(self) -> dict[str, Tensor]:
        """Every live tensor under "<parameter name>.<moment>": all state there is, to be saved or filled in place.

        Moments are momentum_buffer (Muon), exp_avg, exp_avg_sq (Adam), each shaped and divided like its parameter, and
        step (Adam), a float32 scalar, equal on all ranks. The schedule needs none.
        """
        return {
            f"{name}.{moment}": tensor
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            for moment, tensor in self.state[parameter].items()
        }


def _gradients(parameters: list[Parameter]) -> list[Tensor]:
    return [
        local(cast(Tensor, parameter.grad)) for parameter in parameters
    ]  # `step` has checked that none is None
