"""What a run asks of its optimizer: any entry of the table answers, no caller knows which."""

import json
import shutil

import pytest
import torch

from lrattnres.config import ConfigError
from lrattnres.config.checks import resolve
from lrattnres.optim.build import OPTIMIZERS
from lrattnres.runs.checkpoint import Checkpoints
from lrattnres.training.memory import estimate_memory
from lrattnres.training.run import train
from tests.config.test_config import composed

SHORT = ("steps=6", "optimizer.warmup=2", "optimizer.warmdown=0", "instruments.log=1")


def records(folder) -> list[dict]:
    return [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]


def test_the_rate_of_the_residual_path_is_logged_and_in_the_table(tiny_run, capsys) -> None:
    """p_lr of rank 1 has a key matrix of one row: Adam's, and so at the rate of the path."""
    words = ("model.residual=p_lr", "model.rank=1", "optimizer.routing_lr=0.02", *SHORT)
    folder, _ = train(*resolve(composed(*tiny_run(*words))))
    table = capsys.readouterr().out
    for name, shape in (("router.queries", "4 x 1"), ("router.embedding_key.weight", "1 x 16")):
        (line,) = (line for line in table.splitlines() if name in line)
        assert line.split() == [
            "adam",
            name,
            *shape.split(),
            "1",
            line.split()[6],
            "routing_lr=0.02",
        ]
    (line,) = (line for line in table.splitlines() if "embedding.weight" in line)
    assert line.endswith("adam_lr=0.003")
    for record in records(folder):
        assert record["lr_routing"] == pytest.approx(record["lr_adam"] * 0.02 / 0.003, rel=1e-12)
    assert records(folder)[3]["lr_routing"] == 0.02
    moments = Checkpoints(folder.checkpoints_path).at(6).keys("optimizer")
    assert "router.embedding_key.weight.exp_avg" in moments
    assert "router.embedding_key.weight.momentum_buffer" not in moments


class Descent(torch.optim.SGD):
    """A second optimizer: plain descent with momentum, at one rate."""

    def __init__(self, parameters, config, steps, *, roles, mesh):
        self.named, self.rate = list(parameters), config.adam_lr
        super().__init__(self.named, lr=self.rate, momentum=0.5)
        for _, parameter in self.named:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def set_step(self, step: int) -> None:
        self.param_groups[0]["lr"] = self.rate / (step + 1)

    def rates(self) -> dict[str, float]:
        return {"lr_descent": self.param_groups[0]["lr"]}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{n}.velocity": self.state[p]["momentum_buffer"] for n, p in self.named}

    def work(self) -> dict[str, int]:
        return {"flops": 0, "bytes_sent": 0}

    def ownership(self) -> str:
        return f"descent owns all {len(self.named)} parameters"


def test_a_second_optimizer_is_a_second_entry(
    tiny_run, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "descent", Descent)
    words = ("optimizer.name=descent", "model.residual=s_lr", *SHORT)
    config, notes = resolve(composed(*tiny_run(*words)))
    memory = estimate_memory(config, 1)
    assert memory.moments == memory.weights
    adam = estimate_memory(resolve(composed(*tiny_run("model.residual=s_lr", *SHORT)))[0], 1)
    assert adam.weights == memory.weights < adam.moments

    folder, done = train(config, notes)
    assert done and "descent owns all" in (printed := capsys.readouterr().out)
    assert "muon" not in printed.lower()
    found = records(folder)
    assert [record["lr_descent"] for record in found] == [0.003 / step for step in range(1, 7)]
    assert not {"lr_muon", "lr_adam", "momentum"} & found[0].keys()
    assert found[-1]["loss"] < found[0]["loss"]

    cut, _ = train(resolve(composed(*tiny_run(*words, "name=cut")))[0], [])
    cut.summary_path.unlink()
    shutil.rmtree(cut.checkpoints_path / "step_000006")
    again, done = train(resolve(composed(*tiny_run(*words, "name=cut")))[0], [])
    assert done and [r["loss"] for r in records(again)] == [r["loss"] for r in found]


def test_an_optimizer_that_is_not_in_the_table_is_refused(tiny_run) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve(composed(*tiny_run("optimizer.name=muon_adm")))
    assert refusal.value.errors == [
        "optimizer.name=muon_adm: must be one of muon_adam; did you mean muon_adam?"
    ]


def test_a_rate_for_a_path_in_which_adam_owns_nothing_is_said_to_have_no_use(tiny_run) -> None:
    words = ("model.residual=baseline", "optimizer.routing_lr=0.02")
    config, notes = resolve(composed(*tiny_run(*words)))
    no_use = "optimizer.routing_lr has no meaning for model.residual=baseline: recorded as null"
    assert config.optimizer.routing_lr is None and no_use in notes
