"""Matched comparisons, counted on built models and by hand, not by the closed form that made them."""

import dataclasses

import pytest
import torch

from lrattnres.config import ConfigError, TrainConfig
from lrattnres.config.checks import resolve
from lrattnres.model.transformer import Transformer
from tests.config.test_config import composed

PROXY = ("experiment=proxy", "name=x", "device=cpu", "steps=300")


def parameters(config: TrainConfig, **changes) -> int:
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(config.model, **changes))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("residual", ["attn_res", "p_lr", "s_lr", "delta"])
@pytest.mark.parametrize("other", ["baseline", "p_lr"])
def test_no_width_of_the_mlp_comes_closer(residual: str, other: str) -> None:
    plain, _ = resolve(composed(*PROXY, "model.residual=" + other))
    config, notes = resolve(
        composed(*PROXY, f"model.residual={residual}", "match=parameters", f"match_to={other}")
    )
    goal, width = parameters(plain), config.model.mlp_width
    off = {
        change: abs(parameters(config, mlp_width=width + change) - goal) for change in (-1, 0, 1)
    }
    assert off[0] == min(off.values())
    assert f"{parameters(config):,} parameters against {goal:,}" in notes[-1]
    assert f"off by {parameters(config) - goal:+,}" in notes[-1] or (
        "exact" in notes[-1] and parameters(config) == goal
    )
    others = {
        name: value
        for name, value in vars(config).items()
        if name not in ("model", "match", "match_to")
    }
    assert others == {name: getattr(plain, name) for name in others}


def test_parameters_by_hand() -> None:
    """p_lr of rank 32 adds 2,983,424 to the paper's model, and a unit of width has 24·(3·1024 + 32) = 74,496 weights."""
    row = ("+table1=10_block8_p_lr_r32", "name=x", "device=cpu", "compile=off")
    config, notes = resolve(composed(*row, "match=parameters", "match_to=baseline"))
    assert config.model.mlp_width == 2816 - 40 and config.steps == 38_146
    assert notes == [
        "match=parameters match_to=baseline: model.mlp_width is 2,776 instead of 2,816; 513,652,224 parameters against "
        "513,648,640, off by +3,584 (+0.0007%)"
    ]


def test_compute_by_hand() -> None:
    """Core, head and attention of the proxy: 12·(4·128² + 3·128·352) + 128·257 + 12·128·256; full attn_res reads 324 sources."""
    core = 12 * (4 * 128**2 + 3 * 128 * 352) + 128 * 257 + 12 * 128 * 256
    steps = round(300 * core / (core + 2 * 128 * 324))
    config, notes = resolve(
        composed(*PROXY, "+table1=02_full_attn_res", "match=compute", "match_to=baseline")
    )
    assert config.steps == steps == 291 and config.model.mlp_width == 352
    off = steps * (core + 2 * 128 * 324) / (300 * core) - 1
    assert "steps is 291 instead of 300" in notes[-1] and f"{100 * off:+.4f}%" in notes[-1]
    assert resolve(config) is not None


def test_tokens_stay_and_say_so() -> None:
    config, notes = resolve(composed(*PROXY, "match=tokens", "match_to=baseline"))
    assert (
        config.steps == 300
        and "steps=300 stays; 614,400 tokens against 614,400, exact" in notes[-1]
    )


def test_a_run_that_is_compared_with_itself_is_left_alone() -> None:
    for match in ("parameters", "tokens", "compute"):
        plain, _ = resolve(composed(*PROXY, "+table1=01_baseline"))
        config, notes = resolve(
            composed(*PROXY, "+table1=01_baseline", f"match={match}", "match_to=baseline")
        )
        assert dataclasses.replace(config, match=None, match_to=None) == plain and notes[
            -1
        ].endswith("exact")


def test_the_other_run_has_the_rank_that_this_one_has_no_use_for() -> None:
    given = ("model.rank=32", "model.blocks=4", "match=parameters", "match_to=p_lr")
    config, notes = resolve(composed(*PROXY, "model.residual=baseline", *given))
    assert (
        config.model.rank is None
        and "match_to=p_lr, 4 blocks, rank 32" in notes[-1]
        and config.model.mlp_width > 352
    )


def test_the_other_run_counts_what_it_would_use() -> None:
    """With a block a sub-layer, its value has no scale: neither run pays for one."""
    path = ("model.residual=s_lr", "model.blocks=null", "match=compute", "match_to=s_lr")
    config, notes = resolve(composed(*PROXY, *path, "model.depth.block_scale=mean"))
    assert config.steps == 300 and notes[-1].endswith("exact")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["match=parameter", "match_to=baseline"], ["match=parameter:", "parameters, tokens, compute"]),
        (["match=tokens", "match_to=base"], ["match_to=base:", "attn_res, baseline"]),
        (["match=tokens"], ["match=tokens", "write match_to="]),
        (["match_to=baseline"], ["match_to=baseline", "write match="]),
        (
            ["match=parameters", "match_to=baseline", "model.residual=p_lr", "model.rank=128", "model.mlp_width=20"],
            ["match=parameters", "leave no MLP", "model.mlp_width"],
        ),
        (
            ["match=compute", "match_to=baseline", "model.residual=p_lr", "steps=1", "model.rank=128", "model.mlp_width=1",
             "optimizer.warmup=0", "optimizer.warmdown=0", "model.layers=200", "model.blocks=null"],
            ["match=compute", "one step", "write more steps"],
        ),
        (["match=parameters", "match_to=p_lr", "+table1=02_full_attn_res"], ["match_to=p_lr", "model.rank=null"]),
        (["match=compute", "match_to=s_lr", "model.residual=baseline", "model.rank=5000"], ["match_to=s_lr", "rank=5000"]),
    ],
)  # fmt: skip
def test_what_cannot_match_is_refused(settings: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve(composed(*PROXY, *settings))
    for word in words:
        assert word in str(refusal.value)


def test_a_schedule_that_does_not_fit_into_fewer_steps_is_refused() -> None:
    settings = (
        "match=compute",
        "match_to=baseline",
        "+table1=02_full_attn_res",
        "optimizer.warmup=300",
        "optimizer.warmdown=0",
    )
    with pytest.raises(
        ConfigError, match=r"steps is 291 instead of 300[\s\S]*optimizer\.warmup=300"
    ):
        resolve(composed(*PROXY, *settings))
