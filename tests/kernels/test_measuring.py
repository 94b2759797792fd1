"""The tools of bench/: one idiom for their options, and a bare machine is enough for the GPU's."""

import json
import subprocess
import sys

import pytest

from lrattnres.config.checks import resolve
from tests.config.test_config import composed
from tests.paths import ROOT
from tests.programs import ENVIRONMENT

BARE = """
import importlib.machinery, sys
finder = importlib.machinery.PathFinder
gone, find = {"omegaconf", "hydra", "pyarrow", "tiktoken", "matplotlib", "fsspec"}, finder.find_spec
finder.find_spec = staticmethod(lambda name, *rest: None if name.split(".")[0] in gone else find(name, *rest))
sys.path.insert(0, sys.argv[1])
import common, generate, gpu, kernel_report, step
for module in (generate, gpu, kernel_report, step):
    sys.argv[1:] = ["--help"]
    try:
        module.main()
    except SystemExit as ended:
        assert ended.code == 0
words = ["--shape", "tiny", "--rounds", "1", "--device", "cpu", "--threads", "1"]
sys.argv[1:] = [*words, "--compile", "off", "--batch", "1", "--json", "x.json"]
step.main()
sys.argv[1:] = [*words, "--context", "8", "--variants", "baseline", "s_lr:3:4"]
generate.main()
assert "omegaconf.omegaconf" not in sys.modules
"""


@pytest.mark.slow
def test_a_bare_machine_can_measure(tmp_path) -> None:
    """With torch and Triton, and nothing else that the package needs."""
    words = [sys.executable, "-c", BARE, ROOT / "bench"]
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("--json JSON") == 8 and (tmp_path / "x.json").is_file()
    assert "s_lr:3:4" in ended.stdout


def test_the_way_of_the_data_takes_the_same_options(monkeypatch, capsys) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.syspath_prepend(ROOT / "bench")
    import data

    monkeypatch.setattr(sys, "argv", ["data.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        data.main()
    assert ended.value.code == 0 and "--json JSON" in capsys.readouterr().out


@pytest.mark.slow
def test_the_run_for_a_gpu_goes_all_the_way_on_a_cpu(tmp_path) -> None:
    """Interpreted and tiny: every part has figures, and none of them failed."""
    pytest.importorskip("triton")
    environment = ENVIRONMENT | {"TRITON_INTERPRET": "1"}
    words = [sys.executable, ROOT / "bench" / "gpu.py", "--rehearse", "--json", "gpu.json"]
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert {figure["part"] for figure in record["figures"]} == set(range(8))
    assert not record["ended_by_limit"]
    found = {(figure["part"], figure["figure"]): figure for figure in record["figures"]}
    assert found[2, "s_lr:3:4 against baseline"]["baseline"]["ms"] > 0
    assert found[3, "train.py s_lr:3:4"]["tokens_s"] > 0
    assert found[7, "profile s_lr:3:4"]["table"]
    assert all(figure.get("right", True) for figure in record["figures"])


def test_a_figure_that_fails_is_recorded_and_a_run_that_is_cut_leaves_the_rest(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    import gpu

    def fails() -> dict:
        raise RuntimeError("no such kernel")

    file, clock = tmp_path / "gpu.json", [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])
    report = gpu.Report(file, limit=100.0)
    report.take(gpu.Figure(0, "bad", fails))
    report.take(gpu.Figure(1, "good", lambda: {"ms": 3.0}))
    clock[0] = 97.0
    report.take(gpu.Figure(2, "late", lambda: {"ms": 4.0}, needs=3.5))
    bad, good, late = json.loads(file.read_text())["figures"]
    assert bad["error"] == "RuntimeError: no such kernel" and good["ms"] == 3.0
    assert "3 seconds were left" in late["left_out"] and "ms" not in late
    monkeypatch.setattr(gpu.os, "_exit", lambda code: clock.append(code))
    gpu._end(report)
    assert clock[1:] == [0] and json.loads(file.read_text())["ended_by_limit"] is True


def test_the_runs_of_train_py_on_a_gpu_are_possible(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    import gpu

    for size in (gpu.PAPER, gpu.REHEARSAL):
        for name in ("baseline", size.ours):
            config, _ = resolve(
                composed(*size.training, *gpu.residual_of(name), "name=x", "device=cpu")
            )
            assert config.steps > config.optimizer.warmup
