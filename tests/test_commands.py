"""How the commands take their words: one idiom for all of them, and configurations of one's own."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from lrattnres.commands import COMMANDS, main
from lrattnres.commands.composing import composed
from lrattnres.config import ConfigError
from lrattnres.residual.base import paths
from tests.paths import CONFIGS, ROOT
from tests.programs import ENVIRONMENT

COMPOSED = {"train", "eval", "tokenize"}  # by Hydra, whose help is its own


@pytest.fixture
def said(monkeypatch, capsys):
    """A function that runs a command here, and gives its exit code, output and errors."""

    def say(name: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lrattnres", name, *words])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return say


def own_config(folder: Path, name: str, text: str) -> Path:
    file = folder / "experiment" / f"{name}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return folder


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - COMPOSED))
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_tells_usage_and_settings(said, name: str, option: str) -> None:
    code, shown, errors = said(name, option)
    assert code == 0 and not errors and f"lrattnres {name} " in shown
    assert name == "submission" or "=" in shown.split(f"lrattnres {name} ")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cost", "gird=table1"], "gird=table1: no such key"),
        (["cost", "grid=table2"], "grid=table2: must be one of table1 or null"),
        (["cost", "grid=table1", "model.rank=3"], "model.rank=3: the rows of the grid decide"),
        (["cost", "grid=table1", "paths=all"], "grid=table1 paths=all: they are two tables"),
        (
            ["cost", "paths=all", "path=hc"],
            "path=hc: every path has a row of its own; leave it out",
        ),
        (
            ["cost", "experiment=dem0"],
            "experiment=dem0: must be one of demo, finetune, paper, proxy; did you mean demo?",
        ),
        (["cost", "demo"], "demo: must be key=value"),
        (["estimate", "gpu=H1000"], "gpu=H1000: must be one of A100, H100"),
        (["estimate", "gpus=0"], "gpus=0: must be between 1 and"),
        (["estimate", "gpus=two"], "gpus=two: must be a whole number"),
        (["table1", "plan=maybe"], "plan=maybe: must be true or false"),
        (["report"], "runs: not set; usage: lrattnres report RUNFOLDER"),
        (["report", "a", "out="], "out: not set"),
        (["report", "a/seed=1"], "a/seed=1: no such folder"),
        (["sweep_status", "runs"], "runs: no run of a sweep"),
        (["sweep_status", "a", "b"], "runs is there already; write it once"),
        (["export", "run"], "run: must be key=value"),
        (["cost", "--config-dir=none"], "--config-dir=none: no such folder"),
        (["train", "--config-dir", "none"], "--config-dir=none: no such folder"),
        (["train", "--config-dir=twice"], "experiment/demo.yaml: is packaged already; write"),
        (["submission", "-cd", "twice"], "experiment/demo.yaml: is packaged already; write"),
    ],
)
def test_refusals_exit_with_2_and_say_what_to_write(
    said, words: list[str], message: str, tmp_path: Path, monkeypatch
) -> None:
    own_config(tmp_path / "twice", "demo", "steps: 1")
    monkeypatch.chdir(tmp_path)
    code, _, errors = said(*words)
    assert code == 2 and message in errors and "Traceback" not in errors


def test_own_configurations_are_searched_beside_the_packaged_ones(tmp_path: Path) -> None:
    text = (CONFIGS / "experiment" / "demo.yaml").read_text().replace("steps: 300", "steps: 77")
    assert "steps: 77" in text
    folder = own_config(tmp_path / "it's, a b", "mine", text)
    own_group = folder / "size" / "two.yaml"
    own_group.parent.mkdir()
    own_group.write_text("# @package _global_\nmodel:\n  layers: 2\n")
    words = ["experiment=mine", "name=x", "+size=two", f"--config-dir={folder}"]
    config = composed(words)
    assert (
        config.steps == 77 and config.model.layers == 2 and config.data.corpus.name == "docstrings"
    )
    with pytest.raises(ConfigError, match="experiment=mine: must be one of demo"):
        composed(words[:2])


def test_a_script_is_the_command_in_a_clone_that_is_not_installed(said, tmp_path: Path) -> None:
    """And the names in scripts/ hide no module of that name."""
    words = ["experiment=proxy", "+table1=10_block8_p_lr_r32"]
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    script = subprocess.run(
        [sys.executable, ROOT / "scripts" / "cost.py", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert script.returncode == 0 and script.stdout == said("cost", *words)[1], script.stderr
    assert "rank 4" in script.stdout and "1.7013% of the core" in script.stdout


def test_the_costs_of_all_paths_at_the_papers_size(said) -> None:
    code, shown, _ = said("cost", "paths=all", "model.rank=64", "model.blocks=null")
    lines = {cells[1]: cells for cells in map(str.split, shown.splitlines()[1:])}
    assert code == 0 and lines.keys() == paths().keys()
    for name, added in (("mudd", "2,405,445"), ("svformer", "-24,117,248"), ("s_lr", "3,072")):
        assert lines[name][0] == paths()[name].start and added in lines[name]


def test_the_costs_of_the_grid_are_the_papers(said) -> None:
    code, shown, _ = said("cost", "grid=table1")
    table = [line.split() for line in shown.splitlines()[1:]]
    paper = list(csv.DictReader((ROOT / "tests" / "residual" / "table1.csv").open()))
    assert code == 0 and [line[0] for line in table] == [row["row"] for row in paper]
    for row, line in zip(paper, table, strict=True):
        assert f"{row['added_flops_percent']}%" in line
