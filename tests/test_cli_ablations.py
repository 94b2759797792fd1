"""Every ablation through train.py: the loss falls, a kill changes nothing, and the folder says what ran."""

from pathlib import Path

import pytest

from tests.test_cli import assert_equal_runs, comparable, run, start, wait_for_step

ABLATIONS = [
    ["key_norm=false"],
    ["logit_scale=rsqrt", "query_std=0.02"],
    ["heads=4"],
    ["input_queries=true"],
    ["block_scale=mean"],
    ["block_scale=sqrt", "learned_scale=true"],
    ["embedding_source=false"],
    ["sources=states"],
]


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["s_lr", "p_lr"])
@pytest.mark.parametrize("ablation", ABLATIONS, ids=",".join)
def test_an_ablation_trains_and_resumes_to_the_last_bit(
    tiny_run, tmp_path: Path, ablation: list[str], residual: str
) -> None:
    chosen = [f"model.depth.{setting}" for setting in ablation]
    settings = tiny_run(f"model.residual={residual}", "steps=20", "evaluation.every=null", *chosen)
    output = run("train.py", *settings, "name=straight")
    assert (
        all(setting in output for setting in chosen)
        and "reference, chosen by kernels=auto" in output
    )
    cut = tmp_path / "runs" / "cut"
    process = start("train.py", *settings, "name=cut")
    wait_for_step(process, cut / "metrics.jsonl", 7)
    process.kill()
    process.communicate()
    assert "continuing from step" in run("train.py", *settings, "name=cut")
    assert_equal_runs(tmp_path / "runs" / "straight", cut, step=20)
    losses = [record["loss"] for record in comparable(cut)]
    assert sum(losses[-5:]) < sum(losses[:5]) - 1
    evaluated = run("eval.py", f"run={cut}", "diagnostics=true")
    assert "depth kernels reference" in evaluated
    assert "the run was started with other settings" in run(
        "train.py", *tiny_run("steps=20", "evaluation.every=null"), "name=cut", code=2
    )
