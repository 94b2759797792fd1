"""A residual path may give queries, keys and values inputs of their own, and change raw keys and values."""

import torch
import torch.nn.functional as F

from lrattnres.kernels.reference import rms_norm
from lrattnres.model.attention import BACKENDS
from lrattnres.model.layers import Attention, Context, rotate, rotation
from lrattnres.residual.base import Read


def layer(config) -> tuple[Attention, Context]:
    attention = Attention(config, 0, BACKENDS["sdpa"])
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    return attention, Context(None, rotation(12, config.head_width, 1e4, torch.device("cpu")))


def by_hand(attention: Attention, context: Context, query, key, value) -> torch.Tensor:
    """Two heads of width 8, from projected queries, keys and values [B, T, 16]."""
    query, key, value = (part.unflatten(-1, (2, 8)) for part in (query, key, value))
    query, key = (rotate(rms_norm(part), *context.rotation) for part in (query, key))
    parts = (part.transpose(1, 2) for part in (query, key, value))
    mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
    return attention.output(mixed.transpose(1, 2).flatten(-2))


def test_queries_keys_and_values_may_be_read_apart(tiny_model_config) -> None:
    config = tiny_model_config()
    attention, context = layer(config)
    reads = [torch.randn(2, 12, 16) for _ in range(3)]
    rows = attention.input.weight.split([16, 16, 16])
    expected = by_hand(attention, context, *(r @ w.T for r, w in zip(reads, rows, strict=True)))
    found, raw = attention(Read(*reads), context)
    torch.testing.assert_close(found, expected)
    assert raw is None
    same, _ = attention(Read(reads[0], reads[0], reads[0]), context)
    torch.testing.assert_close(same, attention(Read(reads[0]), context)[0])


def test_raw_keys_and_values_are_changed_before_their_norm(tiny_model_config) -> None:
    attention, context = layer(tiny_model_config())
    read, other = torch.randn(2, 12, 16), torch.randn(2, 12, 2, 8)
    query, key, value = attention.input(read).split([16, 16, 16], dim=-1)
    found, raw = attention(Read(read), context, lambda key, value: (key + other, 2 * value))
    moved = key + other.flatten(-2)
    torch.testing.assert_close(found, by_hand(attention, context, query, moved, 2 * value))
    for kept, truth in zip(raw, (key, value), strict=True):  # what came before the change
        assert torch.equal(kept.flatten(-2), truth)
