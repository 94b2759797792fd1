"""What one site of several streams moves when it is compiled, as Inductor counts it.

Writing an output into the streams and reading what the next sub-layer needs of them takes n streams
and an output and leaves n streams and a hidden state: 2(n + 1) vectors of width d. A kernel that
reads a tensor counts it once, however often it looks at it.
"""

import logging

import pytest
import torch
from torch._inductor import compile_fx, metrics
from torch._inductor.utils import fresh_cache

from lrattnres.kernels.backends import KERNELS
from lrattnres.residual.base import ResidualPath, path_of
from tests.residual.making import config_of

N, DIM, TOKENS = 4, 1024, 256


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
        torch.nn.init.normal_(parameter, std=0.02).requires_grad_(False)
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


def test_weights_that_do_not_depend_on_the_token_are_one_pass(counted) -> None:
    """Exactly the bound; what is more than it are the weights."""
    bound = 2 * (N + 1)
    assert bound <= moved("hc", backward=False, dynamic=False) < 1.001 * bound


# n streams and an output, read again for the gradients of what they were multiplied with.
STATED = [
    ("hc", {"dynamic": False}, 10.0, 11.0),
    ("hc", {"norm": "rms"}, 23.3, 39.3),
    ("hc", {}, 36.3, 39.3),
    ("mhc", {}, 29.6, 49.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("residual", "options", "forward", "backward"), STATED)
def test_no_more_is_moved_than_stated(counted, residual, options, forward, backward) -> None:
    """The figures of docs/performance.md; another version of torch may move a little less."""
    for figure, back in ((forward, False), (backward, True)):
        found = moved(residual, backward=back, **options)
        print(residual, options, back, found)
        assert 0.5 * figure < found < 1.03 * figure
