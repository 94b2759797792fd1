"""Words that Hydra cannot use are refused like all other settings: a line each, and exit code 2."""

import os
import sys

import pytest

from lrattnres.commands import main
from lrattnres.commands.composing import CONFIGS, composed
from lrattnres.commands.words import choices_of
from lrattnres.config import ConfigError

HEADING = "the configuration is not possible:\n"
EXPERIMENTS = "must be one of demo, finetune, paper, proxy"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path):
    """A function that runs a command, which must refuse, and returns the lines that it says."""
    monkeypatch.setitem(os.environ, "HYDRA_FULL_ERROR", "0")
    monkeypatch.chdir(tmp_path)

    def run(name: str, *words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(SystemExit) as end:
            main(name)
        output, errors = capsys.readouterr()
        assert end.value.code == 2, errors
        assert output == "" and errors.startswith(HEADING)
        assert list(tmp_path.iterdir()) == []
        lines = errors.removeprefix(HEADING).splitlines()
        assert lines and all(line.startswith("  - ") for line in lines), errors
        return [line.removeprefix("  - ") for line in lines]

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["+table1=99"], ["+table1=99: must be one of 01_baseline, 02_full_attn_res"]),
        (["+table1=10"], ["+table1=10:", "did you mean 10_block8_p_lr_r32?"]),
        (["table1=01_baseline"], ["table1=01_baseline:", "write +table1=01_baseline"]),
        (["model=null"], ["model=null: must be one of demo, paper, proxy"]),
        (["+model=demo"], ["+model=demo:", "leave out the +"]),
        (["experiment=dem0"], [f"experiment=dem0: {EXPERIMENTS}; did you mean demo?"]),
        (["experiment=[demo,7]"], [f"experiment=7: {EXPERIMENTS}"]),
        (["modle=demo"], ["modle=demo: no such key; did you mean model (one of demo, paper"]),
        (["data.root=/x/数据"], ["data.root=/x/数据: cannot", "\"data.root='/x/数据'\""]),
        (["data.root=/x/a b,c"], ["data.root=/x/a b,c: has several", "\"data.root='/x/a b,c'\""]),
        (["data.root=/x/it's"], ["data.root=/x/it's: cannot", r"'data.root='"]),
        (["model.rnak=[1"], ["model.rnak=[1: no such key; did you mean model.rank?"]),
        (["model=数"], ["model=数: must be one of demo, paper, proxy"]),
        (["+model=demo", "optimizer=demo"], ["+model=demo:", "leave out the +"]),
        (["data.root={a"], ["data.root={a: cannot be read", "\"data.root='{a'\""]),
        (["model.rank=[1"], ["model.rank=[1: must be a whole number or null"]),
        (["seed=1,2"], ["seed=1,2: has several values", "add -m"]),
        (["seed=range(1,3)"], ["seed=range(1,3): has several values"]),
        (["a b"], ["a b: must be key=value"]),
        (["model-rank=3"], ["model-rank=3: no such key; did you mean model.rank?"]),
        (["~model.rnak"], ["~model.rnak: no such key; did you mean model.rank?"]),
        (["~optimizr"], ["~optimizr: no such key; did you mean optimizer?"]),
        (["~model.rank"], ["model.rank: not set"]),
        (["runs=${nope}"], ["runs: ", "'nope' not found"]),
        (["runs=${of_width:a}"], ["runs: TypeError"]),
        (["hydra.nope=1"], ["hydra.nope"]),
        (["hydra/launcher=none"], ["hydra/launcher=none: must be one of", "basic"]),
        (["--nonsense"], ["unrecognized arguments: --nonsense"]),
        (["--multirum"], ["--multirum", "did you mean --multirun?"]),
        (["--config-dir=/nowhere"], ["--config-dir=/nowhere: no such folder"]),
        (["--config-dir"], ["config-dir", "expected one argument"]),
        (["--config-name=trian"], ["--config-name=trian: must be one of", "did you mean train?"]),
        (["--config-path=/nowhere"], ["/nowhere"]),
        (["-m", "--cfg=job"], ["--cfg"]),
        (["-m", "experiment=demo,dem0"], [f"experiment=dem0: {EXPERIMENTS}"]),
        (["-m", "+table1=glob(99*)"], ["+table1=glob(99*): matches none of 01_baseline"]),
        (["-m", "seed=interval(1,3)"], ["seed=interval(1,3): a sweep takes"]),
        (["-m", "data.root=/x/数据,b"], ["data.root=/x/数据,b: cannot be read"]),
        (["-m", "runs=${nope}"], ["nope"]),
        (["-m", "runs=/proc/version/runs"], ["/proc/version/runs"]),
    ],
)
def test_words_that_hydra_cannot_use_are_refused_in_a_line(
    refused, words: list[str], said: list[str]
) -> None:
    (line,) = refused("train", "device=cpu", "name=x", *words)
    for part in said:
        assert part in line
    assert "Hydra" not in line and "hydra.cc" not in line and len(line) < 700


def test_all_words_that_hydra_cannot_use_come_at_once(refused) -> None:
    wrong = ("experiment=dem0", "optimizer=nadam", "data.root=数", "+table1=[99,98]", "seed=1,2")
    assert len(refused("train", *wrong)) == 6


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("eval", ["run=数"]),
        ("eval", ["--config-name=evil"]),
        ("tokenize", ["data=filez"]),
        ("cost", ["model=null"]),
        ("cost", ["~model.rnak"]),
        ("estimate", ["experiment=demo,proxy"]),
        ("table1", ["experiment=dem0"]),
    ],
)
def test_every_command_that_composes_refuses_alike(refused, command: str, words: list[str]) -> None:
    (line,) = refused(command, *words)
    assert words[0].lstrip("-~").partition("=")[0] in line


def test_the_quotes_that_are_proposed_are_the_ones_wanted() -> None:
    import shlex

    from hydra.core.override_parser.overrides_parser import OverridesParser

    for text in ("/x/数据", "a b,c", "it's", 'say "数"', "$HOME/数", "数\\", "{[(", "'", "a=b,数"):
        with pytest.raises(ConfigError) as refusal:
            composed([f"data.root={text}"])
        (line,) = refusal.value.errors
        (word,) = shlex.split(line.partition("if it is one text, write ")[2])
        assert OverridesParser.create().parse_override(word).value() == text


def test_choices_of_own_folders_count(tmp_path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").touch()
    (tmp_path / "path" / "deep").mkdir(parents=True)
    (tmp_path / "path" / "deep" / "a.yaml").touch()
    choices = choices_of([CONFIGS, tmp_path])
    assert choices["model"] == ["demo", "mine", "paper", "proxy"] and choices["path/deep"] == ["a"]
