"""Run folders: same run or refused, one process at a time, nothing torn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from lrattnres.config import TrainConfig, flatten, parse, plain
from lrattnres.runs import files
from lrattnres.runs.files import from_json, to_json, write_atomic
from lrattnres.runs.folder import RunError, RunFolder
from lrattnres.runs.sweep import statuses, write_status
from tests.programs import Program

REQUIRED = {
    **{
        "name": "demo",
        "steps": 100,
        "global_batch": 8,
        "micro_batch": 4,
        "device": "cpu",
        "precision": "float32",
    },
    "model": {
        "residual": "s_lr",
        "rank": 8,
        "blocks": None,
        "layers": 2,
        "dim": 32,
        "heads": 2,
        "mlp_width": 64,
        "context": 32,
    },
    "data": {"corpus": "docstrings", "holdout": 0.01},
    "tokenizer": {"name": "bytes"},
    "optimizer": {
        "muon_lr": 1e-5,
        "adam_lr": 0.003,
        "warmup": 10,
        "momentum_rise": 0,
        "momentum_fall": 0,
    },
    "checkpoint": {"every": 50},
    "evaluation": {"every": None, "tokens": 1000},
}


def config(runs: Path, **changes: Any) -> TrainConfig:
    """`optimizer__muon_lr=…` stands for optimizer.muon_lr."""
    tree: Any = json.loads(json.dumps(REQUIRED | {"runs": str(runs)}))
    for key, value in changes.items():
        *path, last = key.split("__")
        part = tree
        for name in path:
            part = part.setdefault(name, {})
        part[last] = value
    return parse(TrainConfig, tree)


def opened(*arguments: Any, **options: Any) -> RunFolder:
    """Opened and let go of again, as by a process that ended."""
    run = RunFolder.open(*arguments, **options)
    run.close()
    return run


# --- the same run ---------------------------------------------------------------------------------


def test_the_settings_come_back(tmp_path: Path) -> None:
    settings = config(tmp_path, data__root="a: b # ä", optimizer__clip=None)
    run = opened(settings)
    assert run.path == tmp_path / "demo"
    assert RunFolder.read_config(run.path) == settings
    # Any YAML reader finds the same values, 1e-05 as a number too.
    assert flatten(yaml.safe_load(run.config_path.read_text())) == flatten(plain(settings))


def test_a_setting_that_results_depend_on_may_not_change(tmp_path: Path) -> None:
    run = opened(config(tmp_path, model__path={"n": 2, "m": 1}))
    before = run.config_path.read_bytes()
    with pytest.raises(RunError) as error:
        RunFolder.open(
            config(
                tmp_path,
                seed=1,
                optimizer__muon_lr=0.02,
                model__blocks=3,
                model__path={"n": 3, "m": 1},
                checkpoint__every=7,
            )
        )
    message = str(error.value)
    for part in (
        "seed: 0 at the start, 1 now",
        "optimizer.muon_lr: 1e-05 at the start, 0.02 now",
        "model.blocks: None",
    ):
        assert part in message
    assert "model.path.n: 2 at the start, 3 now" in message and "m: 1" not in message
    assert "checkpoint" not in message and "name=OTHER" in message and str(run.path) in message
    assert run.config_path.read_bytes() == before


def test_the_others_may_and_are_taken_over(tmp_path: Path) -> None:
    run = opened(config(tmp_path))
    opened(
        config(tmp_path, checkpoint__every=7, logger__name="wandb", compile="model", resume="50")
    )
    stored = RunFolder.read_config(run.path)
    assert (stored.checkpoint.every, stored.logger.name.name, stored.compile.name) == (
        7,
        "wandb",
        "model",
    )


def test_a_step_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"resume=50: there is no run in .*write resume=auto"):
        RunFolder.open(config(tmp_path, resume="50"))
    assert not list(tmp_path.iterdir())


def test_resume_none(tmp_path: Path) -> None:
    settings = config(tmp_path, resume="none")
    opened(settings)
    with pytest.raises(
        RunError, match=r"a run already, and resume=none; write resume=auto .* name=OTHER .* remove"
    ):
        RunFolder.open(settings)


def test_what_the_settings_only_name_may_not_change(tmp_path: Path) -> None:
    run = opened(config(tmp_path), extra_identity={"corpus": "abc", "tokenizer": "t1"})
    assert json.loads(run.identity_path.read_text()) == {"corpus": "abc", "tokenizer": "t1"}
    opened(config(tmp_path), extra_identity={"corpus": "abc", "tokenizer": "t1"})
    with pytest.raises(
        RunError, match="the corpus changed since the run started: abc then, abd now"
    ):
        RunFolder.open(config(tmp_path), extra_identity={"corpus": "abd", "tokenizer": "t1"})
    with pytest.raises(
        RunError, match="the tokenizer changed since the run started: t1 then, none now"
    ):
        RunFolder.open(config(tmp_path), extra_identity={"corpus": "abc"})
    opened(
        config(tmp_path), extra_identity={"corpus": "abc", "tokenizer": "t1"}
    )  # a refused one leaves no lock behind


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0b", "x" * 201, "ä" * 101])
def test_names_that_are_no_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="name="):
        RunFolder.open(config(tmp_path, name=name))
    assert not list(tmp_path.iterdir())


def test_a_folder_may_be_renamed(tmp_path: Path) -> None:
    run = opened(config(tmp_path))
    run.path.rename(tmp_path / "other")
    again = opened(config(tmp_path, name="other"))
    assert again.notes == ["the run was started as name=demo, and goes on as other"]
    assert RunFolder.read_config(again.path).name == "other" and len(again.starts()) == 2
    write_status(again.path, "stopped")
    again.path.rename(tmp_path / "third")
    assert [row["name"] for row in statuses(tmp_path)] == ["third"]


PATHS = ["data__root", "tokenizer__path", "initial"]


@pytest.mark.parametrize("key", PATHS)
def test_a_path_may_be_written_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    for place in ("work/here", "away", "data", "away/data"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work" / "here")
    run = opened(config(tmp_path, **{key: "../../data"}))
    name = key.replace("__", ".")
    assert flatten(yaml.safe_load(run.config_path.read_text()))[name] == "../../data"
    monkeypatch.chdir(tmp_path / "away")
    assert flatten(plain(RunFolder.read_config(run.path)))[name] == str(tmp_path / "data")
    for written in ("../data", str(tmp_path / "data"), "../away/../data"):
        opened(config(tmp_path, **{key: written}))
    for written in ("data", "../../data"):
        with pytest.raises(RunError, match=rf"{name}: .*data at the start, {written} now"):
            opened(config(tmp_path, **{key: written}))
    (tmp_path / "data").rmdir()  # on another machine: as it is written
    assert flatten(plain(RunFolder.read_config(run.path)))[name] == "../away/../data"


def test_paths_of_an_older_run_are_compared_as_they_are_written(tmp_path: Path) -> None:
    run = opened(config(tmp_path, data__root="hf://datasets/a/b"))
    assert json.loads(run.paths_path.read_text()) == {}  # no path of this machine
    run.paths_path.unlink()
    opened(config(tmp_path, data__root="hf://datasets/a/b"))
    run.paths_path.unlink()
    with pytest.raises(RunError, match=r"data\.root"):
        opened(config(tmp_path, data__root="hf://datasets/a/c"))


# --- damage ---------------------------------------------------------------------------------------


def test_no_cut_of_the_settings_passes_for_whole(tmp_path: Path) -> None:
    """Most beginnings of a YAML file are YAML files, with defaults for what is missing."""
    run = opened(config(tmp_path))
    content = run.config_path.read_bytes()
    for length in range(len(content)):
        run.config_path.write_bytes(content[:length])
        with pytest.raises(RunError, match=r"config\.yaml"):
            RunFolder.read_config(run.path)


@pytest.mark.parametrize(
    "content",
    [b"a: [1\n...\n", b"- 1\n...\n", b"steps: many\n...\n", b"\xff\xfe\n...\n", b"42\n...\n"],
)
def test_settings_that_are_none(tmp_path: Path, content: bytes) -> None:
    run = opened(config(tmp_path))
    run.config_path.write_bytes(content)
    with pytest.raises(RunError, match=r"config\.yaml"):
        RunFolder.open(config(tmp_path))


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run folder"):
        RunFolder.read_config(tmp_path / "none")
    (tmp_path / "demo" / "checkpoints").mkdir(parents=True)
    with pytest.raises(RunError, match="has checkpoints, but no config"):
        RunFolder.open(config(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot be used as a run folder: .*Not a directory"):
        RunFolder.open(config(tmp_path / "file"))


def test_a_start_that_was_killed_before_it_wrote_everything(tmp_path: Path) -> None:
    run = opened(config(tmp_path), extra_identity={"corpus": "old"})
    run.config_path.unlink()
    opened(config(tmp_path, seed=3), extra_identity={"corpus": "new"})
    assert RunFolder.read_config(run.path).seed == 3 and len(run.starts()) == 1


@pytest.mark.parametrize("file", ["environment.json", "identity.json", "summary.json"])
def test_torn_json_is_named(tmp_path: Path, file: str) -> None:
    run = opened(config(tmp_path))
    (run.path / file).write_text('{"starts": [')
    with pytest.raises(RunError, match=file):
        run.finished()
        RunFolder.open(config(tmp_path))


# --- one process at a time ------------------------------------------------------------------------

HOLDS = """
import sys, time
from pathlib import Path
from lrattnres.runs.folder import RunFolder
run = RunFolder.open(RunFolder.read_config(Path(sys.argv[1])))
print("open", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    run = opened(config(tmp_path))
    holder = Program(["-c", HOLDS, run.path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout and holder.stdout.readline() == "open\n"
    with pytest.raises(
        RunError, match=rf"another process is training in it \(process {holder.pid}\)"
    ):
        RunFolder.open(config(tmp_path))
    holder.kill()
    holder.wait()
    opened(config(tmp_path))
    assert len(run.starts()) == 3


# --- what it was started with ---------------------------------------------------------------------


def test_every_start_is_described(tmp_path: Path) -> None:
    run = RunFolder.open(config(tmp_path))
    run.record_choices({"attention": "sdpa"})
    run.close()
    opened(config(tmp_path))
    first, second = json.loads(run.environment_path.read_text())["starts"]
    assert (
        first["attention"] == "sdpa"
        and "attention" not in second
        and first["time"] < second["time"]
    )
    assert (
        first["versions"]["torch"] == torch.__version__
        and first["versions"]["lrattnres"] == "0.1.0"
    )
    assert (
        first["python"] == ".".join(map(str, sys.version_info[:3]))
        and first["cpus"] == os.cpu_count()
    )
    assert {"numpy", "tiktoken", "pyarrow", "triton", "wandb"} <= first["versions"].keys()
    assert os.uname().nodename not in run.environment_path.read_text()
    root = Path(files.__file__).parents[2]
    if (root / ".git").exists():
        head = subprocess.run(
            ["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        assert (
            first["git"]["revision"] == head.stdout.strip() and type(first["git"]["dirty"]) is bool
        )


def test_no_repository_but_our_own_counts(tmp_path: Path) -> None:
    from lrattnres.runs.environment import _git

    assert _git(tmp_path) is None
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "site-packages").mkdir()
    assert _git(tmp_path / "site-packages") is None


def test_a_summary_finishes_the_run(tmp_path: Path) -> None:
    run = opened(config(tmp_path))
    assert run.finished() is None
    run.finish({"val_loss": float("nan"), "steps": 100, "text": "ä"})
    assert json.loads(run.summary_path.read_text()) == {
        "val_loss": "nan",
        "steps": 100,
        "text": "ä",
    }
    finished = run.finished()
    assert finished and finished["val_loss"] != finished["val_loss"]


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_many_write_one_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "table"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: write_atomic(path, f"{number}" * 1000), range(200)))
    assert len(set(path.read_text())) <= 3 and list(tmp_path.iterdir()) == [path]


def test_json_has_no_nan(tmp_path: Path) -> None:
    value = {"a": [float("inf"), -float("inf"), 1.5], "b": {"c": None, "d": True, "e": "nancy"}}
    text = to_json(value)
    assert json.loads(text, parse_constant=pytest.fail)["a"] == ["inf", "-inf", 1.5]
    assert from_json(text) == value
    with pytest.raises(ValueError, match="NaN is not JSON"):
        from_json("[NaN]")
    with pytest.raises(TypeError):
        to_json({"loss": torch.ones(1)})
