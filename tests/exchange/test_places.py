"""Where exported and converted folders can be written, and what is said where they cannot."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from lrattnres.entry import REFUSED, attempt
from lrattnres.exchange.folder import FolderError, new_folder


def made(out: object, content: str = "x") -> bool:
    with new_folder(str(out)) as path:
        (path / "file").write_text(content)
    return True


def refusal(out: object, capsys) -> str:
    """One line, and the exit code of a refusal."""
    assert attempt(lambda: made(out))[0] == REFUSED
    said = capsys.readouterr().err
    assert said.startswith(f"refused: out={out}: ") and said.count("\n") == 1
    return said


def test_places_that_cannot_be_are_refused_in_a_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("empty").mkdir()
    before = sorted(tmp_path.iterdir())
    for out, said in {
        "": "names no folder; write out=FOLDER",
        ".": "the working directory itself",
        str(tmp_path): "the working directory itself",
        "empty/..": "the working directory itself",
        "..": "there is something already",
        "/": "there is something already",
        "file": "there is something already",
        "file/model": "Not a directory",
        "dangling": "dangling is a link to nothing",
        "dangling/model": "dangling is a link to nothing",
        "loop": "loop is a link to nothing",
        "loop/model": "loop is a link to nothing",
        "x" * 300: "File name too long",
        "new/" + "x" * 300: "File name too long",
        "/proc/model": "",
        "/dev/null/model": "Not a directory",
    }.items():
        assert said in refusal(out, capsys), out
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_appears_under_its_name_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "place").mkdir()
    (tmp_path / "link").symlink_to("place")
    for out in ("new/deep/model", "place", "x" * 255, "a b,c=数据"):
        assert made(out) and (tmp_path / out / "file").read_text() == "x"
    shutil.rmtree("place")
    (tmp_path / "place").mkdir()
    assert made("link") and (tmp_path / "place" / "file").exists() and Path("link").is_symlink()
    assert not list(tmp_path.rglob(".*"))
    umask = os.umask(0o027)
    try:
        made("private")
    finally:
        os.umask(umask)
    assert Path("private").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space")],
)
def test_a_full_disk_is_a_refusal_and_nothing_stays(tmp_path: Path, error, capsys) -> None:
    def write() -> bool:
        with new_folder(f"{tmp_path}/new/model") as path:
            (path / "half").write_text("x")
            raise error

    assert attempt(write)[0] == REFUSED
    assert "cannot be written" in (said := capsys.readouterr().err) and "No space" in said
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_do_not_touch_each_others_files(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with (
        pytest.raises(FolderError, match="there is something already"),
        new_folder(str(out)) as slow,
    ):
        (slow / "file").write_text("slow")
        with new_folder(str(out)) as fast:
            assert fast != slow and (slow / "file").read_text() == "slow"
            (fast / "file").write_text("fast")
        assert (slow / "file").read_text() == "slow"
    assert json.dumps([path.name for path in tmp_path.iterdir()]) == '["model"]'
    assert (out / "file").read_text() == "fast"
