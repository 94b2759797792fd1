"""The granularity against figures of the paper, and against counting by hand."""

import pytest

from lrattnres.residual.plan import DepthPlan


@pytest.mark.parametrize(
    ("blocks", "reads"), [(None, 1224), (48, 1224), (4, 168), (8, 264), (16, 456)]
)
def test_number_of_reads_of_the_paper(blocks: int | None, reads: int) -> None:
    assert DepthPlan(48, blocks).reads == reads


def test_blocks_that_do_not_divide_end_at_the_ceiling() -> None:
    plan = DepthPlan(7, 3)
    assert plan.ends == (3, 5, 7)
    assert [plan.closes(site) for site in range(7)] == [
        False,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    assert plan.sources(0) == (range(1),)
    assert plan.sources(2) == (range(1), range(1, 3))
    assert plan.sources(3) == (range(1), range(1, 4))
    assert plan.sources(6) == (range(1), range(1, 4), range(4, 6), range(6, 7))
    assert plan.sources(7) == (range(1), range(1, 4), range(4, 6), range(6, 8))


@pytest.mark.parametrize("sublayers", [1, 2, 7, 12])
def test_every_output_is_in_exactly_one_source(sublayers: int) -> None:
    for blocks in [None, *range(1, sublayers + 1)]:
        plan = DepthPlan(sublayers, blocks)
        for site in plan.sites:
            members = [i for source in plan.sources(site) for i in source]
            assert members == list(range(site + 1))


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (0, r"blocks=0: must be between 1 and 2\*model.layers=7"),
        (-1, "must be between 1 and"),
        (8, "must be between 1 and"),
        ((), r"blocks=\[\]: every depth block has at least one"),
        ((3, 0, 4), r"blocks=\[3,0,4\]: every depth block has at least one"),
        ((3, 3), r"blocks=\[3,3\]: the sizes of the depth blocks add up to 6; .*layers=7"),
    ],
)
def test_impossible_blocks_are_refused(blocks, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DepthPlan(7, blocks)


def test_depth_blocks_may_differ_in_size() -> None:
    plan = DepthPlan(8, (1, 1, 2, 4))
    assert plan.ends == (1, 2, 4, 8)
    assert plan.sources(6) == (*map(range, [0, 1, 2, 3], [1, 2, 3, 5]), range(5, 7))
    assert DepthPlan(8, (3, 3, 2)).ends == DepthPlan(8, 3).ends
    narrow = DepthPlan(8, (1, 1, 2, 4), window=2)
    assert narrow.sources(6) == (range(1), range(3, 5), range(5, 7))
    assert narrow.sources(4) == (range(1), range(2, 3), range(3, 5))
