"""An exported folder is the model: the same loss by eval.py, the same logits by `lrattnres.load`, nothing by halves."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import lrattnres
from lrattnres.config import ConfigError, EvalConfig, parse
from lrattnres.config.commands import ExportConfig
from lrattnres.entry import settings
from lrattnres.evaluation.run import Evaluation, _say_what_goes, evaluate_run
from lrattnres.exchange.export import export_run
from lrattnres.exchange.folder import FolderError, ends_of, figures
from lrattnres.runs.checkpoint import Checkpoints
from lrattnres.runs.folder import RunFolder
from tests.test_cli import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory, texts: Path) -> Path:
    """A finished run of 10 steps."""
    place = tmp_path_factory.mktemp("exported")
    model = [
        "model.layers=2",
        "model.dim=16",
        "model.heads=2",
        "model.mlp_width=24",
        "model.context=32",
    ]
    size = [
        "steps=10",
        "global_batch=8",
        "micro_batch=4",
        "model.residual=p_lr",
        "model.rank=4",
        "model.blocks=2",
    ]
    rest = [
        "optimizer.warmup=2",
        "evaluation.tokens=500",
        "data=files",
        f"data.root={texts}",
        f"runs={place}",
        "name=run",
    ]
    run("train.py", "experiment=demo", "threads=1", *model, *size, *rest)
    return place / "run"


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    out = trained.parent / "model"
    assert "exported" in run("scripts/export.py", f"run={trained}", f"out={out}")
    return out


def test_an_exported_model_has_the_runs_loss(trained: Path, exported: Path) -> None:
    run("eval.py", f"run={exported}", "threads=1")
    before = json.loads((trained / "summary.json").read_text())
    after = json.loads((exported / "evaluation" / "step_000010.json").read_text())
    assert (
        after["val_loss"] == pytest.approx(before["val_loss"], abs=1e-6)
        and after["val_tokens"] == 500
    )
    with pytest.raises(ConfigError, match=r"step=5: .* was exported at step 10"):
        evaluate_run(parse(EvalConfig, {"run": str(exported), "step": 5}))
    with pytest.raises(ConfigError, match="threads=0: must be at least 1"):
        evaluate_run(parse(EvalConfig, {"run": str(exported), "threads": 0}))
    card = (exported / "README.md").read_text()
    assert f"{before['val_loss']:.6g}" in card and "p_lr" in card
    modes = {
        path.name: oct(path.stat().st_mode & 0o777) for path in exported.iterdir() if path.is_file()
    }
    assert len(set(modes.values())) == 1, modes


def test_figures_are_of_training_and_of_a_later_evaluation(tmp_path: Path) -> None:
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 9, "loss": 3}\n{"step": 10, "loss": 2, "tokens": 7, "val_loss": 2.5}\n'
    )
    assert figures(tmp_path, 10) == {"step": 10, "loss": 2, "tokens": 7, "val_loss": 2.5}
    (tmp_path / "evaluation" / "step_000010.json").write_text('{"step": 10, "val_loss": 2.25}')
    assert figures(tmp_path, 10) == {"step": 10, "loss": 2, "tokens": 7, "val_loss": 2.25}
    assert figures(tmp_path, 11) == {}


def test_a_text_ends_where_any_of_the_files_says(tmp_path: Path) -> None:
    assert ends_of(tmp_path) == set()
    for said, also, ends in (
        (None, 3, {3}),
        (3, [3], {3}),
        (5, [3, 5], {3, 5}),
        ([5, 4], None, {4, 5}),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": said}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": also}))
        assert ends_of(tmp_path) == ends
    for wrong in ("3", [3, None], True, -1):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(FolderError, match=r"eos_token_id=.*must be the number of a token"):
            ends_of(tmp_path)


def test_what_an_evaluation_replaces_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    for tokens in (None, 300, 300, 500):
        diagnostics = None if tokens is None else {"tokens": tokens}
        result = Evaluation(RunFolder(tmp_path), 10, True, {"step": 10}, diagnostics)
        _say_what_goes(result, said.append)
        result.write()
    assert said == [
        f"{tmp_path}/evaluation/step_000010.diagnostics.json: replaced; before: tokens 300"
    ]


def test_load_gives_the_weights_of_the_checkpoint(trained: Path, exported: Path) -> None:
    model = lrattnres.load(exported)
    state = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    Checkpoints(trained / "checkpoints").at(10).load({"model": state})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    tokens = torch.randint(257, (2, 9))
    assert model(tokens, model.mask(None, 2, 9)).shape == (2, 9, 257)
    assert json.loads((exported / "config.json").read_text())["lrattnres"]["tokenizer"] == "bytes"


def test_what_is_there_is_not_touched(trained: Path, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="there is something already"):
        export_run(settings(ExportConfig, [f"run={trained}", f"out={exported}"]))
    (tmp_path / "empty").mkdir()
    export_run(settings(ExportConfig, [f"run={trained}", f"out={tmp_path}/empty"]))
    assert (tmp_path / "empty" / "config.json").exists()
    with pytest.raises(ConfigError, match="out: must be key=value"):
        settings(ExportConfig, ["run=x", "out"])
    with pytest.raises(ConfigError, match="did you mean run"):
        settings(ExportConfig, ["runn=x", "out=y"])


def test_a_damaged_folder_is_refused(exported: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(exported, tmp_path / "copy")
    tree = json.loads((copy / "config.json").read_text())
    tree["lrattnres"]["model"]["dim"] = 32
    (copy / "config.json").write_text(json.dumps(tree))
    with pytest.raises(
        FolderError, match=r"embedding.weight: \(257, 16\) in the file, \(257, 32\) wanted"
    ):
        lrattnres.load(copy)
    tree["lrattnres"]["model"]["layrs"] = 2
    (copy / "config.json").write_text(json.dumps(tree))
    with pytest.raises(FolderError, match="did you mean layers"):
        lrattnres.load(copy)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-100:] = bytes(byte ^ 0x41 for byte in weights[-100:])
    (copy / "model.safetensors").write_bytes(weights)
    shutil.copyfile(exported / "config.json", copy / "config.json")
    with pytest.raises(FolderError, match="damaged: its SHA-256"):
        lrattnres.load(copy)
    (copy / "model.safetensors").write_bytes(b"no weights")
    (copy / "config.json").write_text((exported / "config.json").read_text())
    with pytest.raises(FolderError, match="cannot be read"):
        lrattnres.load(copy)
    with pytest.raises(FolderError, match=r"write a folder that scripts/export\.py"):
        lrattnres.load(tmp_path)
