"""Attention over positions inside documents, on whatever this machine has: one table of backends,
chosen once.

A backend turns the document numbers of a batch into its own mask, and applies it. `None` for
documents means that a window is one document. Queries, keys and values are [B, T, heads, head_dim];
so is the result.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Mask = Any


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the host on a device.

    The host goes on at once: a GPU copies from pinned memory, when it has done what was asked of it
    before. From other memory the host would wait for that.
    """
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.to(dtype).pin_memory()
    return tensor.to(device, dtype, non_blocking=True)


class AttentionBackend(NamedTuple):
    """name: of the table. prepare(documents [B, T] or None, batch, length, device) -> mask, once a
    batch.

    attend(query, key, value, mask) -> [B, T, heads, head_dim].
    """

    name: str
    prepare: Callable[[Tensor | None, int, int, torch.device], Mask]
    attend: Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
    obstacle: Callable[[torch.device, torch.dtype, bool], str | None]
    shares: bool = False  # whether it takes fewer heads of keys and values than of queries


def _dense_mask(
    documents: Tensor | None, batch: int, length: int, device: torch.device
) -> Tensor | None:
    if documents is None:
        return None
    documents = to_device(documents, device)
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & causal


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None
    ).transpose(1, 2)


def _block_mask(documents: Tensor | None, batch: int, length: int, device: torch.device) -> Mask:
    from torch.nn.attention.flex_attention import create_block_mask

    if documents is None:
        return create_block_mask(
            lambda b, h, q, k: q >= k, None, None, length, length, device=str(device)
        )
    documents = to_device(documents, device)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    return create_block_mask(visible, batch, None, length, length, device=str(device))


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return _compiled_flex()(query, key, value, block_mask=mask).transpose(1, 2)


def _boundaries(documents: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """Where each segment of the flattened batch starts, and its end: int32 [segments + 1]. Found
    before the transfer.
    """
    if documents is None:
        return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    edges = torch.cat(
        [
            starts.flatten().nonzero().flatten(),
            torch.tensor([batch * length], device=documents.device),
        ]
    )
    edges = to_device(edges, device, torch.int32)
    torch._dynamo.maybe_mark_dynamic(edges, 0)  # the next batch has another number of segments
    return edges


@cache
def _varlen_kernel() -> tuple[Callable[..., Any], dict[str, Any]]:
    from torch.nn.attention.varlen import varlen_attn

    # The causal flag became a window in the course of torch's releases.
    windowed = "window_size" in inspect.signature(varlen_attn).parameters
    return varlen_attn, {"window_size": (-1, 0)} if windowed else {"is_causal": True}


def _varlen(query: Tensor, key: Tensor, value: Tensor, edges: Tensor) -> Tensor:
    kernel, causal = _varlen_kernel()
    length = query.shape[1]
    packed = kernel(
        *(part.flatten(0, 1) for part in (query, key, value)),
        edges,
        edges,
        length,
        length,
        **causal,
    )
    return packed.unflatten(0, query.shape[:2])


def _packed(
    attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, edges: Tensor
) -> Tensor:
    length = query.shape[1]
    flat = (part.flatten(0, 1) for part in (query, key, value))
    packed = attend(*flat, edges, edges, length, length, causal=True)
    packed = packed[0] if isinstance(packed, tuple) else packed  # some versions add a logsumexp
    return packed.unflatten(0, query.shape[:2])


def _flash(query: Tensor, key: Tensor, value: Tensor, edges: Tensor) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    return _packed(flash_attn_varlen_func, query, key, value, edges)


def _flash3(query: Tensor, key: Tensor, value: Tensor, edges: Tensor) -> Tensor:
    from flash_attn_interface import flash_attn_varlen_func

    return _packed(flash_attn_varlen_func, query, key, value, edges)


def _needs_half_on_gpu(device: torch.device, dtype: torch.dtype, training: bool) -> str | None:
    if device.type != "cuda":
        return "it needs a CUDA GPU"
    return None if dtype in (torch.bfloat16, torch.float16) else "it needs precision=bfloat16"


def _flash_obstacle(device: torch.device, dtype: torch.dtype, training: bool) -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    return _needs_half_on_gpu(device, dtype, training)


def _flash3_obstacle(device: torch.device, dtype: torch.dtype, training: bool) -> str | None:
    if importlib.util.find_spec("flash_attn_interface") is None:
        return "FlashAttention 3 (the package flash_attn_interface) is not installed"
    if (other := _needs_half_on_gpu(device, dtype, training)) is not None:
        return other
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    return None if hopper else "FlashAttention 3 needs a Hopper GPU"


def _flex_obstacle(device: torch.device, dtype: torch.dtype, training: bool) -> str | None:
    return (
        "FlexAttention has no backward pass on a CPU" if device.type == "cpu" and training else None
    )


BACKENDS = {
    backend.name: backend
    for backend in (
        AttentionBackend("flash3", _boundaries, _flash3, _flash3_obstacle),
        AttentionBackend("flash", _boundaries, _flash, _flash_obstacle),
        AttentionBackend("varlen", _boundaries, _varlen, _needs_half_on_gpu),
        AttentionBackend("flex", _block_mask, _flex, _flex_obstacle),
        AttentionBackend("sdpa", _dense_mask, _sdpa, lambda device, dtype, training: None),
    )
}


def choose_attention(
    name: str, device: torch.device, dtype: torch.dtype, *, training: bool
) -> AttentionBackend:
    """The backend called `name`; for `auto` the first of the table that runs here (flex only where
    it is compiled for).

    Raises ValueError saying why a named one cannot run on this machine, and what to write instead.
    """
    if name == "auto":
        candidates = tuple(BACKENDS) if device.type == "cuda" else ("sdpa",)
        return next(
            BACKENDS[key]
            for key in candidates
            if BACKENDS[key].obstacle(device, dtype, training) is None
        )
    obstacle = BACKENDS[name].obstacle(device, dtype, training)
    if obstacle:
        raise ValueError(f"attention={name}: {obstacle}; write attention=auto or attention=sdpa")
    return BACKENDS[name]
