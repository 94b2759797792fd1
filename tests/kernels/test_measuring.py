"""The tools of bench/: one idiom for their options, and a bare machine is enough for the GPU's."""

import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.programs import ENVIRONMENT

BARE = """
import importlib.machinery, sys
finder = importlib.machinery.PathFinder
gone, find = {"omegaconf", "hydra", "pyarrow", "tiktoken", "matplotlib", "fsspec"}, finder.find_spec
finder.find_spec = staticmethod(lambda name, *rest: None if name.split(".")[0] in gone else find(name, *rest))
sys.path.insert(0, sys.argv[1])
import common, generate, gpu_check, kernel_report, kernels, step
for module in (generate, gpu_check, kernel_report, kernels, step):
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
    assert ended.stdout.count("--json JSON") == 10 and (tmp_path / "x.json").is_file()
    assert "s_lr:3:4" in ended.stdout


def test_the_way_of_the_data_takes_the_same_options(monkeypatch, capsys) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.syspath_prepend(ROOT / "bench")
    import data

    monkeypatch.setattr(sys, "argv", ["data.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        data.main()
    assert ended.value.code == 0 and "--json JSON" in capsys.readouterr().out
