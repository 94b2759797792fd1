"""The cost model against every added-FLOPs entry of the paper's Table 1 and the numbers of its Appendix A.6."""

import csv
import math
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lrattnres.config import ModelConfig
from lrattnres.model.transformer import Transformer
from lrattnres.residual.cost import Cost, cost
from lrattnres.residual.plan import plan_of
from tests.residual.making import ATTENTION

PAPER = {
    "layers": 24,
    "dim": 1024,
    "heads": 16,
    "mlp_width": 2816,
    "context": 2048,
    "vocabulary": 100_277,
}
ROWS = list(csv.DictReader((Path(__file__).parent / "table1.csv").open()))


def of_paper(residual: str, rank: int | None = None, blocks: int | None = None) -> ModelConfig:
    return ModelConfig(residual=residual, rank=rank, blocks=blocks, **PAPER)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["row"])
def test_added_flops_of_table_1(row: dict[str, str]) -> None:
    config = of_paper(
        row["residual"], int(row["rank"] or 0) or None, int(row["blocks"] or 0) or None
    )
    assert f"{cost(config).added_percent:.4f}" == row["added_flops_percent"]


def of(residual: str, rank: int | None = None, blocks: int | None = None) -> Cost:
    return cost(of_paper(residual, rank, blocks))


def test_numbers_of_appendix_a6() -> None:
    projected, sliced, value = of("p_lr", 32), of("s_lr", 32), of("attn_res")
    for low in (projected, sliced):
        assert f"{100 * (1 - low.added.mixing / value.added.mixing):.2f}" == "48.44"
    assert (projected.added.projections, sliced.added.projections) == (2_981_888, 0)
    assert (projected.added.parameters, sliced.added.parameters, value.added.parameters) == (
        2_983_424,
        1_536,
        49_152,
    )
    assert 100 * (projected.added.carried / value.added.carried - 1) == 3.125
    assert sliced.added.carried == value.added.carried
    # The paper's 0.957% leaves out W_0 and the queries; its 0.9673% only the queries.
    assert f"{100 * (projected.added.projections - 32 * 1024) / projected.core:.3f}" == "0.957"
    assert f"{100 * projected.added.projections / projected.core:.4f}" == "0.9673"
    assert f"{100 * projected.added.mixing / projected.core:.4f}" == "0.4193"
    assert f"{100 * of('p_lr', 32, 8).added.mixing / projected.core:.4f}" == "0.0904"


@pytest.mark.parametrize(
    ("blocks", "reads", "retained"), [(None, 1224, 49), (4, 168, 5), (8, 264, 9), (16, 456, 17)]
)
def test_rows_of_table_3(blocks: int | None, reads: int, retained: int) -> None:
    """Depth kernel 2dS, (d + r)S; key projection r[L(d + m) + d]; cache K·d, K(d + r); parameters 2Ld, 2Lr and the rows."""
    rows = 64 * (24 * (1024 + 2816) + 1024)
    for residual, rank, kernel, projection, cache, parameters in (
        ("baseline", None, 0, 0, 1024, 0),
        ("attn_res", None, 2 * 1024 * reads, 0, 1024 * retained, 48 * 1024),
        ("delta", None, 2 * 1024 * reads, 0, 1024 * (retained + 1), 48 * 1024),
        ("s_lr", 64, (1024 + 64) * reads, 0, 1024 * retained, 48 * 64),
        ("p_lr", 64, (1024 + 64) * reads, rows, (1024 + 64) * retained, rows + 48 * 64),
    ):
        found = of(residual, rank, blocks)
        assert found.added == (parameters, kernel, projection, cache)


@pytest.mark.parametrize("blocks", [None, 4])
@pytest.mark.parametrize("residual", ["baseline", *ATTENTION])
def test_what_torch_counts(residual: str, blocks: int | None) -> None:
    """torch counts matrix products. A score is a matrix times a vector and a mixture multiplies and adds in place, so both
    are counted here by formulas of their own: 2·n·r and 2·n·d. What remains, by operator, is what the closed form says:

    - the first source of a mixture has nothing to be added to, so torch sees M + 1 additions fewer than the paper;
    - plain attention computes the whole square of a window, of which a causal kernel needs half.
    """
    size = {"layers": 3, "dim": 32, "heads": 2, "mlp_width": 48, "context": 16, "vocabulary": 50}
    config = ModelConfig(residual=residual, rank=8, blocks=blocks, **size)
    expected = cost(config)
    model, aten, tokens = Transformer(config), torch.ops.aten, torch.randint(50, (2, 16))
    own = {
        aten.mv: lambda matrix, vector, **_: 2 * math.prod(matrix),
        aten.addcmul: lambda mixture, weight, value, **_: 2 * math.prod(value),
    }
    with (
        FlopCounterMode(display=False, custom_mapping=own) as counter,
        sdpa_kernel(SDPBackend.MATH),
        torch.no_grad(),
    ):
        model(tokens, model.mask(None, 2, 16))
    counted = {
        operator: flops // (2 * tokens.numel())
        for operator, flops in counter.get_flop_counts()["Global"].items()
    }
    plan, routed = plan_of(config), residual != "baseline"
    rank = model.router.rank if routed else 0
    assert counted[aten.mm] == expected.core + expected.added.projections + expected.head
    assert counted[aten.bmm] == 2 * expected.attention
    assert counted.get(aten.mv, 0) == rank * plan.reads
    assert counted.get(aten.addcmul, 0) == routed * 32 * (plan.reads - 6)
    assert set(counted) <= {aten.mm, aten.bmm, aten.mv, aten.addcmul}


def test_a_training_step_is_three_forward_passes() -> None:
    config = ModelConfig(
        residual="p_lr",
        rank=8,
        blocks=4,
        layers=3,
        dim=32,
        heads=2,
        mlp_width=48,
        context=16,
        vocabulary=50,
    )
    model, tokens = Transformer(config), torch.randint(50, (2, 16))
    expected = cost(config)
    with FlopCounterMode(display=False) as counter:
        model(tokens, model.mask(None, 2, 16)).sum().backward()
    products = expected.core + expected.added.projections + expected.head
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == 6 * tokens.numel() * products
    left_out = expected.added.mixing + expected.attention
    assert expected.training_flops == 6 * (products + left_out)


@pytest.mark.parametrize(
    ("residual", "rank", "blocks", "parameters"),
    [
        ("baseline", None, None, 513_648_640),
        ("attn_res", None, None, 513_697_792),
        ("attn_res", None, 8, 513_697_792),
        ("s_lr", 32, None, 513_650_176),
        ("s_lr", 64, 8, 513_651_712),
        ("p_lr", 32, None, 516_632_064),
        ("delta", None, 8, 513_697_792),
    ],
)
def test_parameters_of_the_paper(
    residual: str, rank: int | None, blocks: int | None, parameters: int
) -> None:
    config = of_paper(residual, rank, blocks)
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    found = cost(config)
    assert (found.model_parameters, found.added.parameters) == (
        parameters,
        parameters - 513_648_640,
    )
