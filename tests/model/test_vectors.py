"""Recorded results of the papers' released code: logits, losses and every gradient, float32."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lrattnres.config import ModelConfig
from lrattnres.model.head import token_losses
from lrattnres.model.transformer import Transformer

VECTORS = Path(__file__).parents[1] / "vectors"
NAMES = {
    "embed": "embedding.weight",
    "head": "head.weight",
    "embed_key": "router.embedding_key.weight",
    "queries": "router.queries",
}
for layer in range(4):
    for offset, part, matrix in ((0, "attn", "qkv"), (1, "mlp", "up_gate")):
        NAMES[f"layers/{layer}/{matrix}"] = f"sublayers.{2 * layer + offset}.input.weight"
        NAMES[f"layers/{layer}/{part}_out"] = f"sublayers.{2 * layer + offset}.output.weight"


def relative(found: torch.Tensor, truth: np.ndarray) -> float:
    return float(np.abs(found.detach().numpy() - truth).max() / np.abs(truth).max())


@pytest.mark.parametrize(
    ("file", "residual", "rank", "blocks"),
    [("baseline", "baseline", None, None), ("p_lr_blocks2_rank4", "p_lr", 4, 2)],
)
def test_logits_losses_and_gradients(
    file: str, residual: str, rank: int | None, blocks: int | None
) -> None:
    with np.load(VECTORS / f"{file}.npz") as vectors:
        recorded = dict(vectors)
    sizes = {"layers": 4, "dim": 32, "heads": 4, "mlp_width": 48, "context": 24, "vocabulary": 97}
    model = Transformer(ModelConfig(residual=residual, rank=rank, blocks=blocks, **sizes))
    parameters = dict(model.named_parameters())
    names = {theirs: ours for theirs, ours in NAMES.items() if f"param/{theirs}" in recorded}
    assert set(names.values()) == set(parameters)
    for theirs, ours in names.items():
        parameters[ours].data.copy_(torch.from_numpy(recorded[f"param/{theirs}"]))

    logits = model(torch.from_numpy(recorded["idx"]), model.mask(None, 2, 24))
    sums = token_losses(logits, torch.from_numpy(recorded["targets"])).sums()
    loss, penalty = sums.cross_entropy / sums.tokens, sums.squared_logsumexp / sums.tokens
    (loss + 1e-5 * penalty).backward()

    assert relative(logits, recorded["logits"]) < 1e-5
    assert loss.item() == pytest.approx(float(recorded["cross_entropy"]), rel=1e-6)
    assert penalty.item() == pytest.approx(float(recorded["mean_squared_logsumexp"]), rel=1e-6)
    for theirs, ours in names.items():
        assert relative(parameters[ours].grad, recorded[f"grad/{theirs}"]) < 1e-4, ours
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values()])
    assert norm.item() == pytest.approx(float(recorded["grad_norm"]), rel=1e-5)
