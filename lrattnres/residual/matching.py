"""Comparisons at equal parameters, tokens or compute: what of a run changes so that it matches
another residual path.

The other run is the same configuration with `model.residual=match_to`. One number changes, and it
is a whole number, so something may be left over; a Matched says what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from lrattnres.config import ModelConfig, TrainConfig
from lrattnres.residual.base import path_of
from lrattnres.residual.cost import cost


class Matched(NamedTuple):
    """The configuration that matches, and a sentence: what was changed, and by how much it is still
    off.
    """

    config: TrainConfig
    note: str


def reference_of(model: ModelConfig, residual: str) -> ModelConfig:
    """The same model with the residual path `residual`, as published.

    Args:
        model: with the rank and depth blocks that the other path is to have, if it has a use for
            them.
        residual: a name of the table of paths.

    Raises:
        ValueError: if the other path cannot have these settings.
    """
    path = model.path if residual == model.residual else {}
    other = dataclasses.replace(model, residual=residual, routing=None, path=path)
    if errors := list(path_of(other).errors(other)):
        raise ValueError("; ".join(f"match_to={residual}: {error}" for error in errors))
    return path_of(other).settled(other)[0]


def _parameters(model: ModelConfig) -> int:
    return cost(model).model_parameters


def _flops(model: ModelConfig) -> int:
    return cost(model).training_flops


def _by_parameters(config: TrainConfig, other: ModelConfig) -> Matched:
    """The width of the MLP for which the number of parameters, which is linear in it, comes
    closest.
    """
    goal, model = _parameters(other), config.model

    def of(width: int) -> int:
        return _parameters(dataclasses.replace(model, mlp_width=width))

    slope = of(1) - of(0)
    width = round((goal - of(0)) / slope)
    if width < 1:
        raise ValueError(
            f"match=parameters: {goal:,} parameters of {other.residual} leave no MLP beside "
            f"{model.residual}, which has {of(0):,} without one; write a larger "
            "model.mlp_width, or a smaller model.rank"
        )
    changed = dataclasses.replace(config, model=dataclasses.replace(model, mlp_width=width))
    return Matched(
        changed, _sentence("model.mlp_width", model.mlp_width, width, of(width), goal, "parameters")
    )


def _by_tokens(config: TrainConfig, other: ModelConfig) -> Matched:
    """Nothing to change: the other run has the same batch and steps. It is said, so that it is
    recorded.
    """
    tokens = config.steps * config.global_batch * config.model.context
    return Matched(config, _sentence("steps", config.steps, config.steps, tokens, tokens, "tokens"))


def _by_compute(config: TrainConfig, other: ModelConfig) -> Matched:
    """The number of steps for which all FLOPs of training, embedding left out and head and
    attention counted, come closest.
    """
    tokens = config.global_batch * config.model.context
    goal, step = config.steps * tokens * _flops(other), tokens * _flops(config.model)
    steps = round(goal / step)
    if steps < 1:
        raise ValueError(
            f"match=compute: one step of {config.model.residual} costs {step:.3g} FLOPs, more "
            f"than the {goal:.3g} of steps={config.steps} of {other.residual}; write more steps"
        )
    changed = dataclasses.replace(config, steps=steps)
    return Matched(
        changed, _sentence("steps", config.steps, steps, steps * step, goal, "training FLOPs")
    )


def _sentence(key: str, before: int, after: int, found: int, goal: int, unit: str) -> str:
    change = (
        f"{key}={before:,} stays"
        if before == after
        else f"{key} is {after:,} instead of {before:,}"
    )
    off = found - goal
    rest = f"off by {off:+,} ({100 * off / goal:+.4f}%)" if off else "exact"
    return f"{change}; {found:,} {unit} against {goal:,}, {rest}"


MATCHES: dict[str, Callable[[TrainConfig, ModelConfig], Matched]] = {
    "parameters": _by_parameters,
    "tokens": _by_tokens,
    "compute": _by_compute,
}


def matched(config: TrainConfig, given: ModelConfig) -> Matched:
    """`config` with what `match` and `match_to` ask for. The other run has the rank and blocks of
    `given`, where it has a
    use for them: `config` has lost what its own residual path does not need. Both know their
    vocabulary.

    Raises ValueError where nothing can match.
    """
    assert config.match is not None and config.match_to is not None
    other = reference_of(given, config.match_to)
    description = path_of(other).description(other)
    found = MATCHES[config.match](config, other)
    return found._replace(note=f"match={config.match} match_to={description}: {found.note}")
