"""Reading sites together: the same reads in float64, and the traffic that the papers' models would cause."""

import math

import pytest
import torch

from lrattnres.residual.cost import cost
from lrattnres.residual.fused.schedule import (
    Step,
    backward_traffic,
    cheapest,
    duration,
    forward_traffic,
    launches_for,
    single,
    steps,
)
from lrattnres.residual.plan import DepthPlan
from tests.paths import ROOT
from tests.residual.making import config_of, make, make_together
from tests.residual.test_cost import of_paper


@pytest.mark.parametrize("name", ["attn_res", "s_lr", "p_lr", "delta"])
@pytest.mark.parametrize(
    ("blocks", "starts"),
    [(None, (0, 1, 4)), (None, (0,)), (3, (0, 3)), (3, (0, 3, 5, 6)), (1, (0,)), (2, (0, 4, 8))],
)
def test_grouped_reads_are_the_plain_reads(
    name: str, blocks: int | None, starts: tuple[int, ...]
) -> None:
    """In plain torch, so that the grouping alone is tested."""
    plain = make(name, blocks)
    grouped = make_together(config_of(name, blocks), starts=starts).double()
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    grouped.load_state_dict(plain.state_dict())
    outputs = [
        torch.randn(2, 3, 8 + plain.emit_dim * (i > 0)).double().requires_grad_() for i in range(9)
    ]
    gradients = []
    for router in (plain, grouped):
        depth, loss = router.begin(outputs[0]), 0
        for site in range(9):
            loss = loss + (router.read(depth, site).x * torch.linspace(-1, site, 8)).square().sum()
            if site < 8:
                depth = router.write(depth, site, outputs[site + 1])
        gradients.append([loss, *torch.autograd.grad(loss, [*outputs, *router.parameters()])])
    for found, truth in zip(*gradients, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-11)


def test_a_group_may_not_start_inside_a_block_and_go_on() -> None:
    with pytest.raises(ValueError, match="site 2 lies inside a block"):
        steps(DepthPlan(8, 2), (0, 2))
    assert steps(DepthPlan(8, 2), (0, 2, 3, 4))[2] == Step(
        opens=True, owned=2, parts=0, later=0, addend=True, passes=True
    )


def units(
    plan: DepthPlan, starts: tuple[int, ...], prototype: bool = False, rank: int = 32
) -> float:
    """Traffic of a forward and backward pass beyond the plain residual stream's 389, in d values of two bytes.

    prototype: by the rule of the prototype below, which leaves out two things that our launches move: a second look at the
    keys, for the queries' gradients; and the sites' gradients once more for every launch of a backward operator but one.
    """
    moved = 0
    for step in steps(plan, starts):
        moved += (
            forward_traffic(step, 1024, rank, False).values
            + backward_traffic(step, 1024, rank, False).values
        )
        if prototype:
            moved -= step.owned * rank + (launches_for(step) - 1) * (2 + step.later) * 1024
    return moved / 1024 - 389


# Of a prototype that read a block's sites together: N, its groups, its units of traffic.
PROTOTYPE = [
    (4, (0, 12, 24, 36), 230),
    (8, tuple(range(0, 48, 6)), 296),
    (16, tuple(range(0, 48, 3)), 611),
    (None, (0, 1, 4, 9, 16, 25, 36), 759),
]


@pytest.mark.parametrize(("blocks", "starts", "row"), PROTOTYPE)
def test_traffic_reaches_the_prototype(
    blocks: int | None, starts: tuple[int, ...], row: int
) -> None:
    """By its rule its groups move what it says, and those that a model takes move no more, but for full granularity.
    There they are smaller on purpose: they move more than its groups would, and are faster, since instructions count.
    """
    plan, taken = DepthPlan(48, blocks), cheapest(DepthPlan(48, blocks), 1 / 32)
    assert units(plan, starts, prototype=True) == row
    assert units(plan, cheapest(plan, 1 / 32, math.inf)) <= units(plan, starts)
    if blocks:
        assert units(plan, taken, prototype=True) <= row
    else:
        assert units(plan, taken, prototype=True) == 828 > row
    assert duration(plan, taken, 1 / 32) <= duration(plan, starts, 1 / 32)


def test_the_page_shows_these_counts() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    for blocks, starts, row in PROTOTYPE:
        plan = DepthPlan(48, blocks)
        taken, least = cheapest(plan, 1 / 32), cheapest(plan, 1 / 32, math.inf)
        plain = (units(plan, single(plan)), units(plan, least))
        counts = (
            row,
            units(plan, taken, prototype=True),
            units(plan, starts),
            units(plan, taken),
            *plain,
        )
        name = f"N = {blocks}" if blocks else "full"
        assert f"| {name} | " + " | ".join(f"{count:.0f}" for count in counts) + " |" in page


def test_the_page_predicts_from_these_counts() -> None:
    """Against a step at 55% of the peak of an H100 or H200."""
    page = (ROOT / "docs" / "performance.md").read_text()
    seconds = cost(of_paper("baseline")).training_flops / (0.55 * 989e12)
    assert f"{1e6 * seconds:.2f} µs a token" in page
    for blocks in (4, 8, 16, None):
        plan = DepthPlan(48, blocks)
        moved = 2 * 1024 * round(units(plan, cheapest(plan, 1 / 32)))
        shares = [moved / rate / seconds for rate in (3.35e12, 4.8e12)]
        cells = [f"{share:.1%}"[:-1] + f" – {share / 0.9:.1%}" for share in shares]
        name = f"N = {blocks}" if blocks else "full"
        assert f"| {name} | {moved // 2048} | {cells[0]} | {cells[1]} |" in page


def test_plain_reads_cost_what_they_cost() -> None:
    """One read a site, gradients added up in place: 3 units a source and site, and what each site adds."""
    plan = DepthPlan(48, 8)
    assert units(plan, single(plan), prototype=True) > 3 * units(plan, cheapest(plan, 1 / 32))


def test_groups_follow_the_machine() -> None:
    """Large groups move less and compute more: full granularity takes smaller ones than traffic alone would ask for."""
    plan = DepthPlan(48)
    usual, ideal = (
        max(step.later for step in steps(plan, cheapest(plan, 1 / 32, balance)))
        for balance in (400, math.inf)
    )
    assert usual < ideal
    assert cheapest(DepthPlan(60, 1), 1 / 32) == single(
        DepthPlan(60, 1)
    )  # a block of 60 fits into no group
