"""What the pages of docs/ say of files, names, rooms and residual paths is so."""

import ast
import re
from math import floor

import pytest
from omegaconf import OmegaConf

from lrattnres.config import ModelConfig, parse
from lrattnres.residual.base import path_of, paths
from lrattnres.residual.cost import cost
from lrattnres.residual.plan import plan_of
from tests.paths import CONFIGS, ROOT
from tests.test_structure import FILES, ORDER, PACKAGE

# docs/config.md is written by a program, and tests/test_readme.py holds it.
PAGES = [ROOT / "README.md", *sorted({*ROOT.glob("docs/*.md")} - {ROOT / "docs" / "config.md"})]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
THEIRS = "my_paths/"  # folders that a page tells the reader to make
SOURCES = {file: file.read_text() for file in FILES}


@each_page
def test_files_that_are_named_are_there(page) -> None:
    text = page.read_text()
    whole = re.findall(
        r"(?<![\w/.=-])(?:lrattnres|scripts|bench|docs|tests|configs)/[\w./*-]*[\w/]", text
    )
    # NAME stands for a name that the reader chooses.
    missing = [
        name for name in whole if "NAME" not in name and not any(ROOT.glob(name.rstrip("/")))
    ]
    known = {file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py")}
    for name in re.findall(r"(?<![\w/.-])[\w/]+\.py\b", text):
        if not name.startswith(THEIRS) and not any(
            f"/{file}".endswith(f"/{name}") for file in known
        ):
            missing.append(name)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        if not (page.parent / target).exists():
            missing.append(target)
    assert not missing


@each_page
def test_classes_that_are_named_are_there(page) -> None:
    names = set(re.findall(r"`([A-Z][a-z]+[A-Z][A-Za-z]*)(?:\.\w+)*(?:\(\))?`", page.read_text()))
    words = set(re.findall(r"\w+", "\n".join(SOURCES.values())))
    assert names <= words | {"RMSNorm"}


def defined() -> set[str]:
    """`function`, `Class` and `Class.method` of the whole package."""
    found = set()
    for source in SOURCES.values():
        for node in ast.parse(source).body:
            found.add(getattr(node, "name", ""))
            if isinstance(node, ast.ClassDef):
                parts = [getattr(part, "name", "") for part in node.body]
                found |= {f"{node.name}.{part}" for part in parts}
    return found


def test_functions_of_the_architecture_are_those_that_run() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = set(re.findall(r"`(\w+(?:\.\w+)?)\(\)`", text))
    assert len(names) > 30 and names <= defined(), names - defined()


def test_rooms_of_the_architecture_are_those_of_the_package() -> None:
    """Floors, and their order, are what tests/test_structure.py holds."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    told: dict[int, set[str]] = {}
    for number, room in re.findall(r"^\| (\d+) \| `([\w.]+)` \|", text, re.MULTILINE):
        told.setdefault(int(number), set()).add(room)
    assert told == {number: set(rooms) for number, rooms in enumerate(ORDER, start=1)}
    rooms = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in FILES}
    assert rooms - {"__init__"} <= set().union(*told.values())


# --- the table of residual paths ----------------------------------------------------------------

TABLE = (ROOT / "docs" / "paths.md").read_text()
ROWS = {
    cells[0].strip("`"): cells
    for line in TABLE.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split(" | ")]) == 8
    and cells[0].startswith("`")
}
FIGURES = re.findall(r"^\| `(model\.residual=[^`]*)` \| (.*) \|$", TABLE, re.MULTILINE)


def denseformer_averages(config: ModelConfig) -> dict[str, int]:
    k, p = (config.path.get(name, 1) for name in ("dilation", "period"))
    blocks = [b for b in range(1, config.layers + 1) if b % p == 0]
    return {"A": sum(floor(b / k) + 1 for b in blocks)}


# Signs of one path alone, computed here from the settings. Options are known by their names.
def laurel_parts(config: ModelConfig) -> dict[str, int]:
    parts = config.path.get("parts", "rw+lr").split("+")
    back = config.path.get("back", 3) if "pa" in parts else 0
    rank = (config.rank or 32) if {"lr", "pa"} & set(parts) else 0
    past = sum(min(back, site) for site in range(1, 2 * config.layers + 1))
    return {"rw": "rw" in parts, "R": rank, "B": back, "P": past}


def mudd_weights(config: ModelConfig) -> dict[str, int]:
    weights = maps = 0
    for b in range(1, config.layers + 1):
        ways = config.path.get("ways", 4) if b < config.layers else 1
        rows = ways * (b + 1) * (4 if b == config.layers else 1)
        weights += ways * (b + 1)
        maps += 64 * (rows // 64 + 1) * (config.dim + ways * (b + 1))
    return {"A": weights, "V": maps}


def dca_sources(config: ModelConfig) -> dict[str, int]:
    version, last = config.path.get("version", 3), config.path.get("last") or config.layers
    ways = [config.path.get("ways", 3)] * config.layers + [1]
    sources = [min(b, last + 2) for b in range(1, config.layers + 2)]
    pairs = sum(w * s for w, s in zip(ways, sources, strict=True))
    dynamic = version == 3
    channels = 1 if version == 1 else config.dim
    return {"P": pairs, "Q": sum(ways), "s": max(sources[:-1]), "c": channels, "D": dynamic}


def lambdas_scalars(config: ModelConfig) -> dict[str, int]:
    unet, backout = (config.path.get(name, False) for name in ("unet", "backout"))
    half, waiting, most = config.layers // 2, 0, 0
    for block in range(config.layers):
        waiting -= unet and block >= config.layers - half
        most = max(most, waiting + (backout and block > half))
        waiting += unet and block < half
    return {"W": 2 * config.layers + unet * half + backout, "Y": most}


SIGNS = {
    "denseformer": denseformer_averages,
    "laurel": laurel_parts,
    "mhc": lambda config: {
        "N": (n := config.path.get("n", 4)) ** 2 + 2 * n,
        "H": config.path.get("head", "learned") == "learned",
    },
    "postnorm": lambda config: {"G": config.path.get("branch", 1) != 1},
    "highway": lambda config: {
        "W": config.dim if config.path.get("gate") == "vector" else 1,
    },
    "mudd": mudd_weights,
    "dca": dca_sources,
    "lambdas": lambdas_scalars,
    "resformer": lambda config: {"X": config.layers - 1, "w": config.dim},
    "svformer": lambda config: {"w": config.dim},
    "lime": lambda config: {"R": config.heads, "e": config.dim // config.heads},
}


def paper(settings: str) -> ModelConfig:
    """The paper's model with `key=value` words; a rank and depth blocks only if they are among them."""
    tree = OmegaConf.merge(
        {"model": OmegaConf.load(CONFIGS / "model" / "paper.yaml")},
        {"model": {"rank": None, "blocks": None, "path": {}}},
        OmegaConf.from_dotlist(settings.split()),
    )
    config = parse(ModelConfig, OmegaConf.to_container(tree)["model"])
    assert not list(path_of(config).errors(config)), settings
    return config


def computed(formula: str, config: ModelConfig) -> int:
    """What a formula of the table comes to."""
    plan = plan_of(config)
    signs = {"L": config.layers, "M": 2 * config.layers, "d": config.dim, "m": config.mlp_width}
    signs |= {"r": config.rank, "S": plan.reads, "K": plan.retained}
    signs |= {"max": max} | vars(path_of(config).options_of(config))
    signs |= SIGNS.get(config.residual, lambda config: {})(config)
    return eval(formula.replace("·", "*").replace("²", "**2"), {}, signs)


def test_every_path_has_a_row_and_figures() -> None:
    assert ROWS.keys() == paths().keys(), "docs/paths.md: first table"
    named = {re.match(r"model\.residual=(\w+)", settings)[1] for settings, _ in FIGURES}
    assert named == paths().keys(), "docs/paths.md: table of figures"
    for name, cells in ROWS.items():
        assert cells[6] == paths()[name].start, name


@pytest.mark.parametrize(("settings", "figures"), FIGURES, ids=[row[0] for row in FIGURES])
def test_formulas_and_figures_of_a_path(settings: str, figures: str) -> None:
    config = paper(settings)
    price, row = cost(config), ROWS[config.residual]
    counted = (price.added.parameters, price.added_compute, price.added.carried)
    for formula, count in zip(row[3:6], counted, strict=True):
        assert computed(formula, config) == count, formula
    parameters, compute, carried = (f"{count:,}" for count in counted)
    right = f"{parameters} | {compute} | {100 * price.added_compute / price.core:.4f} | {carried}"
    assert figures == right and price.core == 308_281_344
