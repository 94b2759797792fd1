"""Checkpoints of several ranks: on any number of them again, and against kills, full disks, drift
and damage on one.
"""

from __future__ import annotations

import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lrattnres.runs.checkpoint import CheckpointError, Checkpoints, State
from tests.distributed.launch import Ranks, connected, launch

# Rows of the tensors: over 4 ranks, "uneven" has shards of 2, 2, 2 and 1 rows, "short" of 1, 1, 0
# and 0.
SHAPES = {"even": (8, 3), "uneven": (7, 3), "short": (2, 5), "vector": (5,)}


def value(name: str, step: int) -> Tensor:
    """What a tensor holds at a step: bits that no rounding leaves alone."""
    generator = torch.Generator().manual_seed(1000 * step + sorted(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def place(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """By rows over the last dimension of a mesh, as FSDP and HSDP do; whole without a mesh."""
    if not shape:
        return tensor
    return distribute_tensor(
        tensor, init_device_mesh("cpu", shape), [Replicate(), Shard(0)][-len(shape) :]
    )


def state_of(step: int, shape: tuple[int, ...], rank: int) -> State:
    return {
        "model": {name: place(value(name, step), shape) for name in SHAPES},
        "progress": {"step": torch.tensor(step)},
        "random": {f"cpu.rank{rank}": torch.full((3,), 100 * step + rank)},
    }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_at(state: State, step: int) -> bool:
    return all(
        torch.equal(whole(tensor), value(name, step)) for name, tensor in state["model"].items()
    )


def silent(_: str) -> None:
    pass


# --- any number of ranks --------------------------------------------------------------------------


def leg(rank: int, folder: Path, shape: tuple[int, ...], step: int) -> list[str]:
    """Loads what another number of ranks has saved as `step`, checks every bit, and saves the next
    step.
    """
    ranks = connected() if shape else None
    checkpoints = Checkpoints(folder, keep_last=9, ranks=ranks, asynchronous=step % 2 == 0)
    keys = []
    if step:
        checkpoint = checkpoints.newest(print)
        assert (
            checkpoint is not None
            and checkpoint.step == step
            and checkpoint.details == {"step": step}
        )
        keys = checkpoint.keys("random")
        state = state_of(0, shape, rank) | {
            "random": {key: torch.zeros(3, dtype=torch.int64) for key in keys}
        }
        checkpoint.load(state)
        assert is_at(state, step) and state["progress"]["step"] == step
        for other, key in enumerate(sorted(keys)):
            assert state["random"][key].tolist() == [100 * step + other] * 3
    assert checkpoints.keep_last == 9
    checkpoints.save(step + 1, state_of(step + 1, shape, rank), {"step": step + 1})
    checkpoints.wait()
    return keys


def test_saved_on_some_ranks_and_loaded_on_others_to_the_bit(tmp_path: Path) -> None:
    """1 -> 2 -> 4 -> 2 x 2 -> 3 -> 1 ranks; one value for each rank there was."""
    leg(0, tmp_path, (), 0)
    before = 1
    for step, shape in enumerate([(2,), (4,), (2, 2), (3,)], start=1):
        world = torch.Size(shape).numel()
        assert (
            launch(leg, world, tmp_path, shape, step)
            == [[f"cpu.rank{rank}" for rank in range(before)]] * world
        )
        before = world
    assert leg(0, tmp_path, (), 5) == ["cpu.rank0", "cpu.rank1", "cpu.rank2"]
    files = [path.name for path in (tmp_path / "step_000003").iterdir()]
    assert {name for name in files if name.endswith(".distcp")} == {
        f"__{rank}_0.distcp" for rank in range(4)
    }
    # Weights alone, by one process, from every sharding there was.
    for step in range(1, 7):
        weights = {"model": {name: torch.zeros(shape) for name, shape in SHAPES.items()}}
        Checkpoints(tmp_path).at(step).load(weights)
        assert is_at(weights, step)


# --- what is not the same everywhere --------------------------------------------------------------


def disagree(rank: int, folder: Path) -> list[str]:
    checkpoints, said = Checkpoints(folder, ranks=connected()), []
    checkpoints.save(1, state_of(1, (2,), rank), {})
    drifted = state_of(2, (2, 1), rank)
    if rank == 1:
        local = drifted["model"]["even"]
        assert isinstance(local, DTensor)
        local.to_local()[3, 1] += 1e-7
    for state in (
        {
            "progress": {"step": torch.tensor(7 + rank)},
            "loader": {"same": torch.ones(3)},
        },  # one of them would be lost
        drifted,  # replicas that are none
        {"progress": {"step": 3 if rank else torch.tensor(3)}},
        {"progress": {"step": torch.zeros(2 + rank)}},
    ):
        with pytest.raises(CheckpointError) as fault:
            checkpoints.save(2, state, {})  # type: ignore[arg-type]
        said.append(str(fault.value))
    for wanted in (
        {"progress": {"step": torch.zeros(() if rank else (2,), dtype=torch.int64)}},
        {"progress": {}},
    ):
        with pytest.raises(CheckpointError) as fault:
            checkpoints.at(1).load(wanted)
        said.append(str(fault.value))
    with pytest.raises(CheckpointError) as fault:
        checkpoints.at(5)
    said.append(str(fault.value))
    return said


def test_a_difference_between_ranks_is_named_on_all_of_them(tmp_path: Path) -> None:
    first, second = launch(disagree, 2, tmp_path)
    assert first == second
    value, replica, kind, shape, load, unwanted, missing = first
    assert (
        "progress.step: differs between rank 0 and rank 1" in value and "loader.same" not in value
    )
    assert (
        "model.even (shard [0]): differs between rank 0 and rank 1" in replica
        and "uneven" not in replica
    )
    assert "progress.step=3: not a tensor" in kind and "step: differs" in shape
    assert "progress.step: torch.int64 () in the checkpoint, torch.int64 (2,) wanted" in load
    assert (
        "progress.step: in the checkpoint, but not wanted" in unwanted and "random" not in unwanted
    )
    assert "no checkpoint of step 5; there are: 1" in missing
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


# --- a full disk ----------------------------------------------------------------------------------


def fill(rank: int, folder: Path, full: int, asynchronous: bool) -> str:
    """The system lets no file of one rank grow, as it does when its disk is full."""
    checkpoints = Checkpoints(folder, ranks=connected(), asynchronous=asynchronous)
    checkpoints.save(1, state_of(1, (2,), rank), {})
    checkpoints.wait()
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(CheckpointError) as fault:
        checkpoints.save(
            2, {"model": {"w": distribute_tensor(torch.ones(2_000, 500), mesh, [Shard(0)])}}, {}
        )
        assert asynchronous
        checkpoints.wait()
    checkpoints.wait()  # told once
    checkpoints.save(3, state_of(3, (2,), rank), {})  # small enough
    checkpoints.wait()
    return str(fault.value)


@pytest.mark.parametrize(("full", "asynchronous"), [(0, True), (1, False), (1, True)])
def test_a_full_disk_of_one_rank(tmp_path: Path, full: int, asynchronous: bool) -> None:
    said = launch(fill, 2, tmp_path, full, asynchronous)
    assert said[0] == said[1]
    assert said[0].startswith(
        f"{tmp_path}/.step_000002.partial: the checkpoint of step 2 is not written"
    )
    assert f"rank {full}: [Errno 27] File too large" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000003"]
    assert Checkpoints(tmp_path).at(1).step == 1


# --- killed ranks ---------------------------------------------------------------------------------


def save_forever(rank: int, folder: Path, asynchronous: bool) -> None:
    mesh, step = init_device_mesh("cpu", (2,)), 0
    checkpoints = Checkpoints(folder, ranks=connected(), asynchronous=asynchronous)
    begin = checkpoints.newest(silent)
    step = begin.step if begin else 0
    while True:
        step += 1
        # Made without a message to the others: the death of one is met by the save, not by the
        # making of what it saves.
        weights = DTensor.from_local(torch.full((2_000, 1_000), float(step)), mesh, [Shard(0)])
        checkpoints.save(step, {"model": {"w": weights}}, {"step": step})
        print(step)


@pytest.mark.parametrize(("killed", "asynchronous"), [(1, False), (0, False), (1, True)])
def test_a_rank_killed_in_the_middle_of_a_save(
    tmp_path: Path, killed: int, asynchronous: bool
) -> None:
    with Ranks(save_forever, 2, tmp_path, asynchronous) as ranks:
        ranks.until(0, "2\n")
        deadline = time.monotonic() + 20
        while not any(
            path.stat().st_size > 1_000_000
            for path in tmp_path.glob(f".step_*.partial/__{killed}_*.distcp")
        ):
            assert time.monotonic() < deadline
        ranks.kill(killed)
        endings = ranks.wait(30)
    left = endings[1 - killed]
    assert endings[killed].code == -signal.SIGKILL and left.code == 1
    assert (
        "CheckpointError" in left.output
        and "is not written, earlier ones are as they were: another rank is gone" in left.output
    )
    said = max(int(line) for line in left.output.splitlines() if line.isdigit())
    found = Checkpoints(tmp_path).newest(silent)
    assert (
        found is not None
        and found.step >= said - asynchronous
        and found.details == {"step": found.step}
    )
    weights = torch.zeros(4_000, 1_000)
    found.load({"model": {"w": weights}})
    assert (weights == found.step).all()
    with Ranks(save_forever, 2, tmp_path, asynchronous) as ranks:
        ranks.until(0, f"{found.step + 2}\n")


@pytest.mark.slow
def test_any_rank_killed_at_any_time_loses_no_complete_save(tmp_path: Path) -> None:
    choose, steps = random.Random(5), [0]
    for attempt in range(20):
        killed, asynchronous = choose.randrange(2), attempt % 2 == 1
        with Ranks(save_forever, 2, tmp_path, asynchronous) as ranks:
            ranks.until(1 - killed, f"{steps[-1] + 1}\n")
            time.sleep(choose.random() / 2)
            ranks.kill(killed)
            left = ranks.wait(30)[1 - killed]
        assert left.code == 1
        said = max(int(line) for line in left.output.splitlines() if line.isdigit())
        found = Checkpoints(tmp_path).newest(silent)
        assert found is not None and said - asynchronous <= found.step <= said + 1
        weights = torch.zeros(4_000, 1_000)
        found.load({"model": {"w": weights}})
        assert (weights == found.step).all()
        steps.append(found.step)
    assert steps == sorted(steps) and steps[-1] > 20


# --- damage ---------------------------------------------------------------------------------------


def newest_of(rank: int, folder: Path) -> tuple[int | None, list[str]]:
    said: list[str] = []
    checkpoint = Checkpoints(folder, ranks=connected()).newest(said.append)
    if checkpoint is not None:
        state = state_of(0, (2,), rank)
        checkpoint.load(state)
        assert is_at(state, checkpoint.step)
    return checkpoint.step if checkpoint else None, said


def save_three(rank: int, folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep_last=3, ranks=connected())
    for step in (1, 2, 3):
        checkpoints.save(step, state_of(step, (2,), rank), {})


def test_a_missing_and_a_damaged_shard_are_passed_over_by_all(tmp_path: Path) -> None:
    launch(save_three, 2, tmp_path)
    (tmp_path / "step_000003" / "__1_0.distcp").unlink()
    shard = tmp_path / "step_000002" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    first, second = launch(newest_of, 2, tmp_path)
    assert first == second and first[0] == 1
    assert first[1] == [
        f"{tmp_path}/step_000003/__1_0.distcp: missing; passed over (and renamed to "
        ".step_000003.damaged if training goes on)",
        f"{shard}: damaged, its SHA-256 is not the one in manifest.json; "
        "passed over (and renamed to .step_000002.damaged if training goes on)",
    ]


# --- in the background ----------------------------------------------------------------------------


def train_on(rank: int, folder: Path) -> tuple[bool, float]:
    """Saves, changes the weights at once, and talks to the other rank while the save goes on."""
    checkpoints = Checkpoints(folder, ranks=connected(), asynchronous=True)
    weights = distribute_tensor(torch.ones(8_000, 1_000), init_device_mesh("cpu", (2,)), [Shard(0)])
    path = checkpoints.save(1, {"model": {"w": weights}}, {})
    early = path.exists()
    weights.to_local().zero_()
    total = torch.zeros(())
    for _ in range(200):
        one = torch.ones(())
        distributed.all_reduce(one)
        total += one
    checkpoints.wait()
    assert path.exists()
    loaded = torch.zeros(8_000, 1_000)
    checkpoints.at(1).load({"model": {"w": loaded}})
    assert (loaded == 1).all()
    return early, total.item()


def test_a_save_in_the_background_is_of_its_moment(tmp_path: Path) -> None:
    assert launch(train_on, 2, tmp_path) == [(False, 400.0)] * 2


def test_alone_a_failure_in_the_background_is_told_at_the_next_call(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "folder", asynchronous=True)
    (tmp_path / "folder").write_text("a file")
    checkpoints.save(1, state_of(1, (), 0), {})
    with pytest.raises(CheckpointError, match=r"step 1 is not written.*File exists"):
        checkpoints.save(2, state_of(2, (), 0), {})
    (tmp_path / "folder").unlink()
    checkpoints.save(2, state_of(2, (), 0), {})
    assert checkpoints.at(2).step == 2  # waits
