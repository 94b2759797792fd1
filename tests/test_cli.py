"""The commands of the README, as processes of their own: killed, signalled, continued, swept, refused.

One training and one evaluation have an interpreter of their own; what the others write is the same.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lrattnres.config import parse
from lrattnres.residual.cost import cost
from lrattnres.runs.checkpoint import Checkpoints
from lrattnres.runs.folder import RunFolder
from lrattnres.runs.metrics import MetricsFile
from tests.paths import ROOT
from tests.programs import ENVIRONMENT, Program


def start(script: str, *arguments: str, interpreter: bool = False) -> subprocess.Popen[str]:
    """`python SCRIPT arguments`; with an interpreter of its own, or at once (tests/programs.py)."""
    words, begin = [str(ROOT / script), *arguments], Program
    if interpreter:
        words, begin = [sys.executable, *words], subprocess.Popen
    return begin(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    )


def run(script: str, *arguments: str, code: int = 0, interpreter: bool = False) -> str:
    process = start(script, *arguments, interpreter=interpreter)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == code, output
    return output


def wait_for_step(process: subprocess.Popen[str], metrics: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= step:
            return
        time.sleep(0.002)
    pytest.fail(f"step {step} was not seen while the process ran: {process.communicate()[0]}")


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, read without the trainer."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    path = folder / "checkpoints" / f"step_{step:06d}"
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    assert all(isinstance(entry, TensorStorageMetadata) for entry in entries.values())
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
    }
    load(state, checkpoint_id=path, no_dist=True)
    return state


def comparable(folder: Path) -> list[dict]:
    noisy = ("tokens_per_second", "mfu")
    records = MetricsFile.read(folder / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in noisy} for record in records]


def assert_equal_runs(straight: Path, other: Path, step: int = 40) -> None:
    expected, found = tensors(straight, step), tensors(other, step)
    assert expected.keys() == found.keys()
    assert any(name.startswith("optimizer.") for name in found) and any(
        name.startswith("loader.") for name in found
    )
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert comparable(straight) == comparable(other)
    assert [record["step"] for record in comparable(other)] == list(range(1, step + 1))


SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("baseline", "attn_res", "p_lr", "delta")
]


@pytest.mark.parametrize("residual", ["s_lr", *SLOW])
def test_two_kills_change_nothing(tiny_run, tmp_path: Path, residual: str) -> None:
    settings = tiny_run(f"model.residual={residual}")
    straight = run("train.py", *settings, "name=straight", interpreter=True)
    assert "finished at step 40" in straight
    cut = tmp_path / "runs" / "cut"
    for step in (7, 23):
        process = start("train.py", *settings, "name=cut")
        wait_for_step(process, cut / "metrics.jsonl", step)
        process.kill()
        output = process.communicate()[0]
        assert process.returncode == -signal.SIGKILL, output
        assert step == 7 or "continuing from step" in output
    assert "continuing from step" in run("train.py", *settings, "name=cut")
    assert_equal_runs(tmp_path / "runs" / "straight", cut)
    summaries = [
        json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        for name in ("straight", "cut")
    ]
    for summary in summaries:
        assert summary.pop("seconds")["total"] > 0
    norms = [record["grad_norm"] for record in comparable(cut)]
    assert summaries[0] == summaries[1] and summaries[0]["mean_grad_norm"] == pytest.approx(
        sum(norms) / 40, rel=1e-12
    )
    again = run("train.py", *settings, "name=cut")
    assert "finished at step 40" in again and "continuing" not in again


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_leaves_with_75(
    tiny_run, tmp_path: Path, number: signal.Signals
) -> None:
    settings = tiny_run("checkpoint.every=1000", "steps=400", "evaluation.every=null")
    process = start("train.py", *settings)
    folder = tmp_path / "runs" / "run"
    wait_for_step(process, folder / "metrics.jsonl", 3)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75, output
    assert number.name in output and "the same command continues" in output
    (step,) = Checkpoints(folder / "checkpoints").steps()
    assert step >= 3 and MetricsFile.read(folder / "metrics.jsonl")[-1]["step"] == step


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(
    tiny_run, tmp_path: Path
) -> None:
    settings = tiny_run("checkpoint.keep_last=3")
    run("train.py", *settings, "name=straight")
    run("train.py", *settings, "name=hurt")
    folder = tmp_path / "runs" / "hurt"
    (folder / "summary.json").unlink()
    file = max(
        (folder / "checkpoints" / "step_000040").glob("*.distcp"),
        key=lambda path: path.stat().st_size,
    )
    file.write_bytes(file.read_bytes()[:-100])
    output = run("train.py", *settings, "name=hurt")
    assert (
        "step_000040" in output and "passed over" in output and "continuing from step 35" in output
    )
    assert_equal_runs(tmp_path / "runs" / "straight", folder)

    for path in (folder / "checkpoints").glob("step_*/manifest.json"):
        path.unlink()
    finished = run("train.py", *settings, "name=hurt", code=2)
    assert (
        "the run is finished, but" in finished
        and "step_000040" in finished
        and "resume=STEP" in finished
    )
    (folder / "summary.json").unlink()
    assert "no checkpoint is whole" in run("train.py", *settings, "name=hurt", code=2)

    straight = run("train.py", *settings, "name=straight", "resume=35")
    assert "continuing from step 35" in straight and "finished at step 40" in straight
    assert "there are: 30, 35, 40" in run(
        "train.py", *settings, "name=straight", "resume=12", code=2
    )
    assert "resume=none" in run("train.py", *settings, "name=straight", "resume=none", code=2)


def test_another_configuration_in_the_same_folder_is_refused(tiny_run, tmp_path: Path) -> None:
    run("train.py", *tiny_run("steps=10"))
    output = run(
        "train.py", *tiny_run("steps=10"), "seed=5", "model.rank=3", "checkpoint.every=2", code=2
    )
    assert "seed: 0 at the start, 5 now" in output and "model.rank: 4 at the start, 3 now" in output
    assert "checkpoint.every" not in output and "name=OTHER" in output
    config = RunFolder.read_config(tmp_path / "runs" / "run")
    assert (config.seed, config.model.rank) == (0, 4)


def test_a_corpus_that_changed_is_refused(tiny_run, tmp_path: Path) -> None:
    text = tmp_path / "own.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"document {i} " * 9}) for i in range(200)))
    settings = tiny_run(f"data.root={text}", "steps=10", "data.holdout=0.2")
    run("train.py", *settings)
    text.write_text(text.read_text().replace("document 7 ", "document x "))
    assert "corpus changed since the run started" in run("train.py", *settings, code=2)
    assert "the corpus differ from what the run was trained with" in run(
        "eval.py", f"run={tmp_path}/runs/run", code=2
    )


def test_evaluation_needs_the_folder_only_and_repeats_itself(tiny_run, tmp_path: Path) -> None:
    run(
        "train.py",
        *tiny_run(
            "checkpoint.keep_last=9",
            "evaluation.diagnostics_every=100",
            "evaluation.diagnostics_tokens=300",
        ),
    )
    folder = tmp_path / "runs" / "run"
    trained = json.loads((folder / "summary.json").read_text())
    first = run("eval.py", f"run={folder}", "threads=1", interpreter=True)
    record = json.loads((folder / "evaluation" / "step_000040.json").read_text())
    assert record["val_loss"] == trained["val_loss"] and record["val_tokens"] == 500
    assert run("eval.py", f"run={folder}", "threads=1") == first
    assert json.loads((folder / "evaluation" / "step_000040.json").read_text()) == record

    output = run(
        "eval.py",
        f"run={folder}/checkpoints/step_000020",
        "diagnostics=true",
        "tokens=300",
        "batch=3",
    )
    assert "300 tokens" in output
    assert "step_000020.json: replaced" not in output
    twenty = [record for record in comparable(folder) if record["step"] == 20]
    assert (
        json.loads((folder / "evaluation" / "step_000020.json").read_text())["val_loss"]
        != twenty[0]["val_loss"]
    )
    diagnostics = json.loads((folder / "evaluation" / "step_000020.diagnostics.json").read_text())
    (in_training,) = (folder / "evaluation").glob("step_000040.diagnostics.json")
    before = in_training.read_text()
    run("eval.py", f"run={folder}", "diagnostics=true", "threads=1", "kernels=reference")
    assert in_training.read_text() == before
    again = run("eval.py", f"run={folder}", "tokens=300", "threads=1")
    assert (
        f"step_000040.json: replaced; before: val_loss {trained['val_loss']}, val_tokens 500"
        in again
    )
    assert all(
        sum(weights) == pytest.approx(1, abs=1e-5) for weights in diagnostics["mean_weight"][1:]
    )
    for name in ("depth.png", "sites.png", "loss.png"):
        assert (folder / "plots" / name).read_bytes().startswith(b"\x89PNG")
    assert "there are" in run("eval.py", f"run={folder}", "step=7", code=2)
    assert "no such folder" in run("eval.py", f"run={folder}x", code=2)
    assert "did you mean diagnostics" in run("eval.py", f"run={folder}", "diagnostic=true", code=2)


def test_a_sweep_runs_what_is_missing(tiny_run, tmp_path: Path) -> None:
    settings = [
        setting
        for setting in tiny_run("steps=10", "evaluation.every=null")
        if setting != "name=run"
    ]
    output = run("train.py", "-m", *settings, "model.residual=baseline,attn_res,s_lr")
    folders = sorted(path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert [folder.name.split("-data")[0] for folder in folders] == [
        "demo-attn_res-N2",
        "demo-baseline",
        "demo-s_lr-N2-r4",
    ]
    assert all((folder / "summary.json").exists() for folder in folders)
    assert "model.rank has no meaning for model.residual=baseline: recorded as null" in output
    assert RunFolder.read_config(folders[1]).model.blocks is None
    (folders[0] / "summary.json").unlink()
    before = folders[2].joinpath("metrics.jsonl").stat().st_mtime_ns
    run("train.py", "-m", *settings, "model.residual=baseline,attn_res,s_lr")
    assert (folders[0] / "summary.json").exists()
    assert {path.name for path in (tmp_path / "runs").iterdir() if path.is_file()} <= {
        "multirun.yaml",
        "sweep.csv",
    }
    assert folders[2].joinpath("metrics.jsonl").stat().st_mtime_ns == before


def test_faults_are_refused_before_any_data_is_touched(tmp_path: Path) -> None:
    output = run(
        "train.py",
        "experiment=demo",
        "model.rank=abc",
        "compile=no",
        "foo=1",
        f"runs={tmp_path}",
        code=2,
    )
    assert (
        all(word in output for word in ("model.rank=abc", "compile=no", "foo=1"))
        and "Traceback" not in output
    )
    assert list(tmp_path.iterdir()) == []
    missing = run(
        "train.py",
        "experiment=demo",
        "data=files",
        f"data.root={tmp_path}/none",
        f"runs={tmp_path}",
        code=2,
    )
    assert "none" in missing and "Traceback" not in missing and list(tmp_path.iterdir()) == []
    (tmp_path / "one.txt").write_text("one document")
    small = run(
        "train.py",
        "experiment=demo",
        "data=files",
        f"data.root={tmp_path}/one.txt",
        f"runs={tmp_path}/runs",
        code=2,
    )
    assert "global_batch=16" in small and not (tmp_path / "runs").exists()
    if not torch.cuda.is_available():
        begin = time.monotonic()
        words = ("model.residual=s_lr", "model.rank=64")
        assert "experiment=demo" in run("train.py", *words, code=2, interpreter=True)
        assert time.monotonic() - begin < 30


def test_a_run_that_diverges_leaves_with_3(tiny_run, tmp_path: Path) -> None:
    settings = tiny_run(
        "optimizer.muon_lr=1e30", "optimizer.warmup=0", "max_bad_steps=3", "instruments.depth=null"
    )
    output = run("train.py", *settings, code=3)
    assert "3 steps in a row" in output and "Traceback" not in output
    assert not (tmp_path / "runs" / "run" / "summary.json").exists()


def test_the_run_folder_can_be_read_without_the_package(tiny_run, tmp_path: Path) -> None:
    run("train.py", *tiny_run("steps=10"))
    folder = tmp_path / "runs" / "run"
    import yaml

    tree = yaml.safe_load((folder / "config.yaml").read_text())
    assert tree["model"]["rank"] == 4 and tree["compile"] == "off"
    assert parse(type(RunFolder.read_config(folder)), tree) == RunFolder.read_config(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    names = {
        "step",
        "tokens",
        "loss",
        "z_loss",
        "grad_norm",
        "lr_muon",
        "lr_adam",
        "tokens_per_second",
        "mfu",
        "batch_hash",
    }
    assert names <= set(lines[0]) and {"val_loss", "val_bits_per_byte"} <= set(lines[-1])
    (entry,) = json.loads((folder / "environment.json").read_text())["starts"]
    config = RunFolder.read_config(folder)
    flops = cost(config.model).training_flops
    assert lines[-1]["mfu"] == pytest.approx(
        lines[-1]["tokens_per_second"] * flops / entry["peak_flops"], rel=1e-12
    )
    assert entry["attention"] == "sdpa" and entry["compile"] == "off" and entry["versions"]["torch"]
