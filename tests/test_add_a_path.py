"""docs/add_a_path.md is true: its blocks are run, and a path outside the package needs no other edit."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from types import ModuleType

import pytest
import torch

from lrattnres.config import ConfigError, parse_options
from lrattnres.residual.base import paths
from tests.paths import ROOT
from tests.programs import ENVIRONMENT, run
from tests.test_cli import assert_equal_runs, tensors

PAGE = (ROOT / "docs" / "add_a_path.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SHIPPED = ROOT / "lrattnres" / "residual" / "denseformer.py"


def statements(source: str) -> dict[str, str]:
    """Every statement of a module, and of the bodies of its classes, in any order."""
    found = {}
    for node in ast.parse(source).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        for part in inside:
            text = ast.unparse(part)
            found[f"{getattr(node, 'name', '')}: {text}"] = text
    return found


def test_every_step_of_the_page_runs(monkeypatch) -> None:
    module = ModuleType("denseformer_so_far")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for names
    file, checks = "", 0
    for kind, title, code in BLOCKS:
        if title in ("denseformer.py", "DenseFormer"):  # statements of the file, or of the class
            file += "\n" + (code if title == "denseformer.py" else indent(code, "    "))
            exec(compile(file, "denseformer.py", "exec"), vars(module))
        elif (kind, title) == ("python", ""):
            exec(compile(code, f"docs/add_a_path.md, check {checks}", "exec"), vars(module))
            checks += 1
    assert checks == 7
    assert statements(file) == statements(SHIPPED.read_text())


def test_files_that_the_page_quotes_are_those_files() -> None:
    quoted = {title: code for _, title, code in BLOCKS if title and (ROOT / title).exists()}
    assert quoted.keys() == {
        "configs/path/denseformer.yaml",
        "tests/residual/test_path_vectors.py",
    }
    for title, code in quoted.items():
        assert code in (ROOT / title).read_text(), title


FILE = """
from __future__ import annotations
from dataclasses import dataclass
from enum import Enum
from lrattnres.config import option
from lrattnres.residual.base import ResidualPath
Kind = Enum("Kind", {"one": "one", "two": "two"})
class Mine(ResidualPath):
    residual = "NAME"
    @dataclass(frozen=True)
    class Options:
        kind: Kind = option("either", Kind.one)
"""


def test_files_outside_are_modules_like_others(tmp_path: Path, monkeypatch) -> None:
    """Two folders may have files of one name; types of options are found; one name has one class."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        (folder / "mine.py").write_text(FILE.replace("NAME", f"mine_{folder.name}"))
    (folders[0] / "_aside.py").write_text("raise AssertionError")
    monkeypatch.setenv("LRATTNRES_PATHS", os.pathsep.join(map(str, folders)))
    before = paths()
    paths.cache_clear()
    try:
        found = paths()
        assert found.keys() == before.keys() | {"mine_a", "mine_b"}
        for name in ("mine_a", "mine_b"):
            options = parse_options(found[name].Options, {"kind": "two"}, "model.path")
            assert options.kind.name == "two"
            assert importlib.import_module(found[name].__module__).Mine is found[name]

        (folders[1] / "mine.py").write_text(FILE.replace("NAME", "baseline"))
        paths.cache_clear()
        with pytest.raises(
            ConfigError, match=r"model\.residual=baseline: .*stream\.py and .*b/mine\.py"
        ):
            paths()
        monkeypatch.setenv("LRATTNRES_PATHS", str(tmp_path / "c"))
        with pytest.raises(ConfigError, match=r"LRATTNRES_PATHS=.*: no such folder; write"):
            paths()
    finally:
        paths.cache_clear()


# Runs commands one after the other in one process, as each would run in its own: [script, words…],
# or ["signal", N, script, words…], which gets SIGTERM when metrics.jsonl has N lines.
DRIVER = """
import json, os, runpy, signal, sys, threading, time
from pathlib import Path

root, commands = Path(sys.argv[1]), json.loads(sys.argv[2])

def terminate(lines):
    file = Path("runs/cut/metrics.jsonl")
    while not file.exists() or file.read_bytes().count(b"\\n") < lines:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)

for command in commands:
    if command[0] == "signal":
        threading.Thread(target=terminate, args=[int(command[1])], daemon=True).start()
        command = command[2:]
    script, *words = command
    sys.argv = [script, *words]
    sys.path.insert(0, str((root / script).parent))  # as Python does for a script
    try:
        runpy.run_path(str(root / script), run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    print(f"[code {code}]", flush=True)
    del sys.path[0]

import torch, lrattnres
model = lrattnres.load("exported")
print(json.dumps([type(model.router).__name__, model.router.share.tolist()]))
"""


def test_a_path_in_a_folder_of_its_own_needs_no_other_edit(texts: Path, tmp_path: Path) -> None:
    """All commands know it, and what it says of itself is what is found."""
    for _, title, code in BLOCKS:
        if title.startswith("my_paths/"):
            (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / title).write_text(code)
    size = ["layers=2", "dim=16", "heads=2", "mlp_width=24", "context=32"]
    model = [f"model.{setting}" for setting in size]
    settings = [
        *("--config-dir=my_paths/configs", "path=again", "experiment=demo", "threads=1"),
        *model,
        *("steps=30", "global_batch=8", "micro_batch=4", "optimizer.warmup=4"),
        *("checkpoint.every=5", "evaluation.every=10", "evaluation.tokens=500"),
        *("instruments.depth=10", "data=files", f"data.root={texts}", "data.cache=cache"),
    ]
    commands = [
        ["train.py", *settings, "name=straight"],
        ["signal", "7", "train.py", *settings, "name=cut"],
        ["train.py", *settings, "name=cut"],
        ["eval.py", "run=runs/cut", "diagnostics=true", "diagnostics_tokens=500"],
        ["scripts/generate.py", "run=runs/cut", "prompt=the router", "tokens=5", "temperature=0"],
        ["scripts/export.py", "run=runs/cut", "out=exported"],
        ["eval.py", "run=exported"],
        ["scripts/generate.py", "run=exported", "prompt=the router", "tokens=5", "temperature=0"],
        ["scripts/report.py", "runs", "out=report"],
        ["scripts/cost.py", "experiment=demo", "model.residual=again", *model],
    ]
    process = run(
        *("-c", DRIVER, ROOT, json.dumps(commands)),
        cwd=tmp_path,
        env=ENVIRONMENT | {"LRATTNRES_PATHS": "my_paths", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    told = process.stdout
    *outputs, last = re.split(r"^\[code (?:\d+)\]\n", told, flags=re.MULTILINE)
    codes = [int(code) for code in re.findall(r"^\[code (\d+)\]$", told, re.MULTILINE)]
    assert process.returncode == 0 and codes == [0, 75, *[0] * 8], told
    straight, cut, resumed, measured, text, _, exported, same_text, told_by_report, price = outputs

    runs = tmp_path / "runs"
    assert "SIGTERM: saved at step" in cut and "continuing from step" in resumed
    assert_equal_runs(runs / "straight", runs / "cut", step=30)
    share = tensors(runs / "cut", 30)["model.router.share"]
    assert share.shape == (5,) and share.abs().min() > 1e-3  # each site has learned something
    core = 2 * (4 * 16 * 16 + 3 * 16 * 24)
    assert f"again: {100 * 5 * 16 / core:.4f}% more compute" in straight

    found = json.loads((runs / "cut/evaluation/step_000030.diagnostics.json").read_text())
    for site, row in enumerate(found["coefficients"]):
        torch.testing.assert_close(
            torch.tensor(row), torch.tensor([1 + share[site], *[1.0] * site])
        )
    assert (runs / "cut/plots/loss.png").exists() and (runs / "cut/plots/sites.png").exists()

    loss = re.search(r"held-out loss (\d\.\d{6})", measured)[1]
    assert f"held-out loss {loss}" in exported
    assert text.splitlines()[-1] == same_text.splitlines()[-1]
    assert json.loads(last) == ["Again", share.tolist()]

    page = (tmp_path / "report" / "report.md").read_text()
    assert "report.md" in told_by_report and re.search(
        r"^\| again \|.*\| 30 \|", page, re.MULTILINE
    )
    assert "5 of the residual path" in price and f"{5 * 16}" in price
