"""What `lrattnres table1` says before it starts: which runs there are, what is left of them, and for how long."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lrattnres.commands import main, table1

READS = {
    "full": 324,
    4: 84,
    8: 132,
    16: 224,
}  # sources over the 24 sites that route, added up by hand for 12 blocks


def once_each(compose: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the same for the same words: Hydra takes a third of a second for each."""
    known: dict[str, Any] = {}

    def composed(words: list[str], **instead: Any) -> Any:
        key = repr((words, instead))
        if key not in known:
            known[key] = compose(words, **instead)
        return copy.deepcopy(known[key])

    return composed


def everything(settings: list[str]) -> list:
    members = [table1.member(settings, row) for row in table1.TABLE1]
    return members + [
        table1.member(settings, row, f"seed={seed}")
        for seed in table1.SEEDS
        for row in table1.SEEDED
    ]


def finish(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"step": 200}')


def seconds(sentence: str) -> int:
    days, hours, minutes, rest = re.search(
        r"about (?:(\d+) days?, )?(\d+):(\d\d):(\d\d) to go", sentence
    ).groups()
    return ((int(days or 0) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(rest)


@pytest.mark.slow
def test_the_forecast_is_what_is_left_at_the_measured_rates(tmp_path: Path, monkeypatch) -> None:
    settings = ["experiment=proxy", f"runs={tmp_path}"]
    timed: list[str] = []

    def measured(words: list[str], row: str) -> float:
        timed.append(row)
        return {"01_baseline": 1e-4, "02_full_attn_res": 1.9e-4}[row]

    monkeypatch.setattr(table1, "seconds_a_token", measured)
    monkeypatch.setattr(table1, "composed", once_each(table1.composed))
    members = everything(settings)
    names = [member.config.name for member in members]
    assert len(set(names)) == 26 and {
        "proxy-baseline",
        "proxy-s_lr-N8-r8",
        "proxy-p_lr-N8-r4-seed=2",
    } <= set(names)

    sentence = table1.forecast(members, settings)
    assert (
        timed == ["01_baseline", "02_full_attn_res"]
        and "26 runs, 0 of them finished, 0 begun" in sentence
    )
    assert "01_baseline 0.205 s" in sentence and "02_full_attn_res 0.389 s" in sentence
    tokens = 200 * 8 * 256 + (2 * 131_072 + 2 * 65_536) / 3
    expected = 0.0
    for member in members:
        model = member.config.model
        width = 128 + (model.rank or 128)
        share = (
            0
            if model.residual == "baseline"
            else READS[model.blocks or "full"] * width / (324 * 256)
        )
        expected += tokens * (1e-4 + 0.9e-4 * share)
    assert seconds(sentence) == pytest.approx(expected, abs=1)

    for name in names[:-1]:
        finish(tmp_path / name)
    checkpoints = tmp_path / names[-1] / "checkpoints" / "step_000100"
    checkpoints.mkdir(parents=True)
    (checkpoints / "manifest.json").write_text("{}")
    sentence = table1.forecast(everything(settings), settings)
    assert "26 runs, 25 of them finished, 1 begun" in sentence
    left = 100 * 8 * 256 + (131_072 + 2 * 65_536) / 3
    assert seconds(sentence) == pytest.approx(
        left * (1e-4 + 0.9e-4 * 132 * 136 / (324 * 256)), abs=1
    )

    (tmp_path / names[-1] / "summary.json").write_text('{"step": 200}')
    assert table1.forecast(everything(settings), settings).endswith("nothing is left to train")


@pytest.mark.parametrize("word", ["seed=3", "+table1=01_baseline", "name=x", "-m"])
def test_what_the_grid_sets_itself_is_refused(word: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["table1.py", "experiment=proxy", word])
    with pytest.raises(SystemExit) as ended:
        main("table1")
    assert ended.value.code == 2 and word in capsys.readouterr().err
