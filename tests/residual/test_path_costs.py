"""What each residual path costs at the shape of the low-rank paper: added parameters and
multiply-adds a token."""

import pytest

from lrattnres.config import ModelConfig, parse
from lrattnres.residual.base import path_of
from lrattnres.residual.cost import cost

PAPER = {"layers": 24, "dim": 1024, "heads": 16, "mlp_width": 2816, "context": 2048}
# (path, its settings, rank, parameters, multiply-adds, values that a state holds in units of d)
PATHS = [
    ("hc", {"n": 2, "dynamic": False}, None, 384, 393_216, 3),
    ("hc", {"n": 4, "dynamic": False}, None, 1_152, 1_179_648, 5),
    ("hc", {"n": 2}, None, 197_088, 786_432, 3),
    ("hc", {"n": 4}, None, 296_160, 2_359_296, 5),
    ("mhc", {"n": 2}, None, 791_059, 1_185_792, 3),
    ("mhc", {"n": 4}, None, 4_736_277, 5_918_720, 5),
    ("mhc", {"n": 4, "head": "sum"}, None, 4_719_888, 5_898_240, 5),
    ("frac", {"m": 2}, None, 123_456, 491_520, 2),
    ("frac", {"m": 4}, None, 112_416, 884_736, 2),
    ("frac", {"m": 4, "dynamic": False}, None, 1_728, 442_368, 2),
    ("laurel", {"parts": "rw"}, None, 96, 98_304, 1),
    ("laurel", {"parts": "lr"}, 4, 393_216, 393_216, 1),
    ("laurel", {}, 4, 393_312, 491_520, 1),
    ("laurel", {}, 16, 1_572_960, 1_671_168, 1),
    ("laurel", {}, None, 3_145_824, 3_244_032, 1),
    ("laurel", {}, 64, 6_291_552, 6_389_760, 1),
    ("laurel", {"parts": "rw+pa", "back": 3}, 32, 3_145_968, 3_388_416, 3),
    ("postnorm", {}, None, 0, 0, 1),
    ("postnorm", {"branch": 2.5}, None, 0, 49_152, 1),
    ("highway", {}, None, 49_200, 147_456, 1),
    ("highway", {"gate": "vector"}, None, 50_380_800, 50_429_952, 1),
    ("altup", {"n": 2}, None, 144, 147_456, 3),
    ("altup", {"n": 4}, None, 480, 491_520, 5),
    ("altup", {"n": 4, "dynamic": True}, None, 100_704, 690_048, 5),
    ("denseformer", {}, None, 324, 331_776, 25),
    ("denseformer", {"dilation": 4, "period": 5}, None, 15, 15_360, 25),
    ("mudd", {}, None, 2_405_445, 3_654_528, 28),
    ("mudd", {"norms": False}, None, 2_355_269, 3_604_352, 28),
    ("mudd", {"ways": 1}, None, 1_711_236, 2_042_688, 25),
    ("mudd", {"ways": 1, "norms": False}, None, 1_661_060, 1_992_512, 25),
    ("mudd", {"dynamic": False, "norms": False}, None, 1_221, 1_250_304, 28),
    ("mudd", {"norms": False, "round64": False}, None, 1_409_209, 2_658_292, 28),
    ("resformer", {}, None, 46, 47_104, 2),
    ("svformer", {}, None, -24_117_248, -24_117_248, 2),
    ("lime", {}, None, 76_544, 9_797_632, 47),
    ("lambdas", {}, None, 48, 49_152, 2),
    ("lambdas", {"backout": True}, None, 49, 50_176, 3),
    ("lambdas", {"unet": True, "backout": True}, None, 61, 62_464, 13),
    ("dca", {}, None, 1_021_952, 1_894_400, 27),
    ("dca", {"last": 2}, None, 355_328, 561_152, 7),
    ("dca", {"version": 1, "ways": 1}, None, 325, 332_800, 26),
    ("dca", {"version": 2, "ways": 1}, None, 332_800, 332_800, 26),
    ("dca", {"ways": 1}, None, 358_400, 665_600, 26),
]
# The same for the ablations of the attention-residual paths.
ABLATIONS = [
    ({"mixing": "scalars"}, 1_224, 1_253_376, 49),
    ({"mixing": "sigmoid"}, 49_152, 2_506_752, 49),
    ({"window": 8}, 49_152, 827_392, 9),
    ({"mixing": "scalars", "window": 8}, 404, 413_696, 9),
]


@pytest.mark.parametrize(
    ("residual", "path", "rank", "parameters", "compute", "carried"),
    PATHS,
    ids=lambda value: str(value) if isinstance(value, (str, dict)) else "",
)
def test_added_at_the_shape_of_the_paper(
    residual: str, path: dict, rank: int | None, parameters: int, compute: int, carried: int
) -> None:
    given = {"residual": residual, "rank": rank, "blocks": None, "vocabulary": 100_277}
    config = parse(ModelConfig, PAPER | given | ({"path": path} if path else {}))
    assert not list(path_of(config).errors(config))
    found = cost(config)
    assert found.core == 308_281_344
    assert (found.added.parameters, found.added_compute) == (parameters, compute)
    assert found.added.carried == carried * 1024


@pytest.mark.parametrize(("depth", "parameters", "compute", "carried"), ABLATIONS, ids=str)
def test_ablations_at_the_shape_of_the_paper(
    depth: dict, parameters: int, compute: int, carried: int
) -> None:
    given = {"residual": "attn_res", "rank": None, "blocks": None, "vocabulary": 100_277}
    found = cost(parse(ModelConfig, PAPER | given | {"depth": depth}))
    assert (found.added.parameters, found.added_compute) == (parameters, compute)
    assert found.added.carried == carried * 1024
