"""The byte counter: what the launches of every operator read and write, tensor by tensor, is what the plan counts."""

import pytest
import torch

from lrattnres.residual.fused.schedule import (
    Step,
    backward_traffic,
    cheapest,
    forward_traffic,
    steps,
)
from lrattnres.residual.plan import DepthPlan

pytest.importorskip("triton")

from lrattnres.kernels.launch import Launch
from lrattnres.kernels.machine_code import launches, stream_launches

DIM, RANK = 64, 8


def elements(tensors) -> int:
    return sum(tensor.numel() for tensor in tensors)


def chosen(group, bits: int) -> list:
    """The tensors of a group whose bit says that they are read; the others only stand in."""
    return [tensor for i, tensor in enumerate(group[0]) if bits >> i & 1]


def read_forward(a: dict) -> tuple[int, int]:
    """(values, scalars) in elements, each tensor once."""
    summed = [*a["addend"][0], a["total"]] if a["ADDEND"] else []
    wide = [*a["values"][0], *a["keys"][0], *a["parts"][0], *summed, a["out"], *a["mixtures"]]
    return elements(wide), elements([a["scalars"], a["weights"], *a["stats"]]) + elements(
        x[0] for x in a["part_stats"]
    )


def read_backward(a: dict) -> tuple[int, int]:
    given = [*chosen(a["value_in"], a["VALUE_IN"]), *chosen(a["key_in"], a["KEY_IN"])]
    sources = [tensor for name in ("values", "keys", "d_values", "d_keys") for tensor in a[name][0]]
    wide = [
        *a["upstream"][0],
        *a["out"][0],
        *sources,
        *given,
        *([a["d_hidden"]] if a["EMIT"] else []),
    ]
    score = (
        a["scalars"][..., : a["K"]],
        a["beta"][..., : a["K"]],
    )  # of a slice that is not the last, the rows are longer
    return elements(wide), elements([*score, a["stats"], *a["later_stats"], a["d_stats"]])


def query_gradient(a: dict) -> tuple[int, int]:
    return elements(key[:, : a["RANK"]] for key in a["keys"][0]), elements([a["beta"]])


TOUCHES = {
    "read_forward": read_forward,
    "read_backward": read_backward,
    "query_gradient": query_gradient,
}


def per_token(found: list[Launch]) -> tuple[float, float]:
    sums = [TOUCHES[launch.kernel](launch.arguments) for launch in found]
    tokens = found[0].arguments["tokens"]
    return sum(values for values, _ in sums) / tokens, sum(scalars for _, scalars in sums) / tokens


def operators() -> list[Step]:
    """Of the papers' granularities, in the groups that a model takes; more than 16 sources take several launches."""
    plans = [DepthPlan(48, blocks) for blocks in (4, 8, 16, None)]
    return sorted({step for plan in plans for step in steps(plan, cheapest(plan, 1 / 32))})


@pytest.mark.parametrize("separate", [False, True])
def test_what_the_launches_touch_is_what_is_counted(separate: bool) -> None:
    for step in operators():
        forward, *backward = launches(*step[1:], DIM, RANK, separate)
        assert per_token([forward]) == forward_traffic(step, DIM, RANK, separate), step
        assert per_token(backward) == backward_traffic(step, DIM, RANK, separate), step


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_streams_move_what_the_page_says(joint: bool, streams: int) -> None:
    """3 (n + 1) vectors of width d a token forward, 6 (n + 1) backward; the rest is 1/d of that."""
    groups = ("streams", "output", "mixed", "upstream", "d_streams")
    moved, small, dim, tokens = [], 0, 4096, 4096
    for launch in stream_launches(joint, streams=streams, dim=dim, tokens=tokens):
        a = launch.arguments
        own = a.get("d_output")
        single = [] if own is None else [own]
        moved.append(elements([*(x for name in groups if name in a for x in a[name][0]), *single]))
        tensors = [x for x in a.values() if isinstance(x, torch.Tensor) and x is not own]
        small += elements([*tensors, *a.get("maps", ())])
    assert sum(moved[:2]) == 3 * (streams + 1) * tokens * dim
    assert sum(moved[2:]) == 6 * (streams + 1) * tokens * dim
    assert small < 0.02 * sum(moved)
