"""Checkpoints against real damage: cut, flipped, deleted and hostile files, killed processes, a
full disk.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from lrattnres.runs.checkpoint import Checkpoint, CheckpointError, Checkpoints, State
from tests import programs
from tests.programs import Program


def small_state(value: float = 1.0) -> State:
    return {
        "model": {
            "head.weight": torch.full((3, 4), float(value)),
            "router.queries": torch.arange(6.0).reshape(2, 3) + value,
        },
        "optimizer": {"head.weight.momentum": torch.full((3, 4), value / 3)},
        "loader": {},
        "progress": {"step": torch.tensor(int(value))},
    }


def zeros_like(state: State) -> State:
    return {
        name: {key: torch.zeros_like(value) for key, value in group.items()}
        for name, group in state.items()
    }


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def newest(checkpoints: Checkpoints) -> tuple[Checkpoint | None, list[str]]:
    reports: list[str] = []
    return checkpoints.newest(reports.append), reports


def seal(folder: Path) -> None:
    """Makes the manifest say what the files are now, as someone who can write it can."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        entry |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest))


# --- what is saved comes back ---------------------------------------------------------------------


def test_round_trip_is_exact_to_the_bit(tmp_path: Path) -> None:
    words = torch.randint(-(2**31), 2**31, (257,), dtype=torch.int64).to(torch.int32)
    nans = torch.tensor([0x7FC00001, 0x7F800001, -0x3FFFFF], dtype=torch.int32)
    values = {
        "float32": torch.cat([words, nans]).view(torch.float32),
        "bfloat16": torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16),
        "int64": torch.tensor([-(2**63), 2**63 - 1, 2**53 + 1]),
        "uint8": torch.arange(256, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 7),
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "slice": torch.arange(100.0)[10:13],
    }  # fmt: skip
    before = {key: raw(value) for key, value in values.items()}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, {"model": values}, {"tokens": 12, "name": "ä"})
    loaded = {key: torch.zeros_like(value) for key, value in values.items()}
    checkpoint = checkpoints.at(7)
    checkpoint.load({"model": loaded})
    assert {key: raw(value) for key, value in loaded.items()} == before
    assert checkpoint.details == {"tokens": 12, "name": "ä"}
    assert (checkpoint.step, checkpoint.path) == (7, tmp_path / "step_000007")
    assert (
        tmp_path / "step_000007" / "__0_0.distcp"
    ).stat().st_size < 300_000  # the slice, not all it is a slice of


def test_values_are_copied_into_the_given_tensors(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 3)
    weight, pointer = module.weight.detach().clone(), module.weight.data_ptr()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"model": module.state_dict()}, {})
    torch.nn.init.zeros_(module.weight)
    checkpoints.at(1).load({"model": dict(module.named_parameters())})
    assert (
        torch.equal(module.weight, weight)
        and module.weight.data_ptr() == pointer
        and module.weight.requires_grad
    )


def test_a_part_is_loaded_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small_state(), {})
    part = {"model": zeros_like(small_state())["model"]}
    checkpoints.at(1).load(part)
    assert torch.equal(part["model"]["head.weight"], torch.ones(3, 4))


def test_other_tools_read_it(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "run").save(1, small_state(), {})
    dcp_to_torch_save(tmp_path / "run" / "step_000001", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert torch.equal(plain["model"]["router.queries"], small_state()["model"]["router.queries"])


def test_every_difference_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small_state(), {})
    wanted: State = {
        "model": {"head.weight": torch.zeros(4, 3), "new": torch.zeros(1)},
        "progress": {"step": torch.tensor(9.0)},
        "loader": {"streams": torch.zeros(2)},
    }
    with pytest.raises(CheckpointError) as error:
        checkpoints.at(1).load(wanted)
    for part in (
        "model.head.weight: torch.float32 (3, 4) in the checkpoint, torch.float32 (4, 3) wanted",
        "model.new: not in the checkpoint",
        "model.router.queries: in the checkpoint, but not wanted",
        "progress.step: torch.int64 () in the checkpoint, torch.float32 () wanted",
        "loader.streams: not in the checkpoint",
    ):
        assert part in str(error.value)
    assert "optimizer" not in str(error.value)
    assert wanted["progress"]["step"] == 9.0


def test_only_tensors_and_json_are_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"progress\.step=3: not a tensor; write torch\.tensor\(3\)"
    ):
        checkpoints.save(1, {"progress": {"step": 3}}, {})  # type: ignore[dict-item]
    for details in ({"shape": (1, 2)}, {1: 2}, {"x": float("nan")}, {"x": torch.ones(1)}):
        with pytest.raises(CheckpointError, match="details="):
            checkpoints.save(1, small_state(), details)  # type: ignore[arg-type]
    assert checkpoints.steps() == []


# --- which ones there are -------------------------------------------------------------------------


def test_pruning_keeps_the_newest_and_the_multiples(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=30)
    for step in range(10, 80, 10):
        checkpoints.save(step, small_state(step), {})
    assert checkpoints.steps() == [30, 60, 70]
    checkpoints.save(20, small_state(20), {})  # older than all that are kept, yet just written
    assert 20 in checkpoints.steps()
    assert checkpoints.rewind(30) == [60, 70] and checkpoints.steps() == [20, 30]
    with pytest.raises(
        CheckpointError, match="no checkpoint of step 50; there are: 20, 30, 60, 70"
    ):
        checkpoints.at(50)


def test_checkpoints_after_the_chosen_one_stay_until_the_next_is_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=9)
    for step in (10, 20, 30, 40):
        checkpoints.save(step, small_state(step), {})
    assert checkpoints.rewind(20) == [30, 40]
    assert (checkpoints.steps(), checkpoints.superseded()) == ([10, 20], [30, 40])
    found, reports = newest(checkpoints)
    assert found and found.step == 20 and not reports  # not the one that was set aside
    with pytest.raises(CheckpointError):
        checkpoints.save(25, {"model": {"x": 3}}, {})  # type: ignore[dict-item]
    assert Checkpoints(tmp_path).at(40).step == 40  # a save that failed changes nothing
    assert checkpoints.rewind(40) == [] and checkpoints.steps() == [10, 20, 40]  # taken back
    assert checkpoints.superseded() == [30] and checkpoints.rewind(20) == [40]
    checkpoints.save(25, small_state(25), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step_{step:06d}" for step in (10, 20, 25)
    ]


def test_saving_again_replaces(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small_state(1), {"which": "old"})
    checkpoints.save(1, small_state(2), {"which": "new"})
    state = zeros_like(small_state())
    checkpoints.at(1).load(state)
    assert state["progress"]["step"] == 2 and checkpoints.at(1).details == {"which": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_set_aside_by_a_kill_between_two_renames_is_still_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small_state(1), {})
    (tmp_path / "step_000001").rename(tmp_path / ".step_000001.replaced")
    found, reports = newest(checkpoints)
    assert found and found.step == 1 and not reports
    checkpoints.save(1, small_state(1), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_nothing_there(tmp_path: Path) -> None:
    assert newest(Checkpoints(tmp_path / "none")) == (None, [])


# --- damage ---------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("__0_0.distcp", Path.unlink, "__0_0.distcp: missing"),
        ("__0_0.distcp", cut, "__0_0.distcp: [0-9]+ bytes, but manifest.json says"),
        ("__0_0.distcp", flip, "__0_0.distcp: damaged"),
        (".metadata", Path.unlink, ".metadata: missing"),
        (".metadata", flip, ".metadata: damaged"),
        ("manifest.json", Path.unlink, "no manifest.json"),
        ("manifest.json", cut, "manifest.json: unreadable"),
    ],
)
def test_damage_is_reported_and_passed_over(tmp_path: Path, file: str, damage, says: str) -> None:  # type: ignore[no-untyped-def]
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, small_state(step), {})
    damage(tmp_path / "step_000002" / file)
    (tmp_path / ".step_000003.partial").mkdir()
    found, reports = newest(checkpoints)
    assert found and found.step == 1 and len(reports) == 2
    assert (
        ".step_000003.partial: unfinished" in reports[0]
        and str(tmp_path / "step_000002") in reports[1]
    )
    with pytest.raises(CheckpointError, match=says):
        checkpoints.at(2)
    # What could not be read from here may be whole for another version, or another machine: going
    # on keeps it apart.
    before = sorted(path.name for path in (tmp_path / "step_000002").iterdir())
    assert checkpoints.rewind(1) == [] and checkpoints.steps() == [1]
    assert sorted(path.name for path in (tmp_path / ".step_000002.damaged").iterdir()) == before
    checkpoints.save(2, small_state(2), {})
    assert checkpoints.steps() == [1, 2] and (tmp_path / ".step_000002.damaged").exists()


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "gone")


def linked(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("make", [dangling, linked, Path.touch, Path.mkdir])
def test_what_is_no_checkpoint_blocks_nothing(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    """Under every name that a save, a restart or a removal may find taken."""
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, small_state(), {})
    make(tmp_path / "step_000004")
    found, reports = newest(checkpoints)
    assert found and found.step == 1 and "step_000004" in reports[0] and len(reports) == 1
    for ending in ("damaged", "partial", "removed", "replaced"):
        if make is not linked:
            make(tmp_path / f".step_000004.{ending}")
    checkpoints.rewind(1)
    assert (tmp_path / ".step_000004.damaged").is_symlink() == (make in (dangling, linked))
    checkpoints.save(4, small_state(4), {})
    checkpoints.save(5, small_state(5), {})
    assert checkpoints.steps() == [5] and checkpoints.at(5)
    assert make is not linked or (tmp_path / "elsewhere").is_dir()  # the link goes, not its folder


@pytest.mark.parametrize("make", [dangling, Path.touch])
def test_a_folder_that_is_none_is_no_new_beginning(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="not a folder, or a link to one that is not there"):
        newest(Checkpoints(tmp_path / "checkpoints"))


def test_removed_by_a_training_while_it_is_read(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    writer, reader = Checkpoints(tmp_path, keep_last=1), Checkpoints(tmp_path)
    writer.save(1, small_state(1), {})
    at = Checkpoints.at

    def late(checkpoints: Checkpoints, step: int) -> Checkpoint:
        if step == 1:
            writer.save(2, small_state(2), {})
        return at(checkpoints, step)

    monkeypatch.setattr(Checkpoints, "at", late)
    found, reports = newest(reader)
    assert found and found.step == 2 and not reports
    writer.save(3, small_state(3), {})
    with pytest.raises(CheckpointError, match=r"step_000002: removed while it was read"):
        found.load(small_state())


def test_no_flipped_bit_of_the_manifest_goes_unseen(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, {"model": {"x": torch.ones(1)}}, {"tokens": 100}) / "manifest.json"
    content, manifest = path.read_bytes(), json.loads(path.read_text())
    for position in range(len(content)):
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        )
        try:
            assert json.loads(path.read_bytes()) == manifest  # white space, or digits of an escape
        except (ValueError, AssertionError):
            with pytest.raises(CheckpointError):
                checkpoints.at(1)


def test_a_folder_under_another_name_and_another_format_are_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, small_state(), {})
    path.rename(tmp_path / "step_000002")
    with pytest.raises(CheckpointError, match="not written like this for step 2"):
        checkpoints.at(2)
    manifest = json.loads((tmp_path / "step_000002" / "manifest.json").read_text()) | {"format": 2}
    (tmp_path / "step_000002" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="format 2, this version reads 1"):
        checkpoints.at(2)


KILLED = """
import sys, torch
from pathlib import Path
from lrattnres.runs.checkpoint import Checkpoints
checkpoints, step = Checkpoints(Path(sys.argv[1]), keep_last=2), 0
while True:
    step += 1
    checkpoints.save(step, {"model": {"w": torch.full((4_000_000,), float(step))}}, {"step": step})
    print(step, flush=True)
"""


def test_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    checkpoints, last = Checkpoints(tmp_path, keep_last=2), 0
    process = Program(["-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True)
    assert (
        process.stdout and process.stdout.readline() == "1\n" and process.stdout.readline() == "2\n"
    )
    deadline = time.monotonic() + 20
    while not any(
        path.stat().st_size > 1_000_000 for path in tmp_path.glob(".step_*.partial/*.distcp")
    ):
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait()
    said = [2, *map(int, process.stdout.read().split())]
    found, _ = newest(checkpoints)
    assert found and found.step >= said[-1] and found.details == {"step": found.step}
    weights = torch.zeros(4_000_000)
    found.load({"model": {"w": weights}})
    assert (weights == found.step).all()
    last = found.step
    checkpoints.save(last + 1, {"model": {"w": weights}}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step_{step:06d}" for step in (last, last + 1)
    ]


FULL = """
import resource, sys, torch
from pathlib import Path
from lrattnres.runs.checkpoint import Checkpoints, CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
checkpoints = Checkpoints(Path(sys.argv[1]))
checkpoints.save(1, {"model": {"w": torch.ones(1000)}}, {})
try:
    checkpoints.save(2, {"model": {"w": torch.ones(1_000_000)}}, {})
except CheckpointError as fault:
    print(fault)
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """The system refuses to let a file grow, as it does when the disk is full."""
    run = programs.run("-c", FULL, tmp_path)
    assert run.returncode == 0, run.stderr
    assert str(tmp_path / ".step_000002.partial") in run.stdout and "File too large" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    state = {"model": {"w": torch.zeros(1000)}}
    Checkpoints(tmp_path).at(1).load(state)
    assert (state["model"]["w"] == 1).all()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"checkpoints.*step 1 is not written.*File exists"):
        Checkpoints(tmp_path / "checkpoints").save(1, small_state(), {})


def test_an_interrupt_stays_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).save(1, small_state(), {})
    assert not list(tmp_path.iterdir())


# --- hostile files, with a manifest that vouches for them -----------------------------------------


class Command:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, (f"touch {self.path}",)


def test_a_hostile_description_is_not_executed(tmp_path: Path) -> None:
    checkpoints, trap = Checkpoints(tmp_path / "run"), tmp_path / "executed"
    folder = checkpoints.save(1, small_state(), {})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for hostile in (Command(trap), {"planner": metadata, "more": Command(trap)}):
        (folder / ".metadata").write_bytes(pickle.dumps(hostile))
        seal(folder)
        state = small_state(5)
        with pytest.raises(CheckpointError, match=r"\.metadata: wants posix\.system"):
            checkpoints.at(1).load(state)
        assert not trap.exists() and state["progress"]["step"] == 5
    pickle.loads((folder / ".metadata").read_bytes())  # the trap is a real one
    assert trap.exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        "torch.load",
        "torch.hub.load",
        "torch.Size.__init__.__globals__",
        "os.system",
    ],
)
def test_nothing_else_is_looked_up(tmp_path: Path, name: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(1, small_state(), {})
    module, attribute = (
        name.split(".", 1) if not name.startswith("torch.hub") else ("torch.hub", "load")
    )
    text = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, attribute))
    (folder / ".metadata").write_bytes(b"\x80\x04" + text + b"\x93.")
    seal(folder)
    with pytest.raises(CheckpointError, match="has no place in a checkpoint"):
        checkpoints.at(1).load(small_state())


def test_entries_that_are_no_tensors_and_files_elsewhere_are_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(1, small_state(), {})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["progress.step"] = BytesStorageMetadata()
    next(iter(metadata.storage_data.values())).relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)
    with pytest.raises(
        CheckpointError, match=r"(?s)progress\.step: not a tensor.*refers to \.\./elsewhere"
    ):
        checkpoints.at(1).load({"progress": {"step": torch.tensor(0)}})


def test_a_tensor_file_that_hides_a_command(tmp_path: Path) -> None:
    checkpoints, trap = Checkpoints(tmp_path / "run"), tmp_path / "executed"
    folder = checkpoints.save(1, {"model": {"x": torch.ones(1)}}, {})
    torch.save(Command(trap), folder / "__0_0.distcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).length = (folder / "__0_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        checkpoints.at(1).load({"model": {"x": torch.zeros(1)}})
    assert not trap.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80", pickle.dumps(3), pickle.dumps(None), b"not a pickle"]
)
def test_a_description_that_is_none(tmp_path: Path, content: bytes) -> None:
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(1, small_state(), {})
    (folder / ".metadata").write_bytes(content)
    seal(folder)
    with pytest.raises(CheckpointError, match="not the description of a checkpoint"):
        checkpoints.at(1).load(small_state())
