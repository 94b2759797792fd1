"""The kernels compiled ahead of time, for GPUs that are not here: no register is spilled, and few instructions are needed."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.paths import ROOT

pytest.importorskip("triton")

STREAMS = """
import json, sys
from lrattnres.kernels.machine_code import inspect, stream_launches
capability, cases = json.loads(sys.argv[1])
print(json.dumps([
    {launch.kernel: inspect(launch, capability)._asdict() for launch in stream_launches(**case)}
    for case in cases
]))
"""
PROGRAM = """
import json, sys
from lrattnres.kernels.machine_code import inspect, launches
capability, operators = json.loads(sys.argv[1])
print(json.dumps([
    {launch.kernel: inspect(launch, capability)._asdict() for launch in launches(**operator) if launch.kernel in wanted}
    for wanted, operator in operators
]))
"""
KERNELS = ("read_forward", "read_backward", "query_gradient")


def compiled(
    capability: int, *operators: tuple[tuple[str, ...], dict[str, Any]]
) -> list[dict[str, dict[str, int]]]:
    """What the named kernels of each operator are, in a process of its own: under the interpreter
    nothing is compiled.
    """
    return run(PROGRAM, capability, operators)


def run(program: str, capability: int, cases: Any) -> list[dict[str, dict[str, int]]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program, json.dumps([capability, cases])]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def check(found: dict[str, dict[str, int]]) -> None:
    for name, code in found.items():
        assert code["spilled"] == 0, (name, code)
        assert code["registers"] <= 255 and code["shared"] <= 48 * 1024, (name, code)


COMMON = {"addend": True, "passes": True, "dim": 1024}
MERGE = {"owned": 1, "parts": 1, "later": 0} | COMMON
OPEN = {"owned": 8, "parts": 0, "later": 5, "rank": 32} | COMMON


@pytest.mark.slow
def test_reads_are_bound_by_memory() -> None:
    """Below 400 warp instructions for each d values of two bytes that move, an H200 waits for its memory.

    A read is completed, with narrow keys and with keys of full width; and one opens a group of the
    paper's model, N = 8: eight sources for six sites.
    """
    merges = [(KERNELS, MERGE | {"rank": rank}) for rank in (32, 1024)]
    *completed, opening = compiled(90, *merges, (("read_forward",), OPEN))
    for found in completed:
        check(found)
        assert found["read_forward"]["instructions"] < 200 * 5
        assert found["read_backward"]["instructions"] < 200 * 6
    check(opening)
    assert opening["read_forward"]["instructions"] < 400 * (8 + 2 + 6)


# The largest operators of each granularity's groups, and of keys of full width. A backward launch takes 16 sources.
LARGEST = [
    (4, 13, 32),
    (9, 7, 32),
    (16, 7, 32),
    (16, 3, 32),
    (3, 17, 32),
    (8, 6, 1024),
    (4, 12, 1024),
]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("owned", "sites", "rank"), LARGEST)
def test_no_kernel_spills(owned: int, sites: int, rank: int, capability: int) -> None:
    operator = {"owned": owned, "parts": 0, "later": sites - 1, "rank": rank} | COMMON
    (found,) = compiled(capability, (KERNELS, operator))
    check(found)
    if (owned, sites) == (8, 6):
        assert found["read_backward"]["instructions"] < 450 * (3 * owned + sites + 1)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_projected_keys_spill_nothing(capability: int) -> None:
    check(*compiled(capability, (KERNELS, OPEN | {"separate": True})))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_streams_spill_nothing_and_wait_for_memory(capability: int) -> None:
    """Each kernel moves n + 1 vectors so many times; a program of the maps' gradient, some columns."""
    cases = [{"joint": joint, "streams": n} for joint in (False, True) for n in (2, 4)]
    times = {"stream_products": 1, "stream_mix": 2, "mixing_gradient": 2, "stream_gradients": 3}
    for case, found in zip(cases, run(STREAMS, capability, cases), strict=True):
        for name, code in found.items():
            assert code["spilled"] == 0 and code["shared"] <= 72 * 1024, (case, name, code)
            if case["streams"] == 4:
                units = 5 * times.get(name, (32 if case["joint"] else 64) / 1024)
                assert code["instructions"] < 420 * units, (case, name, code)
