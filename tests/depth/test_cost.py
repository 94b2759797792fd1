"""The cost model against every added-FLOPs entry of the paper's Table 1 and the numbers of its Appendix A.6."""

import csv
from pathlib import Path

import pytest
import torch

from lrattnres.config import ModelConfig
from lrattnres.depth.cost import cost
from lrattnres.depth.router import VARIANTS
from lrattnres.model.transformer import Transformer

PAPER = {"layers": 24, "dim": 1024, "heads": 16, "mlp_width": 2816, "context": 2048, "vocabulary": 100_277}
ROWS = list(csv.DictReader((Path(__file__).parent / "table1.csv").open()))


def of_paper(residual: str, rank: int | None = None, blocks: int | None = None) -> ModelConfig:
    return ModelConfig(residual=residual, rank=rank, blocks=blocks, **PAPER)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["row"])
def test_added_flops_of_table_1(row: dict[str, str]) -> None:
    config = of_paper(row["residual"], int(row["rank"] or 0) or None, int(row["blocks"] or 0) or None)
    assert f"{cost(config, VARIANTS[row['residual']].keys).added_percent:.4f}" == row["added_flops_percent"]


def test_numbers_of_appendix_a6() -> None:
    projected = cost(of_paper("p_lr", 32), VARIANTS["p_lr"].keys)
    assert projected.projection == 2_981_888
    assert projected.parameters == 2_983_424
    assert cost(of_paper("s_lr", 32), VARIANTS["s_lr"].keys).parameters == 1_536


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
def test_parameters_of_the_paper(residual: str, rank: int | None, blocks: int | None, parameters: int) -> None:
    config = of_paper(residual, rank, blocks)
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert cost(config, VARIANTS[residual].keys).parameters == parameters - 513_648_640
