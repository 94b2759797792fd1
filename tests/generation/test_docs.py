"""The commands of docs/generation.md are possible."""

import re
import shlex

import pytest

from lrattnres.checks import resolve_generate, resolve_inspect
from lrattnres.entry import settings
from lrattnres.use_config import GenerateConfig, InspectConfig
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "generation.md").read_text()
COMMANDS = re.findall(r"python scripts/(generate|inspect)\.py (.*)", PAGE)
SCHEMAS = {"generate": (GenerateConfig, resolve_generate), "inspect": (InspectConfig, resolve_inspect)}


@pytest.mark.parametrize(("script", "words"), COMMANDS)
def test_every_command_is_possible(script: str, words: str) -> None:
    schema, resolve = SCHEMAS[script]
    resolve(settings(schema, shlex.split(words.split(" < ")[0])))
