"""Residual streams in Triton: five operators of torch, and the autograd functions that join them.

A site calls `project`, makes its weights of what that returns, and gives them to `mix`:

    products = project(streams, write, output, maps, joint=...)
    hidden, streams = mix(products.written, mixing)

Gradients between the two are not passed on in the usual form. The gradient of a stream needs those
of the products, which depend on the gradient of `mixing`. So `mix` hands back what it got, dX, in
place of gradients of the streams and the output, and A in place of a gradient of `slot`; then
`project` makes all gradients in one pass. Therefore `Written` must go to exactly one `mix`, and to
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrattnres.kernels.launch import (
    MOST_STREAMS,
    Launch,
    chunk_for,
    fire,
    pointers,
    power,
    rows,
    rows_for,
    warps_for,
)

SPAN = 1024  # tokens over which one program sums the gradient of the maps
TILES = {  # (tokens, columns of a turn, warps) of programs that multiply matrices
    "stream_products": (32, 32, 2),
    "stream_gradients": (16, 64, 4),
    "map_gradient": (32, 64, 4),
}


class Written(NamedTuple):
    """The streams that a site sees, S_j = S'_j + β_j o, as `mix` takes them.

    Attributes:
        streams: S', N of [..., d].
        write: β, float32 [..., N].
        output: o, [..., d].
        slot: [..., N, N + 1] float32 without a value, through which A comes back.
    """

    streams: tuple[Tensor, ...]
    write: Tensor
    output: Tensor
    slot: Tensor


class Projected(NamedTuple):
    """What the weights of a site are made of, float32.

    Attributes:
        products: S W, [..., K] if the maps are joint, else [..., N, K].
        squares: |S_j|², [..., N].
        written: For `mix`.
    """

    products: Tensor
    squares: Tensor
    written: Written


def project(
    streams: Sequence[Tensor], write: Tensor, output: Tensor, maps: Tensor, *, joint: bool
) -> Projected:
    """The products of the streams of a site with its maps.

    Args:
        streams: S', N of [..., d], float32 or bfloat16.
        write: β, float32 [..., N].
        output: o, [..., d].
        maps: float32 [N, K, d] if `joint`, else [1, K, d].
        joint: Whether each stream has maps of its own, and the products are summed.

    Raises:
        ValueError: The streams are of several dtypes or shapes, or of one that the kernels do not
            take.
    """
    _check(streams, output)
    products, squares, slot, output, *streams = _Project.apply(joint, maps, write, output, *streams)
    return Projected(products, squares, Written(tuple(streams), write, output, slot))


def mix(written: Written, mixing: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Σ_j A_{j,c} S_j of every c.

    Args:
        written: From `project`.
        mixing: A, float32 [..., N, N + 1].

    Returns:
        The hidden state, c = 0, and the N streams S' of the next site, in the dtype of the streams.
    """
    streams, write, output, slot = written
    hidden, *mixed = _Mix.apply(mixing, slot, write.detach(), output, *streams)
    return hidden, tuple(mixed)


def _check(streams: Sequence[Tensor], output: Tensor) -> None:
    """Raises ValueError as `project` does."""
    if output.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"streams are {output.dtype}: the Triton kernels take float32 and bfloat16; write "
            "kernels=reference"
        )
    if len(streams) > MOST_STREAMS:
        raise ValueError(
            f"{len(streams)} streams: the Triton kernels take at most {MOST_STREAMS}; write "
            "kernels=reference"
        )
    for stream in streams:
        if (stream.dtype, stream.shape) != (output.dtype, output.shape):
            raise ValueError(
                f"a stream of {stream.dtype} and shape {tuple(stream.shape)}, and an output of "
                f"{output.dtype} and shape {tuple(output.shape)}: write one dtype and shape"
            )


class _Project(torch.autograd.Function):
    """`project` on flat tensors; its gradient is that of the whole site."""

    @staticmethod
    def forward(
        ctx: Any, joint: bool, maps: Tensor, write: Tensor, output: Tensor, *streams: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.joint = joint
        ctx.save_for_backward(maps, write, output, *streams)
        made = torch.ops.lrattnres.stream_products(streams, write, output, maps, joint)
        slot = write.new_empty(*write.shape, len(streams) + 1)
        return (*made, slot, output.view_as(output), *(s.view_as(s) for s in streams))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        maps, write, output, *streams = ctx.saved_tensors
        d_products, d_squares, mixing, *upstream = gradients
        if d_products is None:
            shape = write.shape[:-1] if ctx.joint else write.shape
            d_products = write.new_zeros(*shape, maps.shape[1])
        if mixing is None:  # nothing was mixed
            mixing = write.new_zeros(*write.shape, len(streams) + 1)
        d_streams, d_write, d_output = torch.ops.lrattnres.stream_gradients(
            [torch.zeros_like(output) if g is None else g for g in upstream],
            mixing,
            streams,
            write,
            output,
            maps,
            d_products,
            torch.zeros_like(write) if d_squares is None else d_squares,
            ctx.joint,
        )
        d_maps = torch.ops.lrattnres.map_gradient(
            streams, write, output, d_products, maps.shape[1], ctx.joint
        )
        return None, d_maps, d_write, d_output, *d_streams


class _Mix(torch.autograd.Function):
    """`mix` on flat tensors. Backward it gives A and dX to `_Project`, as the module says."""

    @staticmethod
    def forward(
        ctx: Any, mixing: Tensor, slot: Tensor, write: Tensor, output: Tensor, *streams: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(mixing, write, output, *streams)
        return tuple(torch.ops.lrattnres.stream_mix(streams, write, output, mixing))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        mixing, write, output, *streams = ctx.saved_tensors
        upstream = [torch.zeros_like(output) if g is None else g for g in gradients]
        d_mixing = torch.ops.lrattnres.mixing_gradient(upstream, streams, write, output)
        return d_mixing, mixing, None, *upstream


@torch.library.custom_op("lrattnres::stream_products", mutates_args=())
def stream_products_op(
    streams: Sequence[Tensor], write: Tensor, output: Tensor, maps: Tensor, joint: bool
) -> tuple[Tensor, Tensor]:
    """The operator `torch.ops.lrattnres.stream_products`: (products, squares)."""
    results, launch = plan_products(streams, write, output, maps, joint)
    fire(launch)
    return results


def plan_products(
    streams: Sequence[Tensor], write: Tensor, output: Tensor, maps: Tensor, joint: bool
) -> tuple[tuple[Tensor, Tensor], Launch]:
    """Allocates what `stream_products_op` returns, and makes the launch that fills it."""
    results = _products_outputs(streams, write, output, maps, joint)
    products, squares = results
    arguments = {
        **_streams(streams, write, output),
        "maps": _factors(maps, output.dtype),
        "products": products,
        "squares": squares,
    }
    return results, _tiled("stream_products", arguments, output, maps.shape[1], joint)


@stream_products_op.register_fake
def _products_outputs(
    streams: Sequence[Tensor], write: Tensor, output: Tensor, maps: Tensor, joint: bool
) -> tuple[Tensor, Tensor]:
    shape = write.shape[:-1] if joint else write.shape
    return write.new_empty(*shape, maps.shape[1]), write.new_empty(write.shape)


@torch.library.custom_op("lrattnres::stream_mix", mutates_args=())
def stream_mix_op(
    streams: Sequence[Tensor], write: Tensor, output: Tensor, mixing: Tensor
) -> list[Tensor]:
    """The operator `torch.ops.lrattnres.stream_mix`: X_0 … X_N."""
    results, launch = plan_mix(streams, write, output, mixing)
    fire(launch)
    return results


def plan_mix(
    streams: Sequence[Tensor], write: Tensor, output: Tensor, mixing: Tensor
) -> tuple[list[Tensor], Launch]:
    """Allocates what `stream_mix_op` returns, and makes the launch that fills it."""
    results = _mix_outputs(streams, write, output, mixing)
    arguments = {
        **_streams(streams, write, output),
        "mixing": mixing.contiguous(),
        "mixed": pointers(results),
    }
    return results, _by_token("stream_mix", arguments, output, len(streams), 2 * len(streams) + 2)


@stream_mix_op.register_fake
def _mix_outputs(
    streams: Sequence[Tensor], write: Tensor, output: Tensor, mixing: Tensor
) -> list[Tensor]:
    return [output.new_empty(output.shape) for _ in range(len(streams) + 1)]


@torch.library.custom_op("lrattnres::mixing_gradient", mutates_args=())
def mixing_gradient_op(
    upstream: Sequence[Tensor], streams: Sequence[Tensor], write: Tensor, output: Tensor
) -> Tensor:
    """The operator `torch.ops.lrattnres.mixing_gradient`: dA [..., N, N + 1]."""
    result, launch = plan_mixing_gradient(upstream, streams, write, output)
    fire(launch)
    return result


def plan_mixing_gradient(
    upstream: Sequence[Tensor], streams: Sequence[Tensor], write: Tensor, output: Tensor
) -> tuple[Tensor, Launch]:
    """Allocates what `mixing_gradient_op` returns, and makes the launch that fills it."""
    result, count = _mixing_outputs(upstream, streams, write, output), len(streams)
    arguments = {
        "upstream": pointers(upstream),
        **_streams(streams, write, output),
        "d_mixing": result,
    }
    return result, _by_token("mixing_gradient", arguments, output, count, count * (count + 1))


@mixing_gradient_op.register_fake
def _mixing_outputs(
    upstream: Sequence[Tensor], streams: Sequence[Tensor], write: Tensor, output: Tensor
) -> Tensor:
    return write.new_empty(*write.shape, len(streams) + 1)


@torch.library.custom_op("lrattnres::stream_gradients", mutates_args=())
def stream_gradients_op(
    upstream: Sequence[Tensor],
    mixing: Tensor,
    streams: Sequence[Tensor],
    write: Tensor,
    output: Tensor,
    maps: Tensor,
    d_products: Tensor,
    d_squares: Tensor,
    joint: bool,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The operator `torch.ops.lrattnres.stream_gradients`: (dS', dβ, do)."""
    results, launch = plan_gradients(
        upstream, mixing, streams, write, output, maps, d_products, d_squares, joint
    )
    fire(launch)
    return results


def plan_gradients(
    upstream: Sequence[Tensor],
    mixing: Tensor,
    streams: Sequence[Tensor],
    write: Tensor,
    output: Tensor,
    maps: Tensor,
    d_products: Tensor,
    d_squares: Tensor,
    joint: bool,
) -> tuple[tuple[list[Tensor], Tensor, Tensor], Launch]:
    """Allocates what `stream_gradients_op` returns, and makes the launch that fills it."""
    results = _gradients_outputs(
        upstream, mixing, streams, write, output, maps, d_products, d_squares, joint
    )
    d_streams, d_write, d_output = results
    arguments = {
        "upstream": pointers(upstream),
        "mixing": mixing.contiguous(),
        **_streams(streams, write, output),
        "maps": _factors(maps, output.dtype),
        "d_products": d_products.contiguous(),
        "d_squares": d_squares.contiguous(),
        "d_streams": pointers(d_streams),
        "d_write": d_write,
        "d_output": d_output,
    }
    return results, _tiled("stream_gradients", arguments, output, maps.shape[1], joint)


@stream_gradients_op.register_fake
def _gradients_outputs(
    upstream: Sequence[Tensor],
    mixing: Tensor,
    streams: Sequence[Tensor],
    write: Tensor,
    output: Tensor,
    maps: Tensor,
    d_products: Tensor,
    d_squares: Tensor,
    joint: bool,
) -> tuple[list[Tensor], Tensor, Tensor]:
    d_streams = [output.new_empty(output.shape) for _ in streams]
    return d_streams, write.new_empty(write.shape), output.new_empty(output.shape)


@torch.library.custom_op("lrattnres::map_gradient", mutates_args=())
def map_gradient_op(
    streams: Sequence[Tensor],
    write: Tensor,
    output: Tensor,
    d_products: Tensor,
    maps: int,
    joint: bool,
) -> Tensor:
    """The operator `torch.ops.lrattnres.map_gradient`: dW [N or 1, K, d] float32."""
    partial, launch = plan_map_gradient(streams, write, output, d_products, maps, joint)
    fire(launch)
    return partial.sum(0).mT


def plan_map_gradient(
    streams: Sequence[Tensor],
    write: Tensor,
    output: Tensor,
    d_products: Tensor,
    maps: int,
    joint: bool,
) -> tuple[Tensor, Launch]:
    """Allocates the sums of all programs, and makes the launch that fills them."""
    (tokens, dim), groups = rows(output).shape, len(streams) if joint else 1
    partial = write.new_empty(-(-tokens // SPAN), groups, dim, maps)
    arguments = {
        **_streams(streams, write, output),
        "d_products": d_products.contiguous(),
        "partial": partial,
    }
    launch = _tiled("map_gradient", arguments, output, maps, joint)
    launch.arguments["SPAN"] = SPAN
    if joint:  # a program sums n gradients: half the columns, or registers are spilled
        launch.arguments["CHUNK"] = max(16, launch.arguments["CHUNK"] // 2)
    columns = -(-dim // launch.arguments["CHUNK"])
    return partial, launch._replace(grid=(len(partial), columns))


@map_gradient_op.register_fake
def _(streams, write, output, d_products, maps, joint):  # type: ignore[no-untyped-def]
    dim, groups = output.shape[-1], len(streams) if joint else 1
    return write.new_empty(groups, dim, maps).mT


def _factors(maps: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Maps as the kernels multiply streams of a dtype with them."""
    if dtype == torch.float32:
        return (maps.contiguous(),)
    high = maps.to(dtype)
    return high.contiguous(), (maps - high).to(dtype).contiguous()


def _streams(streams: Sequence[Tensor], write: Tensor, output: Tensor) -> dict[str, Any]:
    """The arguments that all kernels have."""
    return {
        "streams": pointers(streams),
        "write": write.contiguous(),
        "output": pointers([output]),
    }


def _tiled(
    kernel: str, arguments: dict[str, Any], output: Tensor, maps: int, joint: bool
) -> Launch:
    """The launch of a kernel of TILES.

    Args:
        kernel: Its name.
        arguments: Its tensors.
        output: o.
        maps: K.
        joint: As in `project`.
    """
    tokens, dim = rows(output).shape
    size, columns, warps = TILES[kernel]
    sizes = {"D": dim, "N": len(arguments["streams"][0]), "K": maps}
    modes = {"JOINT": joint, "NARROW": output.dtype == torch.bfloat16}
    tiles = {
        "ROWS": size,
        "CHUNK": max(16, min(columns, power(dim))),
        "BLOCK_K": max(16, power(maps)),
    }
    grid = (-(-tokens // size),)
    return Launch(kernel, grid, arguments | {"tokens": tokens} | sizes | modes | tiles, warps)


def _by_token(
    kernel: str, arguments: dict[str, Any], output: Tensor, count: int, sums: int
) -> Launch:
    """The launch of a kernel without a matrix product; `sums` tiles are in registers at a time."""
    tokens, dim = rows(output).shape
    size = rows_for(tokens)
    tiles = {"D": dim, "N": count, "ROWS": size, "CHUNK": chunk_for(dim, sums)}
    return Launch(
        kernel, (-(-tokens // size),), arguments | {"tokens": tokens} | tiles, warps_for(dim)
    )
