"""What one site of several streams moves when it is compiled, as Inductor counts it.

Writing an output into the streams and reading what the next sub-layer needs of them takes n streams
and an output and leaves n streams and a hidden state: 2(n + 1) vectors of width d. A kernel that
reads a tensor counts it once, however often it looks at it. Parameters count as well, and backward
their gradients; there are so many tokens that they hardly matter.
"""

import logging
import re

import pytest
import torch
from torch._inductor import compile_fx, metrics
from torch._inductor.utils import fresh_cache

from lrattnres.kernels.backends import KERNELS
from lrattnres.residual.base import ResidualPath, path_of
from tests.paths import ROOT
from tests.residual.making import config_of

N, DIM, TOKENS = 4, 1024, 4096


@pytest.fixture
def counted(monkeypatch):
    """Inductor counts only for its own log."""
    log = logging.Logger("counted", logging.INFO)
    log.addHandler(logging.NullHandler())
    monkeypatch.setattr(compile_fx, "inductor_metrics_log", log)


def moved(residual: str, *, backward: bool, **options) -> float:
    """Vectors of width d a token that a compiled site moves, forward or backward."""
    config = config_of(residual, layers=2, dim=DIM, rank=None, path={"n": N} | options)
    path: ResidualPath = path_of(config).build(config, KERNELS["reference"])
    for parameter in path.parameters():
        torch.nn.init.normal_(parameter, std=0.02).requires_grad_(backward)
    with torch.no_grad():
        state = path.begin(torch.randn(1, TOKENS, DIM))
    state = torch.utils._pytree.tree_map(lambda x: x.requires_grad_(backward), state)
    output = torch.randn(1, TOKENS, DIM, requires_grad=backward)
    torch._dynamo.reset()
    metrics.reset()
    with fresh_cache():
        after = torch.compile(lambda state, output: path.write(state, 1, output), fullgraph=True)(
            state, output
        )
        forward = metrics.num_bytes_accessed
        if backward:
            sum(x.sum() for x in torch.utils._pytree.tree_leaves(after)).backward()
    counted = metrics.num_bytes_accessed - forward if backward else forward
    return counted / (4 * TOKENS * DIM)


@pytest.mark.slow
def test_weights_that_do_not_depend_on_the_token_are_one_pass(counted) -> None:
    """Exactly the bound; what is more than it are the weights."""
    bound = 2 * (N + 1)
    assert bound <= moved("hc", backward=False, dynamic=False) < 1.001 * bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("residual", "options"),
    [("hc", {"dynamic": False}), ("hc", {"norm": "rms"}), ("hc", {}), ("mhc", {})],
)
def test_no_more_is_moved_than_the_page_says(counted, residual, options) -> None:
    """Other versions of torch may move less."""
    cells = [f"`{residual}`", *(f"`{k}={str(v).lower()}`" for k, v in options.items())]
    row = re.escape(f"| {', '.join(cells)} | ") + r"([\d.]+) \| ([\d.]+) \| ([\d.]+) \|"
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    (found,) = re.findall(row, page)
    forward, times, backward = map(float, found)
    figures = [moved(residual, backward=back, **options) for back in (False, True)]
    print(residual, options, figures)
    assert times == pytest.approx(forward / (2 * (N + 1)), abs=0.01)
    for figure, stated in zip(figures, (forward, backward), strict=True):
        assert 0.8 * stated < figure < 1.01 * stated
