"""Learning rate and momentum as pure functions of the step: nothing to save, nothing to restore.

Ramps that overlap would keep a run below its peak. The check of the whole configuration refuses
them; here the lower of the two holds.
"""

from __future__ import annotations

from lrattnres.config import OptimizerConfig


def learning_rate_factor(step: int, config: OptimizerConfig, steps: int) -> float:
    """The learning rate of `step` as a share of its peak.

    Step s of the warm-up uses (s + 1) / warmup. The warm-down is the last round(warmdown * steps)
    steps: the step before it still has 1, the last step has exactly `final`.

    Args:
        step: from 0 to `steps` - 1.
        config: warmup, warmdown and final.
        steps: of the whole run.

    Raises:
        ValueError: the step is outside the run.
    """
    left = _steps_left(step, steps)
    return min(
        _share(step + 1, config.warmup),
        _between(config.final, 1.0, _share(left, round(config.warmdown * steps))),
    )


def momentum(step: int, config: OptimizerConfig, steps: int) -> float:
    """Muon's Nesterov momentum at `step`.

    It starts at `momentum_low`, reaches `momentum` at step `momentum_rise`, and falls over the last
    `momentum_fall` steps, so that the last step has exactly `momentum_low`. A length of 0 leaves
    that ramp out.

    Args:
        step: from 0 to `steps` - 1.
        config: momentum, momentum_low, momentum_rise and momentum_fall.
        steps: of the whole run.

    Raises:
        ValueError: the step is outside the run.
    """
    left = _steps_left(step, steps)
    share = min(_share(step, config.momentum_rise), _share(left, config.momentum_fall))
    return _between(config.momentum_low, config.momentum, share)


def _steps_left(step: int, steps: int) -> int:
    """Steps after this one."""
    if not 0 <= step < steps:
        raise ValueError(f"step={step}: must be 0 to {steps - 1}, since the run has steps={steps}")
    return steps - 1 - step


def _share(done: int, length: int) -> float:
    """How much of a ramp of `length` steps is done, at most 1; a ramp of no steps is done."""
    return min(1.0, done / length) if length else 1.0


def _between(low: float, high: float, share: float) -> float:
    """Linear interpolation that returns both ends exactly."""
    return (1.0 - share) * low + share * high
