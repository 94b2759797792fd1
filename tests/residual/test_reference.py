"""Depth attention itself: a permutation changes nothing, one source is returned, and arithmetic is float32."""

import pytest
import torch

from lrattnres.kernels.reference import depth_attention, depth_weights, rms_norm


def test_permuting_sources_and_keys_together_changes_nothing() -> None:
    values, keys = torch.randn(6, 4, 16).double().unbind(0), torch.randn(6, 4, 5).double().unbind(0)
    query, order = torch.randn(5).double(), torch.randperm(6)
    mixed = depth_attention(query, keys, values)
    permuted = depth_attention(query, [keys[i] for i in order], [values[i] for i in order])
    torch.testing.assert_close(permuted, mixed, rtol=1e-12, atol=1e-13)


def test_one_source_is_returned() -> None:
    value, key = torch.randn(4, 16), torch.randn(4, 5)
    assert torch.equal(depth_attention(torch.randn(5), [key], [value]), value)


def test_epsilon_counts_for_small_inputs() -> None:
    x = torch.full((1, 8), 3e-4)
    expected = 3e-4 / (3e-4**2 + 2.0**-23) ** 0.5
    torch.testing.assert_close(rms_norm(x), torch.full((1, 8), expected))
    assert expected < 0.7  # without epsilon it would be 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_sources_are_mixed_in_float32(dtype: torch.dtype) -> None:
    values = [torch.randn(64, 32).to(dtype) for _ in range(9)]
    keys, query = [value[:, -8:] for value in values], torch.randn(8)
    exact = depth_attention(
        query.double(), [k.double() for k in keys], [v.double() for v in values]
    )
    found = depth_attention(query, keys, values)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_weights_do_not_overflow() -> None:
    weights = depth_weights(torch.full((4,), 1e4), [torch.ones(1, 4), -torch.ones(1, 4)])
    assert torch.equal(weights, torch.tensor([[1.0, 0.0]]))
