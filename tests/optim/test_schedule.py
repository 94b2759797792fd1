"""The schedule against values worked out by hand."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lrattnres.config import OptimizerConfig, parse
from lrattnres.optim.schedule import learning_rate_factor, momentum

CONFIGS = Path(__file__).parents[2] / "configs" / "optimizer"
PAPER_STEPS = 38_146


def preset(name: str, **changes: Any) -> OptimizerConfig:
    tree: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    return parse(OptimizerConfig, tree | changes)


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 1 / 2000),
        (999, 0.5),
        (1998, 1999 / 2000),
        (1999, 1.0),
        (2000, 1.0),
        (30_516, 1.0),  # 38146 - round(7629.2) = 30517 steps come before the warm-down
        (30_517, 1 - 0.9 / 7629),
        (38_145, 0.1),
    ],
)
def test_the_papers_learning_rate(step: int, factor: float) -> None:
    assert learning_rate_factor(step, preset("paper"), PAPER_STEPS) == pytest.approx(
        factor, abs=1e-15
    )


@pytest.mark.parametrize(
    ("step", "value"),
    [
        (0, 0.85),
        (150, 0.90),
        (300, 0.95),
        (301, 0.95),
        (38_045, 0.95),
        (38_046, 0.949),
        (38_095, 0.90),
        (38_145, 0.85),
    ],
)
def test_the_papers_momentum(step: int, value: float) -> None:
    assert momentum(step, preset("paper"), PAPER_STEPS) == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize("final", [0.0, 0.1, 0.3, 1.0])
def test_the_ends_are_exact(final: float) -> None:
    config = preset("paper", final=final, warmup=3, momentum_rise=2, momentum_fall=2)
    assert learning_rate_factor(9, config, 10) == final
    assert learning_rate_factor(5, config, 10) == 1.0
    assert [momentum(step, config, 10) for step in (0, 5, 9)] == [0.85, 0.95, 0.85]


def test_ramps_of_no_steps_are_left_out() -> None:
    config = preset("paper", warmup=0, warmdown=0.0, momentum_rise=0, momentum_fall=0)
    assert [learning_rate_factor(step, config, 4) for step in range(4)] == [1.0] * 4
    assert [momentum(step, config, 4) for step in range(4)] == [0.95] * 4


def test_ramps_that_meet_reach_the_peak_and_the_lower_of_two_that_overlap_holds() -> None:
    meet = preset("paper", warmup=8, momentum_rise=5, momentum_fall=4)
    assert [learning_rate_factor(step, meet, 10) for step in (6, 7, 8)] == pytest.approx(
        [7 / 8, 1.0, 0.55]
    )
    assert [momentum(step, meet, 10) for step in (4, 5, 6)] == pytest.approx([0.93, 0.95, 0.925])
    overlap = preset("paper", warmup=20, momentum_rise=20, momentum_fall=20)
    assert [learning_rate_factor(step, overlap, 10) for step in (0, 8, 9)] == pytest.approx(
        [0.05, 0.45, 0.1]
    )
    assert [momentum(step, overlap, 10) for step in (4, 9)] == pytest.approx([0.87, 0.85])


@pytest.mark.parametrize("step", [-1, 10])
@pytest.mark.parametrize("value", [learning_rate_factor, momentum])
def test_a_step_outside_the_run_raises(value: Any, step: int) -> None:
    with pytest.raises(ValueError, match=f"step={step}: must be 0 to 9"):
        value(step, preset("paper"), 10)


def test_the_presets_say_what_the_paper_says() -> None:
    paper = preset("paper")
    assert (paper.muon_lr, paper.adam_lr, paper.warmup, paper.warmdown, paper.final) == (
        1e-3,
        3e-4,
        2000,
        0.2,
        0.1,
    )
    assert (paper.momentum_low, paper.momentum, paper.momentum_rise, paper.momentum_fall) == (
        0.85,
        0.95,
        300,
        100,
    )
    assert (paper.muon_weight_decay, paper.adam_beta1, paper.adam_beta2, paper.clip) == (
        0.1,
        0.9,
        0.95,
        1.0,
    )
    assert (paper.cautious, paper.iterations, paper.orthogonalizer.name) == (
        True,
        5,
        "polar_express",
    )


def test_the_demos_preset_fits_a_run_of_300_steps() -> None:
    demo = preset("demo")
    assert (demo.muon_lr, demo.adam_lr, demo.warmup) == (0.01, 3e-3, 20)
    factors = [learning_rate_factor(step, demo, 300) for step in range(300)]
    assert (factors[0], factors[19], factors[119], factors[299]) == (1 / 20, 1.0, 1.0, 0.1)
