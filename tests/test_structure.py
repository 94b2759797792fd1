"""The laws of the package: imports go down only, and some words have one place."""

import ast
import re

import pytest

from lrattnres.commands import COMMANDS
from lrattnres.residual.base import paths
from tests.paths import ROOT

PACKAGE = ROOT / "lrattnres"
# Each floor may import those before it, and itself. A module of a room may stand on a floor of its own.
ORDER = [
    ("config", "kernels", "distributed"),
    ("residual",),
    ("model",),
    ("data", "optim"),
    ("config.checks",),
    ("distributed.parallel", "model.loss", "runs"),
    ("exchange",),
    ("evaluation",),
    ("training", "generation"),
    ("report",),
    ("entry",),
    ("commands",),
    ("__main__",),
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = [*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("bench/*.py")]


def imports(path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def floor(module: str) -> str:
    """The name in ORDER that a module, without `lrattnres.`, belongs to."""
    parts = module.split(".")
    return next(name for n in (2, 1) if (name := ".".join(parts[:n])) in LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path) -> None:
    if path.name == "__init__.py" and path.parent == PACKAGE:
        # The operator for other people's models, and `load` for people's own.
        own = {name for name in imports(path) if name.startswith("lrattnres")}
        assert own == {
            "lrattnres.kernels.backends",
            "lrattnres.exchange.folder",
            "lrattnres.model.transformer",
        }
        return
    here = floor(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    for name in imports(path):
        if name.startswith("lrattnres."):
            there = floor(name.removeprefix("lrattnres."))
            assert there == here or LEVEL[there] < LEVEL[here], f"{here} imports {name}"


def test_only_commands_import_hydra_and_only_kernels_import_triton() -> None:
    for path in [*FILES, *SCRIPTS]:
        roots = {name.split(".")[0] for name in imports(path)}
        assert "hydra" not in roots or path.parent.name == "commands", path
        assert "triton" not in roots or "kernels" in path.parts, path


def test_the_name_of_a_path_stands_in_its_own_file_only() -> None:
    names = re.compile(rf"""["']({"|".join(paths())})["']""")
    homes = {path.__module__.rpartition(".")[2] + ".py" for path in paths().values()}
    for path in FILES:
        if path.parent != PACKAGE / "residual" or path.name not in homes:
            assert not names.search(path.read_text()), path


def test_each_command_is_a_module_and_each_script_a_command() -> None:
    modules = {path.stem for path in (PACKAGE / "commands").glob("*.py")}
    assert set(COMMANDS) == modules - {"__init__", "composing", "running", "words"}
    called = {
        path: re.findall(r'^    main\("(\w+)"\)$', path.read_text(), re.MULTILINE)
        for path in [ROOT / "train.py", ROOT / "eval.py", *ROOT.glob("scripts/*.py")]
    }
    assert sorted(name for names in called.values() for name in names) == sorted(COMMANDS)
    # Thin: nothing but the call, so that the wheel has all there is.
    assert all(imports(path) <= {"sys", "pathlib", "lrattnres.commands"} for path in called)
