"""Muon on the matrices, Adam on everything else, behind one `step` and one state."""

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
from lrattnres.optim.groups import PATH, Named, Roles, assign, ownership_table
from lrattnres.optim.sharding import Exchange, Layout, layout, local, owners, staggered

OWNERS = {"muon_lr": "muon", "adam_lr": "adam", "routing_lr": "adam"}
"""The settings that are peak learning rates, and the algorithm of the parameters that take each."""


@dataclass(frozen=True)
class Bucket:
    """Equal matrices [rows, cols] that lie on the ranks alike."""

    parameters: list[Parameter]
    exchange: Exchange
    rows: int
    cols: int


class MuonAdam(torch.optim.Optimizer):
    """Muon on the matrices inside the blocks, Adam on the rest: `assign` says which is which.

    All moments are made at once, as zeros in the parameters' dtype, so a checkpoint can be read
    into them. `set_step(s)` puts the schedule's values of step s in place, and each `step()` needs
    a `set_step` of its own. Adam corrects its bias by the number of updates that it made, so a step
    that is left out does not count. Only Muon's parameters decay.

    Parameters that `fully_shard` has divided keep their moments divided alike, and each matrix is
    made orthogonal by one rank (see sharding.py), so every step moves the weights as one process
    would. All ranks step together.

    Args:
        parameters: (name, parameter) pairs of the model that is not compiled, on the device where
            they are trained; see `assign`.
        config: rates, momentum, decay and the orthogonalizer. `routing_lr`, if set, is the rate of
            all that Adam owns in the residual path.
        steps: optimizer steps of the whole run.
        roles: those of the residual path's parameters; see `assign`.
        mesh: all ranks of a job, for parameters that are whole on each: they share the work.

    Raises:
        ValueError: a parameter cannot be optimized, there are no coefficients for `iterations`, or
            no parameter takes `routing_lr`.
    """

    def __init__(
        self,
        parameters: Named,
        config: OptimizerConfig,
        steps: int,
        *,
        roles: Roles,
        mesh: DeviceMesh | None = None,
    ):
        muon.ITERATIONS[config.orthogonalizer].take(config.iterations)
        owned = assign(parameters, roles)
        routed = config.routing_lr is not None
        rates: dict[str, list[tuple[str, Parameter]]] = {
            "muon_lr": owned["muon"],
            "adam_lr": [pair for pair in owned["adam"] if not (routed and _in_path(pair))],
            "routing_lr": [pair for pair in owned["adam"] if routed and _in_path(pair)],
        }
        if routed and not rates["routing_lr"]:
            raise ValueError(
                f"optimizer.routing_lr={config.routing_lr}: Adam owns no parameter of the residual "
                "path; write null"
            )
        # `fused` lets torch's `load_state_dict` put Adam's step counts on the parameters' device.
        groups: list[dict[str, Any]] = [
            {"params": pairs, "setting": setting, "fused": OWNERS[setting] == "adam"}
            for setting, pairs in rates.items()
            if pairs
        ]
        super().__init__(groups, {"lr": 0.0})
        self.config, self.steps = config, steps
        self._matrices = [parameter for _, parameter in owned["muon"]]
        for parameter in self._matrices:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        for _, parameter in owned["adam"]:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self._world, self._buckets = self._divide(mesh)
        self.set_step(0)
        self._ready = False

    @property
    def iteration_dtype(self) -> torch.dtype:
        """Arithmetic of Muon's iteration on the device of the parameters."""
        return muon.iteration_dtype(self.param_groups[0]["params"][0].device)

    def set_step(self, step: int) -> None:
        """Puts learning rates and momentum of `step` in place.

        Args:
            step: counts from 0.

        Raises:
            ValueError: the step is outside the run.
        """
        factor = schedule.learning_rate_factor(step, self.config, self.steps)
        for group in self.param_groups:
            group["lr"] = factor * getattr(self.config, group["setting"])
        self._momentum = schedule.momentum(step, self.config, self.steps)
        self._ready = True

    def rates(self) -> dict[str, float]:
        """At the step set last: lr_muon, lr_adam, lr_routing if it is set, and Muon's momentum."""
        rates = {_logged(group["setting"]): float(group["lr"]) for group in self.param_groups}
        return rates | {"momentum": self._momentum}

    def ownership(self) -> str:
        """A table of who updates which parameter, and the setting with its peak learning rate."""
        return ownership_table(
            (OWNERS[setting], f"{setting}={getattr(self.config, setting)}", _named(group))
            for group in self.param_groups
            for setting in [group["setting"]]
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter in place from its gradient; takes no closure.

        Raises:
            RuntimeError: some parameters have no gradient (it names them), or `set_step` was not
                called since the last update. Nothing has changed then.
        """
        if not self._ready:
            raise RuntimeError("step() without set_step(); call set_step(step) before each step()")
        idle = [
            name
            for group in self.param_groups
            for name, parameter in _named(group)
            if parameter.grad is None
        ]
        if idle:
            raise RuntimeError(
                f"no gradient for {', '.join(idle)}; every parameter must take part in the loss"
            )
        for group in self.param_groups:
            if OWNERS[group["setting"]] == "muon":
                self._step_muon(group["lr"])
            else:
                self._step_adam(group["params"], group["lr"])
        self._ready = False

    def _divide(self, mesh: DeviceMesh | None) -> tuple[int, list[Bucket]]:
        """The number of ranks, and one bucket of matrices for each shape and layout."""
        matrices = self._matrices
        layouts = [layout(parameter, mesh) for parameter in matrices]
        world = layouts[0].world if layouts else 1
        shapes, steps = [tuple(parameter.shape) for parameter in matrices], self.config.iterations
        owner = owners([muon.flops(rows, cols, steps) for rows, cols in shapes], world)
        alike: dict[tuple[torch.Size, Layout], list[Parameter]] = defaultdict(list)
        owned: dict[tuple[torch.Size, Layout], list[int]] = defaultdict(lambda: [0] * world)
        for parameter, where, rank in zip(matrices, layouts, owner, strict=True):
            alike[parameter.shape, where].append(parameter)
            owned[parameter.shape, where][rank] += 1  # which of its equals a rank owns is the same
        buckets = [Bucket(alike[key], Exchange(key[1], owned[key]), *key[0]) for key in alike]
        return world, buckets

    def work(self) -> dict[str, int]:
        """What one update costs this rank.

        Returns:
            matrices: how many it makes orthogonal; flops: the floating-point operations of that;
            bytes_sent: to other ranks.
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

    def _step_muon(self, lr: float) -> None:
        alive = 3 if self._world > 1 else 1
        staggered((self._update(bucket, lr) for bucket in self._buckets), alive=alive)

    def _update(self, bucket: Bucket, lr: float) -> Iterator[None]:
        """One batched orthogonalisation of this rank's matrices; a yield wherever rows travel."""
        config, parameters, exchange = self.config, bucket.parameters, bucket.exchange
        look_ahead = muon.nesterov(
            _gradients(parameters), self._moments(parameters, "momentum_buffer"), self._momentum
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
            lr=lr,
            weight_decay=config.muon_weight_decay,
            cautious=config.cautious,
        )

    def _result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which an update travels: the iteration's own if shorter, so nothing is lost."""
        if self._world == 1:
            return dtype
        return min(dtype, self.iteration_dtype, key=lambda either: either.itemsize)

    def _step_adam(self, parameters: list[Parameter], lr: float) -> None:
        """Torch's own fused kernel: one pass over each tensor, without temporaries of its size."""
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
        """All state there is, to be saved or filled in place. The schedule needs none.

        Returns:
            "<parameter name>.<moment>" -> the live tensor. Moments are momentum_buffer (Muon),
            exp_avg and exp_avg_sq (Adam), each shaped and divided like its parameter, and step
            (Adam), a float32 scalar, equal on all ranks.
        """
        return {
            f"{name}.{moment}": tensor
            for group in self.param_groups
            for name, parameter in _named(group)
            for moment, tensor in self.state[parameter].items()
        }


def _in_path(pair: tuple[str, Parameter]) -> bool:
    return pair[0].startswith(PATH)


def _logged(setting: str) -> str:
    return "lr_" + setting.removesuffix("_lr")


def _named(group: dict[str, Any]) -> list[tuple[str, Parameter]]:
    return list(zip(group["param_names"], group["params"], strict=True))


def _gradients(parameters: list[Parameter]) -> list[Tensor]:
    # `step` has checked that none is None
    return [local(cast(Tensor, parameter.grad)) for parameter in parameters]
