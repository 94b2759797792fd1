"""The training loop in one process: its gradients, its bad steps, and its continuation to the last
bit.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from lrattnres.config.checks import resolve
from lrattnres.data.dataset import open_dataset
from lrattnres.evaluation.heldout import evaluate
from lrattnres.model.attention import BACKENDS
from lrattnres.model.head import token_losses
from lrattnres.model.transformer import build_model
from lrattnres.residual.base import paths
from lrattnres.runs.checkpoint import Checkpoints
from lrattnres.training import trainer as trainer_module
from lrattnres.training.trainer import Spent, Trainer, TrainingError
from tests.config.test_config import composed

CPU = torch.device("cpu")


@pytest.fixture
def make_trainer(tiny_run, tmp_path):
    def make(*changes: str, folder: str = "a") -> Trainer:
        config, _ = resolve(composed(*tiny_run(*changes)))
        model = build_model(
            config.model,
            seed=config.seed,
            device=CPU,
            attention=BACKENDS["sdpa"],
            dtype=torch.float32,
        )
        records: list[dict] = []
        trainer = Trainer(
            config,
            open_dataset(config),
            model,
            Checkpoints(tmp_path / folder, keep_last=config.checkpoint.keep_last),
            flops_per_token=1.0,
            peak_flops=1.0,
            write=records.append,
            say=lambda text: None,
        )
        trainer.records = records
        return trainer

    return make


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize("residual", list(paths()))
def test_micro_batches_do_not_change_the_gradient(make_trainer, residual: str) -> None:
    found = []
    for size in (8, 4, 1):
        trainer = make_trainer(f"micro_batch={size}", f"model.residual={residual}", "z_loss=0.01")
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3
                )
        windows = trainer.streams.next_batch()
        windows[2, 20:] = windows[5, 9:] = -100  # unequal counts: a mean of means would differ
        loss, z_loss, tokens = trainer.forward_backward(windows)
        found.append((loss, z_loss, gradients(trainer)))
        assert tokens == 8 * 32 - (33 - 20) - (33 - 9)
    for loss, z_loss, grads in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-6, atol=0)
        torch.testing.assert_close(z_loss, found[0][1], rtol=1e-6, atol=0)
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, found[0][2][name], rtol=1e-4, atol=1e-6, msg=name)


def test_losses_are_those_of_torch() -> None:
    logits, targets = torch.randn(3, 7, 11) * 3, torch.randint(11, (3, 7))
    targets[1, 4:] = -100
    sums = token_losses(logits, targets).sums()
    flat = logits.flatten(0, 1), targets.flatten()
    truth = torch.nn.functional.cross_entropy(*flat, ignore_index=-100, reduction="sum")
    assert sums.cross_entropy.item() == pytest.approx(truth.item(), rel=1e-6)
    assert sums.tokens.item() == 18
    squares = logits.logsumexp(-1).square()[targets != -100].sum()
    assert sums.squared_logsumexp.item() == pytest.approx(squares.item(), rel=1e-6)


def test_a_step_that_is_not_finite_changes_no_weight_and_is_counted(make_trainer) -> None:
    trainer = make_trainer()
    trainer.train_step()
    before = {name: tensor.clone() for name, tensor in trainer.state()["model"].items()}
    moments = {name: tensor.clone() for name, tensor in trainer.optimizer.tensors().items()}
    head = trainer.model.head.weight
    hook = head.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), math.nan))
    trainer.train_step()
    assert (trainer.progress.step, trainer.progress.bad_steps, trainer.progress.bad_in_a_row) == (
        2,
        1,
        1,
    )
    assert all(
        torch.equal(before[name], tensor) for name, tensor in trainer.state()["model"].items()
    )
    assert all(
        torch.equal(moments[name], tensor) for name, tensor in trainer.optimizer.tensors().items()
    )
    hook.remove()
    trainer.train_step()
    assert (trainer.progress.bad_steps, trainer.progress.bad_in_a_row) == (1, 0)
    assert not torch.equal(before["head.weight"], head)


def test_too_many_bad_steps_stop_the_run_and_leave_the_last_good_checkpoint(make_trainer) -> None:
    trainer = make_trainer(
        "max_bad_steps=3", "checkpoint.every=1", "checkpoint.keep_last=1", "evaluation.every=null"
    )
    count = iter(range(1000))
    trainer.model.head.weight.register_hook(
        lambda g: g * math.nan if next(count) >= 2 * 6 else g
    )  # two parts a step
    with pytest.raises(TrainingError, match=r"3 steps in a row .* step 9"):
        trainer.fit()
    assert trainer.checkpoints.steps() == [6]
    assert [record["bad_steps"] for record in trainer.records] == [0] * 6 + [1, 2, 3]


def test_continuing_is_bit_exact_within_one_process(make_trainer) -> None:
    straight = make_trainer(folder="straight")
    assert straight.fit()
    first = make_trainer(folder="cut")
    for _ in range(13):
        first.train_step()
    first.save()
    second = make_trainer(folder="cut")
    second.restore(second.checkpoints.at(13))
    assert second.fit()
    for group, tensors in straight.state().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second.state()[group][name]), f"{group} {name}"
    noisy = ("tokens_per_second", "mfu")
    strip = [
        [{k: v for k, v in r.items() if k not in noisy} for r in t.records]
        for t in (straight, second)
    ]
    assert strip[0][13:] == strip[1]


def test_held_out_loss_is_the_same_for_any_batch_and_counts_each_token_once(make_trainer) -> None:
    trainer = make_trainer()
    dataset, model = trainer.dataset, trainer.model
    found = [
        evaluate(model, dataset.held_out_windows(500, batch), dataset.tokenizer, documents=True)
        for batch in (1, 5, 16)
    ]
    assert {held_out.tokens for held_out in found} == {500}
    assert len({held_out.bytes for held_out in found}) == 1
    for held_out in found[1:]:
        assert held_out.loss == pytest.approx(found[0].loss, rel=1e-6)
    windows = list(dataset.held_out_windows(500, 1))
    separators = sum(int((window[:, 1:] == 256).sum()) for window in windows)
    assert found[0].bytes == 500 - separators
    assert found[0].perplexity == pytest.approx(math.exp(found[0].loss))
    assert found[0].bits_per_byte == pytest.approx(
        found[0].loss * 500 / found[0].bytes / math.log(2)
    )


def test_no_z_loss_in_evaluation(make_trainer) -> None:
    losses = []
    for weight in ("0", "0.5"):
        trainer = make_trainer(f"z_loss={weight}")
        windows = trainer.dataset.held_out_windows(500, 4)
        losses.append(
            evaluate(trainer.model, windows, trainer.dataset.tokenizer, documents=True).loss
        )
    assert losses[0] == losses[1]


def test_instruments_measure_what_they_say(make_trainer) -> None:
    trainer = make_trainer(
        "instruments.gradients=3", "instruments.depth=4", "evaluation.every=null", "steps=12"
    )
    trainer.fit()
    with_blocks = [record for record in trainer.records if "block_grad_norm" in record]
    assert [record["step"] for record in with_blocks] == [3, 6, 9, 12]
    assert all(len(record["block_grad_norm"]) == 2 for record in with_blocks)
    for record in with_blocks:
        assert math.hypot(*record["block_grad_norm"]) <= record["grad_norm"]
    depth = [record for record in trainer.records if "newest_weight" in record]
    assert [record["step"] for record in depth] == [4, 8, 12]
    for record in depth:
        assert len(record["newest_weight"]) == len(record["hidden_norm"]) == 5
        assert record["newest_weight"][0] is None and 0 < record["newest_weight"][1] < 1


def test_the_average_gradient_norm_survives_a_stop(make_trainer) -> None:
    settings = (
        "steps=4",
        "optimizer.warmup=1",
        "evaluation.every=null",
        "checkpoint.every=2",
        "instruments.depth=null",
    )
    straight = make_trainer(*settings, folder="straight")
    straight.fit()
    norms = [record["grad_norm"] for record in straight.records]
    assert len(norms) == 4 and straight.mean_grad_norm == pytest.approx(sum(norms) / 4, rel=1e-12)

    resumed = make_trainer(*settings, folder="straight")
    resumed.restore(resumed.checkpoints.at(2))
    assert resumed.mean_grad_norm == pytest.approx(sum(norms[:2]) / 2, rel=1e-12)
    while resumed.progress.step < 4:
        resumed.train_step()
    assert resumed.mean_grad_norm == straight.mean_grad_norm


def test_evaluations_before_the_last_step_may_take_fewer_tokens(make_trainer) -> None:
    trainer = make_trainer(
        "evaluation.every=10", "evaluation.tokens=600", "evaluation.tokens_in_training=99"
    )
    assert trainer.fit() and trainer.progress.step == 40
    tokens = {record["step"]: record.get("val_tokens") for record in trainer.records}
    assert (tokens[9], tokens[10], tokens[40]) == (None, 99, 600)


def test_the_time_of_a_run_is_counted_over_its_starts(
    make_trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only moves where the test says so."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("lrattnres.training.trainer.time", clock)

    def slow(owner: object, name: str, seconds: float) -> None:
        call = getattr(owner, name)

        def late(*given, **named):
            now[0] += seconds
            return call(*given, **named)

        monkeypatch.setattr(owner, name, late)

    slow(trainer_module, "measure", 1000.0)
    first, second = (
        make_trainer("evaluation.every=null", "checkpoint.every=100") for _ in range(2)
    )
    for trainer in (first, second):
        slow(trainer.streams, "next_batch", 1.0)
        slow(trainer.checkpoints, "save", 10.0)
        slow(trainer.optimizer, "step", 100.0)
    for _ in range(14):
        first.train_step()
    first.save()
    second.restore(second.checkpoints.at(14))
    assert second.spent == Spent(total=1414, waiting_for_data=14)
    assert second.fit()
    # 26 steps, each of which calls `measure`, and a save; that of the first start came after what
    # it stored.
    assert second.spent == Spent(
        total=1414 + 26 * 1101 + 10, waiting_for_data=40, evaluation=26_000, saving=10
    )
