"""The installed package without the clone: what the wheel holds, and the README's tour by it."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from lrattnres.commands import COMMANDS
from tests.paths import CONFIGS, ROOT
from tests.test_cli import ENVIRONMENT

PARTS = ("pyproject.toml", "README.md", "LICENSE", "lrattnres", "configs")
OUTSIDE = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
SMALL = (
    *("model.layers=2", "model.dim=16", "model.heads=2", "model.mlp_width=24", "model.context=32"),
    *("model.rank=4", "model.blocks=2", "global_batch=8", "micro_batch=4", "optimizer.warmup=1"),
    *("steps=3", "evaluation.tokens=300", "evaluation.diagnostics_tokens=300", "threads=1"),
)


def call(*words: object, code: int = 0, **options) -> str:
    options = {"env": OUTSIDE, "timeout": 200} | options
    ended = subprocess.run(list(map(str, words)), capture_output=True, text=True, **options)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the clone."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / part, source)
    here = importlib.util.find_spec("setuptools") is not None
    words = ["--no-deps", *["--no-build-isolation"] * here, "--wheel-dir", out, source]
    call(sys.executable, "-m", "pip", "wheel", *words)
    (built,) = out.glob("lrattnres-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory) -> Path:
    """The programs of a new environment; what the package needs, it finds where these tests do."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    words = ["install", "--quiet", "--no-deps", "--no-index", wheel]
    call(sys.executable, "-m", "pip", "--python", python, *words)
    (packages,) = folder.glob("lib/python*/site-packages")
    # After the installation, so that pip sees an empty environment.
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def tree(folder: Path, suffixes: tuple[str, ...]) -> set[str]:
    return {
        f"lrattnres/{prefix}{path.relative_to(folder)}"
        for prefix in ["configs/" if folder == CONFIGS else ""]
        for path in folder.rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_and_the_configurations(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "lrattnres = lrattnres.commands:main" in archive.read(points).decode()
        for path in CONFIGS.rglob("*.yaml"):
            packed = archive.read(f"lrattnres/configs/{path.relative_to(CONFIGS)}")
            assert packed == path.read_bytes()
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == tree(ROOT / "lrattnres", (".py", ".csv")) | tree(CONFIGS, (".yaml",))
    assert not (ROOT / "lrattnres" / "configs").exists()  # once in the repository


def test_the_command_lists_all_commands_at_once(installed: Path, tmp_path: Path) -> None:
    shown = call(installed / "lrattnres", "--help", cwd=tmp_path, timeout=20)
    assert re.findall(r"^  (\w+) +[A-Z]", shown, re.MULTILINE) == list(COMMANDS)
    assert "torch" not in call(
        installed / "python", "-X", "importtime", "-m", "lrattnres", cwd=tmp_path
    )
    refused = call(installed / "lrattnres", "trian", code=2, cwd=tmp_path)
    assert "trian: no such command; write one of train, eval" in refused


def tour() -> list[list[str]]:
    """The block of the README about the package without a clone."""
    (block,) = re.findall(
        r"\*\*Without a clone\.\*\*.*?```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    return [shlex.split(line, comments=True) for line in block.splitlines()]


@pytest.mark.slow
def test_the_tour_of_the_readme_without_a_clone(installed: Path, texts: Path, tmp_path) -> None:
    """Line by line; only the size and the texts of the training are others."""
    place = [f"data.cache={tmp_path}/cache", f"data.root={texts}", "data=files"]
    environment = OUTSIDE | {"PATH": f"{installed}{os.pathsep}{OUTSIDE['PATH']}"}
    said = []
    for program, command, *words in tour():
        assert program == "lrattnres"
        if command == "train":
            words += [*SMALL, *place, "name=demo-s_lr-N4-r16"]
        said.append(call(program, command, *words, cwd=tmp_path, env=environment))
    assert "finished at step 3" in said[0] and "held-out loss" in said[1]
    assert (tmp_path / "runs" / "demo-s_lr-N4-r16" / "plots" / "depth.png").is_file()


MANY = """
import sys
from lrattnres.commands import main

def said(*words):
    sys.argv = ["lrattnres", *words]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (words, ended.code)

small = sys.argv[2:]
own = f"--config-dir={sys.argv[1]}"
said("train", "-m", "experiment=demo", "model.residual=baseline,s_lr", *small)
said("train", own, "experiment=mine", *small, "name=mine")
said("train", "--cfg", "job", "experiment=proxy", "+table1=19_block8_s_lr_r64")
for command in ("train", "eval", "tokenize", "cost", "estimate", "table1", "submission"):
    said(command, "-h")
said("cost", own, "experiment=mine", "grid=table1", "model.layers=12")
said("estimate", own, "experiment=mine", "gpus=2", "gpu=H200")
said("report", "runs", "out=report")
said("sweep_status")
"""


@pytest.mark.slow
def test_sweeps_rows_help_and_own_configurations(installed: Path, texts: Path, tmp_path) -> None:
    """One process for all of them, outside the clone."""
    own = tmp_path / "own"
    (own / "experiment").mkdir(parents=True)
    (own / "experiment" / "mine.yaml").write_text(
        (CONFIGS / "experiment" / "demo.yaml").read_text()
    )
    place = [f"data.cache={tmp_path}/cache", f"data.root={texts}", "data=files"]
    shown = call(installed / "python", "-c", MANY, own, *SMALL, *place, cwd=tmp_path)
    assert shown.count("finished at step 3") == 3 and "rank: ${of_width:64}" in shown
    assert (tmp_path / "runs" / "mine" / "config.yaml").is_file()
    assert (tmp_path / "report" / "report.html").is_file()
    assert "2 finished" in shown and "2 x H200" in shown
    assert len(re.findall(r"^\d\d  ", shown, re.MULTILINE)) == 20


@pytest.mark.slow
def test_jobs_of_a_cluster_are_printed(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    words = ["submission", "model.residual=baseline,s_lr", "seed=0,1"]
    shown = call(installed / "lrattnres", *words, cwd=tmp_path)
    assert "3: lrattnres train model.residual=s_lr seed=1 cluster=slurm" in shown
    assert "#SBATCH --array=0-3%4" in shown and "4 jobs, none of them submitted" in shown


def test_every_package_is_listed() -> None:
    """pyproject.toml lists the packages, since configs/ lies outside of lrattnres/."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    here = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in (ROOT / "lrattnres").rglob("__init__.py")
    }
    assert set(project["tool"]["setuptools"]["packages"]) == here | {"lrattnres.configs"}
