"""What version 0.1 wrote: its runs are continued, its checkpoints evaluated and its exported models loaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import lrattnres
from tests.paths import ROOT
from tests.programs import run

RECORDED = ROOT / "tests" / "recorded" / "version_0_1"


def command(folder: Path, script: str, *words: str) -> str:
    found = run(ROOT / script, *words, cwd=folder)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_a_run_of_version_0_1_is_continued_and_evaluated(tmp_path: Path) -> None:
    """Stopped after step 4 of 8; the settings are its own, as its command line gave them."""
    shutil.copytree(RECORDED, tmp_path / "old")
    old = tmp_path / "old"
    (start,) = json.loads((old / "run" / "environment.json").read_text())["starts"]
    assert "continuing from step 4" in command(old, "train.py", *start["command"][2:])
    expected, found = (
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in (old / "expected.jsonl", old / "run" / "metrics.jsonl")
    )
    assert len(found) == len(expected) == 8
    for record, truth in zip(found, expected, strict=True):
        for name in ("loss", "z_loss", "grad_norm", "val_loss", "hidden_norm"):
            assert (name in record) == (name in truth)
            if name in truth:
                assert record[name] == pytest.approx(truth[name], rel=1e-5), name
        assert record["batch_hash"] == truth["batch_hash"]
    command(old, "eval.py", "run=run", "device=cpu", "threads=1", "diagnostics=true")
    measured = json.loads((old / "run" / "evaluation" / "step_000008.json").read_text())
    assert measured["val_loss"] == pytest.approx(expected[-1]["val_loss"], rel=1e-5)


def test_a_model_exported_by_version_0_1_is_loaded() -> None:
    """Its weights are those of the eight steps: its loss on a text is that of the run, and not that of a new model."""
    model = lrattnres.load(str(RECORDED / "exported"))
    tokens = torch.tensor([[256, *b"the router reads what every"]])
    with torch.no_grad():
        logits = model(tokens, model.mask(None, *tokens.shape))
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert loss.item() < 5.3 < torch.tensor(257.0).log().item()
