"""The laws of the house: imports go down only, and some words have one place."""

import ast
import re

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "lrattnres"
# Each room may import those before it, and itself.
ORDER = [
    ("schema",),
    ("model_config",),
    ("config", "kernels", "ranks", "bounds"),
    ("use_config",),
    ("depth",),
    ("model",),
    ("data", "optim"),
    ("checks", "runs"),
    ("exchange",),
    ("evaluation",),
    ("training", "generation"),
    ("report",),
    ("entry",),
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def room(path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path) -> None:
    if path.name == "__init__.py" and path.parent == PACKAGE:
        # The operator for other people's models, and `load` for people's own.
        own = {name for name in imports(path) if name.startswith("lrattnres")}
        assert own == {"lrattnres.kernels.backends", "lrattnres.exchange.folder", "lrattnres.model.transformer"}
        return
    here = room(path)
    for name in imports(path):
        if name.startswith("lrattnres."):
            there = name.split(".")[1]
            assert there == here or LEVEL[there] < LEVEL[here], f"{here} imports {name}"


def test_only_the_entry_scripts_import_hydra_and_only_kernels_import_triton() -> None:
    for path in [*FILES, *ROOT.glob("*.py"), *ROOT.glob("scripts/*.py")]:
        roots = {name.split(".")[0] for name in imports(path)}
        assert "hydra" not in roots or path.parent in (ROOT, ROOT / "scripts"), path
        assert "triton" not in roots or "kernels" in path.parts, path


def test_variant_names_appear_only_in_their_table() -> None:
    names = re.compile(r"""["'](baseline|attn_res|p_lr|s_lr|delta)["']""")
    assert [path.name for path in FILES if names.search(path.read_text())] == ["router.py"]


def test_files_and_functions_stay_short() -> None:
    for path in [*FILES, *ROOT.glob("*.py"), *ROOT.glob("scripts/*.py")]:
        text = path.read_text()
        assert text.count("\n") <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"
    assert (PACKAGE / "depth" / "router.py").read_text().count("\n") < 200
