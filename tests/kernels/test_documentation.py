"""The page of the public operator: its examples run, and say what is so."""

import re

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
