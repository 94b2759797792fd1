"""The optimizer of a run: Muon and Adam behind one `step` and one state."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adam import adam

from lrattnres.config import OptimizerConfig
from lrattnres.optim import muon, schedule
from lrattnres.optim.groups import Named, assign


class MuonAdam(torch.optim.Optimizer):
    """Muon on the matrices inside the blocks, Adam on embedding, head and queries (see groups.py).

    Takes the uncompiled model, or its named parameters (see `assign`), on the device where they will be trained.
    All moments are allocated at once, as zeros in the parameters' dtype, so that a checkpoint can be read into them.

    `set_step(s)` puts the schedule's values of step s in place, and each `step()` needs a `set_step` of its own. Adam
    corrects its bias by the number of updates it made, so a step that is left out does not count.

    Raises ValueError for a parameter that cannot be optimized or for `iterations` without coefficients.
    """

    def __init__(self, parameters: Named, config: OptimizerConfig, steps: int):
        muon.ITERATIONS[config.orthogonalizer].take(config.iterations)
        owned = assign(parameters)
        # `fused` in the group tells torch's `load_state_dict` to put Adam's step counts on the parameters' device.
        groups: list[dict[str, Any]] = [{"params": owned["muon"]}, {"params": owned["adam"], "fused": True}]
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
        self._muon["lr"], self._adam["lr"] = factor * self.config.muon_lr, factor * self.config.adam_lr
        self._muon["momentum"] = schedule.momentum(step, self.config, self.steps)
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
            raise RuntimeError(f"no gradient for {', '.join(idle)}; every parameter must take part in the loss")
        self._step_muon(self._muon["params"])
        self._step_adam(self._adam["params"])
        self._ready = False

    def _step_muon(self, parameters: list[Parameter]) -> None:
        """One batched orthogonalisation for each shape."""
        shapes: dict[torch.Size, list[Parameter]] = defaultdict(list)
        for parameter in parameters:
            shapes[parameter.shape].append(parameter)
        config = self.config
        for same in shapes.values():
            look_ahead = muon.nesterov(_gradients(same), self._moments(same, "momentum_buffer"), self.momentum)
            updates = muon.orthogonalize(look_ahead, config.orthogonalizer, config.iterations)
            muon.apply_updates(same, updates, self.lr_muon, config.muon_weight_decay, config.cautious)

    def _step_adam(self, parameters: list[Parameter]) -> None:
        """Torch's own fused kernel: one pass over each tensor, no temporaries of the size of the embedding."""
        adam(
            list(parameters),
            _gradients(parameters),
            self._moments(parameters, "exp_avg"),
            self._moments(parameters, "exp_avg_sq"),
            [],
            self._moments(parameters, "step"),
            fused=True,
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=self.lr_adam,
            weight_decay=0.0,
            eps=self.config.adam_eps,
            maximize=False,
        )

    def _moments(self, parameters: list[Parameter], moment: str) -> list[Tensor]:
        return [self.state[parameter][moment] for parameter in parameters]

    def tensors(self) -> dict[str, Tensor]:
        """Every live tensor under "<parameter name>.<moment>": all state there is, to be saved or filled in place.

        Moments are momentum_buffer (Muon), exp_avg, exp_avg_sq (Adam), each shaped like its parameter, and step
        (Adam), a float32 scalar. The schedule needs none.
        """
        return {
            f"{name}.{moment}": tensor
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            for moment, tensor in self.state[parameter].items()
        }


def _gradients(parameters: list[Parameter]) -> list[Tensor]:
    return cast(list[Tensor], [parameter.grad for parameter in parameters])  # `step` has checked that none is None
