"""The commands, settings and figures that the documentation shows are those of the code."""

import csv
import re
import shlex
import statistics
from math import sqrt

import pytest
from omegaconf import OmegaConf

from lrattnres.commands import COMMANDS
from lrattnres.commands.composing import composed
from lrattnres.commands.config_reference import BESIDE_TRAINING, OWN, reference
from lrattnres.config import ConfigError, EvalConfig, fields_of, parse
from lrattnres.config.checks import checked
from lrattnres.entry import settings
from tests.paths import ROOT

README = (ROOT / "README.md").read_text()
PAGES = README + "".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
SCRIPTS = {
    script.stem: re.search(r'main\("(\w+)"\)', script.read_text())[1]
    for script in [ROOT / "train.py", ROOT / "eval.py", *ROOT.glob("scripts/*.py")]
}
RESOLVED = {"generate": checked, "inspect": checked}
SHOWN = re.compile(
    r"(?:^|`|\| )(?:python (?:scripts/)?(\w+)\.py|lrattnres ([a-z]\w*))((?: [^`\n]+)?)(?=[`\n])",
    re.MULTILINE,
)


def commands() -> list[tuple[str, str]]:
    """(command, words) of every line and every quoted command of all pages, each once."""
    found = {}
    for script, name, words in SHOWN.findall(PAGES):
        if "…" not in words:
            found[SCRIPTS[script] if script else name, words.split(" < ")[0]] = None
    return list(found)


ALL = commands()


def words_of(name: str) -> list[str]:
    return [words for command, words in ALL if command == name]


def test_every_command_shown_exists() -> None:
    assert len(ALL) > 40 and {name for name, _ in ALL} <= set(COMMANDS)


@pytest.mark.parametrize(
    ("name", "line"), [(n, w) for n, w in ALL if n in ("train", *BESIDE_TRAINING, "submission")]
)
def test_every_command_about_training_is_possible(name: str, line: str, monkeypatch) -> None:
    keys = fields_of(BESIDE_TRAINING[name]) if name in BESIDE_TRAINING else {}
    words = [
        word for word in shlex.split(line, comments=True) if word not in ("-m", "--cfg", "job")
    ]
    own = [word for word in words if word.partition("=")[0] in keys]
    first = {"table1": "01_baseline", "path": "baseline"}  # of a sweep over a whole group
    words = [
        word.replace("glob(*)", first.get(word.partition("=")[0].lstrip("+"), ""))
        for word in words
        if word not in own
    ]
    if own:
        settings(BESIDE_TRAINING[name], own)
    if name in ("estimate", "submission"):
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv("SLURM_JOB_ID", "1")
    words = [word for word in words if not word.startswith("hydra.")]
    given = {word.partition("=")[0] for word in words}
    if {"initial", "--config-dir"} & given or words[:1] == ["--help"]:
        return  # need folders that are not there
    each = [word.replace("cluster=slurm", "cluster=local").split(",")[0] for word in words]
    composed(each, name="x", device="cpu", compile="off")


@pytest.mark.parametrize("line", words_of("eval"))
def test_every_evaluation_command_is_possible(line: str) -> None:
    if not line:
        return  # only the name of the command
    words = [re.sub(r"^(\S+?=)\[?(.*?)\]?$", r"\1\2", w) for w in shlex.split(line, comments=True)]
    words = [re.sub("^downstream=(.*)", r"downstream=[\1]", word) for word in words]
    parse(EvalConfig, OmegaConf.to_container(OmegaConf.from_dotlist(words)))


@pytest.mark.parametrize(("name", "line"), [(n, w) for n, w in ALL if n in OWN])
def test_every_command_for_what_was_trained_is_possible(name: str, line: str) -> None:
    words = [re.sub("^from=", "source=", word) for word in shlex.split(line, comments=True)]
    if name in ("report", "sweep_status", "config_reference"):
        words = [word for word in words if "=" in word]
    if words:
        config = settings(OWN[name], words)
        RESOLVED.get(name, lambda config: config)(config)


def test_the_refusal_shown_is_the_refusal_given() -> None:
    shown = re.search(r"^\$ python train\.py (.*)\n((?:.*\n)*?)```", README, re.MULTILINE)
    with pytest.raises(ConfigError) as refusal:
        composed(shlex.split(shown[1]), name="x")
    assert shown[2].strip() == f"the configuration is not possible:\n{refusal.value}"


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = README + (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", pages, re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_files_that_are_named_are_there(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:lrattnres|scripts|bench|docs|tests|configs)/[\w./]*)`", text)
    assert all((ROOT / name).exists() for name in named), named


def test_the_reference_of_settings_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference(), "run `make docs`"


def test_the_page_of_results_says_what_its_tables_say() -> None:
    """Losses, spreads and intervals from the committed runs; nothing is claimed beyond them."""
    page = " ".join((ROOT / "docs" / "results" / "README.md").read_text().split())
    with (ROOT / "docs" / "results" / "tables" / "runs.csv").open() as file:
        runs = {
            (row["shown as"], row["seed"]): float(row["held-out loss"])
            for row in csv.DictReader(file)
        }
    seeds = ("0", "1", "2")
    many = {name: [runs[name, seed] for seed in seeds] for name, seed in runs if seed == "2"}
    base = many["01 baseline"]
    for name, losses in many.items():
        if name != "01 baseline":
            apart = [loss - other for loss, other in zip(losses, base, strict=True)]
            spread = 4.303 * statistics.stdev(apart) / sqrt(3)  # Student's t for two degrees
            assert f"{statistics.mean(apart):+.3f} ± {spread:.3f}".replace("-", "−") in page, name
    pooled = sqrt(statistics.mean(statistics.variance(losses) for losses in many.values()))
    single, against_mean = (2.447 * pooled * sqrt(1 + 1 / n) for n in (1, 3))  # six degrees
    assert (
        f"{pooled:.4f}" in page
        and f"**{single:.3f}**" in page
        and f"**{against_mean:.3f}**" in page
    )
    routed = {name: loss for (name, seed), loss in runs.items() if seed == "0"} | {
        name: statistics.mean(losses) for name, losses in many.items()
    }
    mean = routed.pop("01 baseline")
    below = sum(loss < min(base) for loss in routed.values())
    assert f"{below} of the {len(routed)} rows" in page
    alone = [loss for name, loss in routed.items() if name not in many]
    sure = sum(loss < mean - against_mean for loss in alone)
    assert f"{sure} of the {len(alone)} rows with one seed" in page
    wide = [loss for name, loss in routed.items() if "attn_res" in name]
    low = [loss for name, loss in routed.items() if "_lr N=" in name]
    apart = statistics.mean(low) - statistics.mean(wide)
    interval = 2.447 * pooled * sqrt(1 / len(wide) + 1 / len(low))
    assert f"{apart:.3f} ± {interval:.3f} on average" in page
    numbers = {f"{loss:.4f}" for loss in [*routed.values(), *runs.values(), mean]}
    assert set(re.findall(r"\b1\.7\d\d\d\b", page)) <= numbers
