"""Reads over depth by other packages, called so that they compute what ours does.

That is a read of value keys, then its RMSNorm. They are no dependencies: what is not installed is
not compared. Each signature is checked before it is called, so that a version with another one is
left out with a word, not with a wrong figure.
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
        package, module, function: where the read is.
        call: (function, query, values) to the read, normalised.
        query: dtype that it asks of a query.
        sliced: whether a key may be the tail of a value; else it is the whole.
    """

    package: str
    module: str
    function: str
    call: Callable[[Callable[..., Any], Tensor, Sequence[Tensor]], Tensor]
    query: torch.dtype = torch.float32
    sliced: bool = False

    def rank(self, rank: int, dim: int) -> int:
        return rank if self.sliced else dim

    def load(self) -> Read:
        """Its read.

        Raises:
            ImportError: the package is not installed.
            TypeError: its function takes other arguments.
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
    """The gain of a norm that has none here."""
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
    """The packages to compare with on a GPU; one that cannot be called is named, with why."""
    found = []
    for name, rival in RIVALS.items() if device.type == "cuda" else ():
        if importlib.util.find_spec(rival.module.split(".")[0]) is None:
            continue
        try:
            rival.load()
        except (ImportError, AttributeError, TypeError) as fault:
            print(f"{name} is installed and left out: {fault}", flush=True)
            continue
        found.append(name)
    return found
