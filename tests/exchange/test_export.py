"""An exported folder is the model: the same loss by eval.py, the same logits by `lrattnres.load`,
nothing by halves.
"""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch

import lrattnres
from lrattnres.config import ConfigError, EvalConfig, parse
from lrattnres.config.commands import ExportConfig, GenerateConfig, InspectConfig
from lrattnres.entry import REFUSED, attempt, settings
from lrattnres.evaluation.run import Evaluation, _say_what_goes, evaluate_run
from lrattnres.exchange.export import export_run
from lrattnres.exchange.folder import FolderError, ends_of, figures, read_exported
from lrattnres.generation.run import generate_run
from lrattnres.report.inspection import inspect_run
from lrattnres.runs.checkpoint import Checkpoints
from lrattnres.runs.folder import RunError, RunFolder
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


@pytest.fixture
def later(trained: Path, tmp_path: Path) -> Path:
    """The run with a further checkpoint, of step 12."""
    run = shutil.copytree(trained, tmp_path / "run")
    model = lrattnres.load(exported_of(trained))
    Checkpoints(run / "checkpoints", keep_last=9).save(12, {"model": dict(model.state_dict())}, {})
    return run


def exported_of(trained: Path) -> Path:
    out = trained.parent / "model"
    if not out.exists():
        export_run(settings(ExportConfig, [f"run={trained}", f"out={out}"]))
    return out


def evaluated(run: Path, **words) -> dict:
    result = evaluate_run(parse(EvalConfig, {"run": str(run), "threads": 1} | words))
    return json.loads(result.file.read_text())


def generated(run: Path, *words: str) -> None:
    wanted = settings(GenerateConfig, [f"run={run}", "prompt=a", "tokens=2", *words])
    generate_run(wanted, io.StringIO(), io.StringIO())


def test_a_damaged_newest_checkpoint_is_not_passed_over_unasked(later, tmp_path, capsys) -> None:
    file = next((later / "checkpoints" / "step_000012").glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    out = f"out={tmp_path}/out"
    for use in (
        lambda: evaluated(later),
        lambda: export_run(settings(ExportConfig, [f"run={later}", out])),
        lambda: generated(later),
    ):
        code, error = attempt(lambda use=use: bool(use()) or True)
        assert code == REFUSED and "step_000012" in str(error)
        assert "damaged" in str(error) and str(error).endswith(
            "it is the newest checkpoint; write step=10 for the one before it, or restore it"
        )
    assert not (later / "evaluation" / "step_000010.json").exists()
    assert not (tmp_path / "out").exists()
    generated(later, "step=10")
    assert "passed_over" not in evaluated(later, step=10)
    assert evaluated(later, strict=False)["passed_over"] == [12]
    assert "passed over" in capsys.readouterr().out
    export_run(settings(ExportConfig, [f"run={later}", out, "strict=false"]))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["lrattnres"][
        "passed_over"
    ] == [12]
    assert "| newer, damaged checkpoints | 12 |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("moment", ["verified", "read"])
def test_a_checkpoint_that_training_removes_meanwhile_gives_way_to_the_next(
    later, tmp_path, monkeypatch, moment: str
) -> None:
    """Training goes on beside this: step 12 is there when it is looked for, and gone then."""
    at = Checkpoints.at

    def prune(step: int) -> None:
        if step == 12:
            folder = later / "checkpoints"
            (folder / "step_000012").rename(folder / ".step_000012.removed")
            shutil.rmtree(folder / ".step_000012.removed")

    def removed(self, step):
        found = at(self, step) if moment == "read" else None
        prune(step)
        return found or at(self, step)

    monkeypatch.setattr(Checkpoints, "at", removed)
    record = evaluated(later)
    assert record["step"] == 10 and "passed_over" not in record
    out = tmp_path / "out"
    export_run(settings(ExportConfig, [f"run={later}", f"out={out}"]))
    assert read_exported(out).step == 10


def test_results_that_cannot_be_written_are_refused_before_anything_is_computed(
    trained: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "evaluation", ignore_errors=True)
    (run / "evaluation").write_text("a file")
    with pytest.raises(RunError, match="evaluation: results cannot be written there: File exists"):
        evaluated(run)
    look = settings(InspectConfig, [f"run={run}", "text=a", f"out={run}/evaluation/deeper"])
    with pytest.raises(RunError, match="results cannot be written there: Not a directory"):
        inspect_run(look, io.StringIO())
