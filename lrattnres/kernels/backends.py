"""The table of backends for depth attention, the choice among them, and the public operator.

The choice is made once, when a model is built. `depth_attention` is for models outside this
package.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Collection, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrattnres.kernels import reference
from lrattnres.kernels.launch import INTERPRETED
from lrattnres.kernels.reference import Part, Reading

# Looked up here, since torch.compile cannot trace the search inside `depth_attention`.
TRITON = importlib.util.find_spec("triton") is not None
CPP = bool(shutil.which("g++") or shutil.which("clang++"))


class DepthKernels(NamedTuple):
    """A backend: one way to compute depth attention.

    Attributes:
        name: Its name in KERNELS.
        read: The function that computes; it has the arguments and the meaning of `reference.read`.
        grouped: Whether it saves time here to read several sites at once.
        obstacle: (device, dtype of the values) -> why it cannot run there; None if it can.
        plain: Whether it takes only the default `Scoring`, and only queries that do not depend on
            the input.
        reason: Why it was chosen; "" in KERNELS.
    """

    name: str
    read: Callable[..., Reading]
    grouped: bool
    obstacle: Callable[[torch.device, torch.dtype], str | None]
    plain: bool
    reason: str = ""


def _triton_read(*arguments: Any, **options: Any) -> Reading:
    from lrattnres.kernels import ops  # imports Triton and registers operators of torch

    return ops.read(*arguments, **options)


@cache
def _compiled_for(sources: int) -> Callable[..., Reading]:
    """`reference.read`, compiled, for one number of sources.

    torch limits how often one function may be compiled. So each number of sources has a function of
    its own.
    """
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
        return (
            "it needs a CUDA GPU, or TRITON_INTERPRET=1 in the environment to be interpreted, "
            "slowly, on a CPU"
        )
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
    known: Collection[str] | None = None,
) -> DepthKernels:
    """Chooses the backend, and gives the reason for it.

    `auto` takes the first that can run: Triton on a GPU; `compiled` if the model is compiled too;
    else `reference`. The reference starts at once, and compiling pays off only after some hundred
    steps.

    Args:
        name: auto, or a name in KERNELS.
        device: Where the model runs.
        dtype: Of the values.
        compiled: Whether the model is compiled.
        beyond: Settings, as key=value, that need more than a plain backend computes.
        known: Names of the backends that have code for the residual path; None: all.

    Returns:
        The entry of KERNELS, with its `reason`.

    Raises:
        ValueError: There is no backend of this name, or it cannot run on this machine or take these
            settings. The message says why, and what to write instead.
    """
    if name != "auto":
        if name not in KERNELS:
            raise ValueError(f"kernels={name}: write one of auto, {', '.join(KERNELS)}")
        obstacle = _unknown(name, known)
        obstacle = obstacle or KERNELS[name].obstacle(device, dtype)
        obstacle = obstacle or _beyond(KERNELS[name], beyond)
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
        other = _unknown(backend.name, known) or other
        obstacle = other or backend.obstacle(device, dtype) or _beyond(backend, beyond)
        if obstacle is None:
            return backend._replace(reason="; ".join(["chosen by kernels=auto", *refused]))
        refused.append(f"not {backend.name}: {obstacle}")
    raise AssertionError("the reference runs everywhere")


def _unknown(name: str, known: Collection[str] | None) -> str | None:
    return None if known is None or name in known else "it has no code for this residual path"


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
    """Attention over depth, token by token: h = Σ_i α_i v_i, α = softmax of query · RMSNorm(key_i).

    The softmax is over the sources i. Sources are not stacked. Beside the sources only the result
    and a few scalars a token are kept for the backward pass. Arithmetic is float32 (float64 for
    float64 values), under autocast too. Gradients reach query, values and keys, and are the same
    bits in every run.

    Args:
        query: [r], float32 or bfloat16; float32 is advised.
        values: K tensors [..., d], K at least 1, float32 or bfloat16. With `kernels="reference"`
            also float64, to check gradients numerically.
        keys: K tensors [..., r] of the dtype of the values. None: the last r coordinates of each
            value.
        normalize: Whether to return RMSNorm(h), with ε = 2⁻²³ and no gain.
        kernels: auto, triton, compiled or reference.

    Returns:
        [..., d] in the dtype of the values.

    Raises:
        ValueError: An argument has a type, shape, dtype or device that does not fit, or the kernels
            cannot run here. The message says what to write instead.
    """
    _check_arguments(query, values, keys, normalize, kernels)
    reference.check_shapes(query.shape[0], values, keys or ())
    device, dtype = values[0].device, values[0].dtype
    backend = choose_kernels(kernels, device, dtype, compiled=torch.compiler.is_compiling())
    # On the meta device there is nothing to compute, and no autocast either.
    with torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False):
        return backend.read(
            query.unsqueeze(0), tuple(values), tuple(keys or ()), normalize=normalize, passes=False
        ).out


def _check_arguments(query: Any, values: Any, keys: Any, normalize: Any, kernels: Any) -> None:
    """Checks what `check_shapes` and `choose_kernels` take for granted.

    Raises:
        ValueError: As `depth_attention` does.
    """
    if not isinstance(normalize, bool):
        raise ValueError(f"normalize={normalize!r}: write True or False")
    if not isinstance(kernels, str):
        raise ValueError(f"kernels={kernels!r}: write one of auto, {', '.join(KERNELS)}")
    for name, tensors in (("values", values), ("keys", () if keys is None else keys)):
        if isinstance(tensors, Tensor):
            raise ValueError(
                f"{name}: one tensor of shape {tuple(tensors.shape)}; write a list of tensors, "
                f"one a source, such as {name}.unbind(0)"
            )
        if not isinstance(tensors, (list, tuple)):
            raise ValueError(f"{name}: {type(tensors).__name__}; write a list of tensors")
    sources = [*(("values", x) for x in values), *(("keys", x) for x in keys or ())]
    for name, x in (("query", query), *sources):
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            kind = x.layout if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: {kind}; write a dense torch tensor")
    fits = (
        query.dim() == 1 and len(query) and values and all(x.dim() and x.shape[-1] for x in values)
    )
    if not fits or (keys is not None and len(keys) != len(values)):
        first = f" of shape {tuple(values[0].shape)}" if values else ""
        counts = f"{len(values)} values{first}, {'no' if keys is None else len(keys)} keys"
        raise ValueError(
            f"query of shape {tuple(query.shape)}, {counts}: write one query [r], at least one "
            "value [..., d], and a key [..., r] for each or none; r and d are at least 1"
        )
    dtype, device = values[0].dtype, values[0].device
    taken = [torch.float32, torch.bfloat16, *[torch.float64] * (kernels == "reference")]
    if dtype not in taken:
        also = "; float64 needs kernels='reference'" if dtype == torch.float64 else ""
        raise ValueError(f"values: {dtype}; write torch.float32 or torch.bfloat16{also}")
    if query.dtype not in (torch.float32, torch.bfloat16, dtype):
        raise ValueError(f"query: {query.dtype}; write query.float()")
    for name, x in (("query", query), *sources):
        if x.device != device:
            raise ValueError(f"{name}: on {x.device}, and values on {device}; write one device")
        if name != "query" and x.dtype != dtype:
            raise ValueError(f"{name}: {x.dtype} among values of {dtype}; write .to({dtype})")


__all__ = ["KERNELS", "DepthKernels", "Part", "Reading", "choose_kernels", "depth_attention"]
