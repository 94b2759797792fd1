"""The page of the public operator: its examples run, and what it excludes is refused."""

import re

import pytest
import torch

from lrattnres import depth_attention
from tests.paths import ROOT


def test_the_examples_run() -> None:
    calls, block = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "depth_attention.md").read_text(), re.DOTALL
    )
    values, keys, query = (
        [torch.randn(2, 3, 64) for _ in range(3)],
        [torch.randn(2, 3, 64) for _ in range(3)],
        torch.randn(64),
    )
    names = {"values": values, "keys": keys, "query": query}
    exec(calls, names)
    assert torch.equal(names["h"], depth_attention(query, values, keys, normalize=True))
    scope: dict = {"__name__": "example"}
    exec(block, scope)
    assert all(part.query.grad is not None or i == 0 for i, part in enumerate(scope["blocks"]))
    assert len(scope["written"]) == 7


QUERY = torch.randn(4)
VALUES = [torch.randn(2, 8) for _ in range(3)]
KEYS = [torch.randn(2, 4) for _ in range(3)]


def cast(tensors, kind) -> list[torch.Tensor]:
    return [tensor.to(kind) for tensor in tensors]


REFUSED = {
    "unknown kernels": ({"kernels": "cuda"}, "one of auto, triton, compiled, reference"),
    "no kernels": ({"kernels": None}, "one of auto, triton"),
    "an epsilon for normalize": ({"normalize": 1e-6}, "True or False"),
    "stacked values": ({"values": torch.stack(VALUES)}, r"values\.unbind\(0\)"),
    "stacked keys": ({"keys": torch.stack(KEYS)}, r"keys\.unbind\(0\)"),
    "an iterator": ({"values": iter(VALUES)}, "list of tensors"),
    "no list": ({"values": None}, "list of tensors"),
    "an array of another library": ({"query": QUERY.numpy()}, "dense torch tensor"),
    "arrays of another library": ({"values": [x.numpy() for x in VALUES]}, "dense torch tensor"),
    "a missing key": ({"keys": [KEYS[0], None, KEYS[2]]}, "dense torch tensor"),
    "sparse values": ({"values": [x.to_sparse() for x in VALUES]}, "dense torch tensor"),
    "no values": ({"values": []}, "at least one value"),
    "no keys for values": ({"keys": []}, "a key .* for each or none"),
    "a query of width 0": ({"query": QUERY[:0]}, "at least 1"),
    "two queries": ({"query": QUERY.expand(2, 4)}, "one query"),
    "values of width 0": ({"values": [x[:, :0] for x in VALUES], "keys": KEYS}, "at least 1"),
    "numbers": ({"values": [torch.tensor(1.0)], "keys": [torch.randn(4)]}, "at least 1"),
    **{
        f"values of {kind}": ({"values": cast(VALUES, kind)}, f"{kind}; write torch.float32")
        for kind in (torch.float16, torch.int64, torch.bool, torch.complex64, torch.float64)
    },
    **{
        f"a query of {kind}": ({"query": QUERY.to(kind)}, r"write query\.float\(\)")
        for kind in (torch.float16, torch.int64, torch.bool, torch.float64)
    },
    "values of two types": ({"values": [*VALUES, VALUES[0].bfloat16()]}, r"write \.to\("),
    "keys of another type": ({"keys": cast(KEYS, torch.bfloat16)}, r"write \.to\("),
    "a query elsewhere": ({"query": QUERY.to("meta")}, "one device"),
    "a value elsewhere": ({"values": [*VALUES, VALUES[0].to("meta")]}, "one device"),
    "a key elsewhere": ({"keys": [*KEYS[1:], KEYS[0].to("meta")]}, "one device"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_page_excludes_is_refused(changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        depth_attention(**{"query": QUERY, "values": VALUES} | changed)


@pytest.mark.parametrize("normalize", [False, True])
def test_autocast_changes_nothing(normalize: bool) -> None:
    values = [torch.randn(64, 32) for _ in range(3)]
    query = torch.randn(16)
    plain = depth_attention(query, values, normalize=normalize)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(depth_attention(query, values, normalize=normalize), plain)


def test_a_gradient_can_be_checked_numerically() -> None:
    leaves = [x.double().requires_grad_() for x in (QUERY, *VALUES, *KEYS)]
    assert torch.autograd.gradcheck(
        lambda query, *x: depth_attention(query, x[:3], x[3:], normalize=True, kernels="reference"),
        leaves,
    )
