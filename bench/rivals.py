"""Reads over depth by other packages, called so that they compute the same as ours.

That is a read whose keys are the values, then its RMSNorm. The packages are no dependencies; one
that is not installed is not compared. The signature of each function is checked before it is
called. So a version with another signature is left out with a message, instead of giving a wrong
figure.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

EPSILON = 2.0**-23

Read = Callable[[Tensor, Sequence[Tensor]], Tensor]


class Rival(NamedTuple):
    """One package.

    Attributes:
        package: Its name.
        module, function: Where the read is.
        call: (function, query, values) -> the normalised read.
        query: dtype that a query must have.
        sliced: Whether a key may be the tail of a value; else it is the whole value.
    """

    package: str
    module: str
    function: str
    call: Callable[[Callable[..., Any], Tensor, Sequence[Tensor]], Tensor]
    query: torch.dtype = torch.float32
    sliced: bool = False

    def rank(self, rank: int, dim: int) -> int:
        """Width of a key that it can take, for a wanted rank and a width of values."""
        return rank if self.sliced else dim

    def load(self) -> Read:
        """Its read: (query [r], values) -> [tokens, d].

        Raises:
            ImportError: The package is not installed.
            AttributeError: It has no such function.
            TypeError: Its function takes other arguments.
        """
        function = getattr(importlib.import_module(self.module), self.function)
        query, value = (
            torch.empty(8, device="meta", dtype=self.query),
            torch.empty(1, 8, device="meta", dtype=torch.bfloat16),
        )

        def bound(*arguments: Any, **options: Any) -> Tensor:
            inspect.signature(function).bind(*arguments, **options)
            return value

        self.call(bound, query, [value, value])
        return lambda query, values: self.call(function, query, values)


def _ones(query: Tensor, values: Sequence[Tensor]) -> Tensor:
    """The gain of a norm, which has none here."""
    return torch.ones(values[0].shape[-1], device=query.device, dtype=query.dtype)


def _fla(function: Callable[..., Any], query: Tensor, values: Sequence[Tensor]) -> Tensor:
    ones = _ones(query, values)
    return function(query, values, ones, output_rms_weight=ones, rms_eps=EPSILON)


def _liger(function: Callable[..., Any], query: Tensor, values: Sequence[Tensor]) -> Tensor:
    read = function(
        torch.stack(list(values)).unsqueeze(1), query, _ones(query, values), eps=EPSILON
    )  # [N, B, T, D]
    return rms_norm(read[0], read.shape[-1:], eps=EPSILON)


def _fast(function: Callable[..., Any], query: Tensor, values: Sequence[Tensor]) -> Tensor:
    read = function(list(values), query, eps=EPSILON)
    return rms_norm(read, read.shape[-1:], eps=EPSILON)


RIVALS = {
    rival.package: rival
    for rival in (
        Rival("fla-core", "fla.ops.attnres", "fused_attnres", _fla),
        Rival("liger-kernel", "liger_kernel.transformers.functional", "liger_attn_res", _liger),
        Rival("fast-attnres", "attnres", "attnres", _fast, torch.bfloat16, sliced=True),
    )
}


def installed(device: torch.device) -> list[str]:
    """The packages to compare with on a GPU.

    One that is installed and cannot be called is named in the output, with the reason.
    """
    found = []
    for name, rival in RIVALS.items() if device.type == "cuda" else ():
        if importlib.util.find_spec(rival.module.split(".")[0]) is None:
            continue
        try:
            rival.load()
        except (ImportError, AttributeError, TypeError) as error:
            print(f"{name} is installed and left out: {error}", flush=True)
            continue
        found.append(name)
    return found
