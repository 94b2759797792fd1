"""The commands and settings that the documentation shows are those of the code."""

import re
import shlex

import pytest
from omegaconf import OmegaConf

from lrattnres.config import ConfigError, EvalConfig, parse
from lrattnres.config.checks import checked, resolve
from lrattnres.config.commands import ConvertConfig, ExportConfig, GenerateConfig, InspectConfig
from lrattnres.entry import settings
from scripts.config_reference import reference
from tests.config.test_config import composed
from tests.paths import ROOT

README = (ROOT / "README.md").read_text()
PAGES = README + "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
SCHEMAS = {
    "generate": GenerateConfig,
    "inspect": InspectConfig,
    "export": ExportConfig,
    "convert": ConvertConfig,
}
RESOLVED = {"generate": checked, "inspect": checked}
COMMANDS = [
    line.split(" #")[0].strip() for line in README.splitlines() if line.startswith("python ")
]


@pytest.mark.parametrize("command", [command for command in COMMANDS if "train.py" in command])
def test_every_training_command_is_possible(command: str) -> None:
    words = [
        word.replace("glob(*)", "01_baseline") for word in shlex.split(command)[2:] if word != "-m"
    ]
    sweeps = [word for word in words if "," in word]
    for choice in sweeps[0].split("=")[1].split(",") if sweeps else [None]:
        chosen = [
            word if word not in sweeps else f"{word.split('=')[0]}={choice}" for word in words
        ]
        resolve(composed("name=x", "device=cpu", "compile=off", *chosen))


@pytest.mark.parametrize("command", re.findall(r"^python eval\.py (.+)", PAGES, re.MULTILINE))
def test_every_evaluation_command_is_possible(command: str) -> None:
    parse(
        EvalConfig,
        OmegaConf.to_container(OmegaConf.from_dotlist(shlex.split(command, comments=True))),
    )


@pytest.mark.parametrize(
    ("script", "words"), re.findall(rf"python scripts/({'|'.join(SCHEMAS)})\.py ([^`\n]+)", PAGES)
)
def test_every_command_for_a_trained_model_is_possible(script: str, words: str) -> None:
    words = re.sub(r"^from=", "source=", words.split(" < ")[0])
    config = settings(SCHEMAS[script], shlex.split(words, comments=True))
    RESOLVED.get(script, lambda config: config)(config)


@pytest.mark.parametrize("command", [command for command in COMMANDS if "scripts/" in command])
def test_scripts_exist(command: str) -> None:
    assert (ROOT / command.split()[1]).is_file()


def test_the_refusal_shown_is_the_refusal_given() -> None:
    shown = re.search(r"^\$ python train\.py (.*)\n((?:.*\n)*?)```", README, re.MULTILINE)
    with pytest.raises(ConfigError) as refusal:
        resolve(composed("name=x", *shlex.split(shown[1])))
    assert shown[2].strip() == f"the configuration is not possible:\n{refusal.value}"


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", README, re.MULTILINE)) <= targets


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_reference_of_settings_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference(), "run `make docs`"
