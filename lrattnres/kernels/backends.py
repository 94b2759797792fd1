"""Who computes depth attention: one table of backends, chosen once, and the operator for models of your own."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrattnres.kernels import reference
from lrattnres.kernels.launch import INTERPRETED
from lrattnres.kernels.reference import Part, Reading

# Looked up once, here: a compiler that traces a call of `depth_attention` could not look for them.
TRITON = importlib.util.find_spec("triton") is not None
CPP = bool(shutil.which("g++") or shutil.which("clang++"))


class DepthKernels(NamedTuple):
    """name: of the table. read: see `reference.read`. grouped: whether reading many sites at once saves time here.

    obstacle(device, dtype): why it cannot run, or None. plain: whether it takes the plain `Scoring` only, and queries
    that do not depend on the input. reason: why it was chosen.
    """

    name: str
    read: Callable[..., Reading]
    grouped: bool
    obstacle: Callable[[torch.device, torch.dtype], str | None]
    plain: bool
    reason: str = ""


def _triton_read(*arguments: Any, **options: Any) -> Reading:
    from lrattnres.kernels import ops  # defines operators of torch, so only where they are used

    return ops.read(*arguments, **options)


@cache
def _compiled_for(sources: int) -> Callable[..., Reading]:
    """torch counts how often a function is compiled anew, so every number of sources has a function of its own."""
    original = reference.read
    code = original.__code__.replace(co_name=f"read_{sources}_sources")
    copy = FunctionType(
        code, original.__globals__, code.co_name, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    return torch.compile(copy, fullgraph=True)


def _compiled_read(
    queries: Tensor, values: Sequence[Tensor], *arguments: Any, **options: Any
) -> Reading:
    if torch.compiler.is_compiling():
        return reference.read(queries, values, *arguments, **options)
    return _compiled_for(len(values))(queries, values, *arguments, **options)


def _triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if not TRITON:
        return "the package triton is not installed; `pip install triton`"
    if device.type != "cuda" and not INTERPRETED:
        return "it needs a CUDA GPU, or TRITON_INTERPRET=1 in the environment to be interpreted, slowly, on a CPU"
    return None if dtype in (torch.float32, torch.bfloat16) else "it takes float32 and bfloat16"


def _compiler_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    return (
        None
        if CPP or device.type != "cpu"
        else "torch.compile needs a C++ compiler on a CPU; install g++"
    )


KERNELS = {
    backend.name: backend
    for backend in (
        DepthKernels("triton", _triton_read, True, _triton_obstacle, plain=True),
        DepthKernels("compiled", _compiled_read, False, _compiler_obstacle, plain=False),
        DepthKernels("reference", reference.read, False, lambda device, dtype: None, plain=False),
    )
}


def choose_kernels(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    compiled: bool,
    beyond: Sequence[str] = (),
) -> DepthKernels:
    """The backend called `name`, with the reason. `auto` is Triton on a GPU; else `compiled` if the model is `compiled` too,
    else `reference`, which starts at once: compiling pays off after some hundred steps only.

    beyond: settings, as key=value, that need more than the plain operator. Raises ValueError saying why a named backend
    cannot run on this machine or take these settings, and what to write instead.
    """
    if name != "auto":
        obstacle = KERNELS[name].obstacle(device, dtype) or _beyond(KERNELS[name], beyond)
        if obstacle:
            raise ValueError(
                f"kernels={name}: {obstacle}; or write kernels=auto or kernels=reference"
            )
        return KERNELS[name]._replace(reason="as asked for")
    refused: list[str] = []
    for backend in KERNELS.values():
        other = "this is no GPU" if backend.name == "triton" and device.type != "cuda" else None
        other = (
            "the model is not compiled" if backend.name == "compiled" and not compiled else other
        )
        obstacle = other or backend.obstacle(device, dtype) or _beyond(backend, beyond)
        if obstacle is None:
            return backend._replace(reason="; ".join(["chosen by kernels=auto", *refused]))
        refused.append(f"not {backend.name}: {obstacle}")
    raise AssertionError("the reference runs everywhere")


def _beyond(backend: DepthKernels, beyond: Sequence[str]) -> str | None:
    return f"it does not compute {', '.join(beyond)}" if backend.plain and beyond else None


def depth_attention(
    query: Tensor,
    values: Sequence[Tensor],
    keys: Sequence[Tensor] | None = None,
    *,
    normalize: bool = False,
    kernels: str = "auto",
) -> Tensor:
    """Attention over depth: h = Σ_i α_i v_i with α = softmax over sources of query · RMSNorm(key_i), token by token.

    query: [r], float32 advised. values: K tensors [..., d], float32 or bfloat16, any K; they are not stacked, and they are all
    that is kept for the backward pass, besides a few scalars a token. keys: K tensors [..., r]; None: the last r coordinates
    of each value. normalize: return RMSNorm(h) (ε = 2⁻²³, no gain), which is what a pre-norm sub-layer wants; it costs
    nothing, and saves keeping h. kernels: auto, triton, compiled or reference. Arithmetic is float32; returns [..., d]
    in the type of the values. Gradients reach query, values and keys, and are the same from run to run.

    Raises ValueError for shapes that do not fit together, and for kernels that cannot run here.
    """
    if query.dim() != 1 or not values or (keys is not None and len(keys) != len(values)):
        counts = f"query of shape {tuple(query.shape)}, {len(values)} values, {'no' if keys is None else len(keys)} keys"
        raise ValueError(
            f"{counts}: write one query [r], at least one value [..., d], and a key [..., r] for each or none"
        )
    reference.check_shapes(query.shape[0], values, keys or ())
    backend = choose_kernels(
        kernels, values[0].device, values[0].dtype, compiled=torch.compiler.is_compiling()
    )
    return backend.read(
        query.unsqueeze(0), tuple(values), tuple(keys or ()), normalize=normalize, passes=False
    ).out


__all__ = ["KERNELS", "DepthKernels", "Part", "Reading", "choose_kernels", "depth_attention"]
