"""Who owns which parameter: counted by hand, and every way to get it wrong is named."""

import hashlib

import pytest
import torch
from torch import nn

from lrattnres.config import BlockScale, DepthConfig, ModelConfig, Sources
from lrattnres.model.attention import BACKENDS
from lrattnres.model.transformer import build_model
from lrattnres.optim.groups import PATH, assign, ownership_table, pattern_of
from lrattnres.residual.base import Role, path_of, paths

ROLES = {
    "queries": Role("adam", False, 0.0),
    "mixers.*.alpha": Role("adam", False, 0.0),
    "lambdas.*": Role("adam", False, 1.0),
    "embedding_key.weight": Role("muon", True, 0.0),
}
SIZES = {"layers": 2, "dim": 8, "heads": 2, "mlp_width": 12, "context": 8, "vocabulary": 11}


class Sublayer(nn.Module):
    def __init__(self, wide: int, narrow: int, dim: int, emit: int):
        super().__init__()
        self.input = nn.Linear(dim, wide, bias=False)
        self.output = nn.Linear(narrow, dim + emit, bias=False)


class Path(nn.Module):
    """A residual path of no published kind: modules in a list, and parameters in a list."""

    def __init__(self, queries: int, dim: int, rank: int):
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(queries, rank))
        self.mixers = nn.ModuleList(nn.Module() for _ in range(12))
        for mixer in self.mixers:
            mixer.alpha = nn.Parameter(torch.zeros(3))
        self.lambdas = nn.ParameterList(torch.ones(2) for _ in range(11))
        self.embedding_key = nn.Linear(dim, rank, bias=False)


class Model(nn.Module):
    """The names and shapes of a model with 2 blocks, vocabulary 11, d 8, SwiGLU 12."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.sublayers = nn.ModuleList(
            Sublayer(*sizes, dim=8, emit=rank) for _ in range(2) for sizes in ((24, 8), (24, 12))
        )
        self.router = Path(4, 8, rank)

    def owned(self, **roles: Role) -> dict[str, list[tuple[str, nn.Parameter]]]:
        return assign(self.named_parameters(remove_duplicate=False), ROLES | roles)


def names(owned: dict[str, list[tuple[str, nn.Parameter]]], owner: str) -> list[str]:
    return [name for name, _ in owned[owner]]


def test_every_parameter_has_one_owner() -> None:
    model = Model()
    owned = model.owned()
    assert names(owned, "adam") == [
        "embedding.weight",
        "head.weight",
        "router.queries",
        *(f"router.mixers.{index}.alpha" for index in range(12)),
        *(f"router.lambdas.{index}" for index in range(11)),
    ]
    assert len(owned["muon"]) == 4 * 2 + 1
    size = sum(parameter.numel() for _, parameter in owned["muon"])
    assert size == 4 * 24 * 8 + 2 * 10 * 8 + 2 * 10 * 12 + 2 * 8
    found = [id(parameter) for pairs in owned.values() for _, parameter in pairs]
    assert sorted(found) == sorted(id(parameter) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("sublayers.7.input.weight", "sublayers.*.input.weight"),
        ("router.alpha.3", "router.alpha.*"),
        ("router.12.7", "router.*.*"),
        ("3.alpha", "*.alpha"),
        ("router.w_2.layer1.4x", "router.w_2.layer1.4x"),
    ],
)
def test_every_index_of_a_name_is_a_star(name: str, pattern: str) -> None:
    assert pattern_of(name) == pattern


def test_the_table_counts_by_pattern_shape_and_rate() -> None:
    owned = Model().owned()
    adam = owned["adam"]
    table = ownership_table(
        [
            ("muon", "muon_lr=0.5", owned["muon"]),
            ("adam", "adam_lr=0.25", adam[:2]),
            ("adam", "routing_lr=0.125", adam[2:]),
        ]
    )
    rows = [line.split("  ") for line in table.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["owner", "parameters", "shape", "tensors", "elements", "peak rate"],
        ["muon", "sublayers.*.input.weight", "24 x 8", "4", "768", "muon_lr=0.5"],
        ["muon", "sublayers.*.output.weight", "10 x 8", "2", "160", "muon_lr=0.5"],
        ["muon", "sublayers.*.output.weight", "10 x 12", "2", "240", "muon_lr=0.5"],
        ["muon", "router.embedding_key.weight", "2 x 8", "1", "16", "muon_lr=0.5"],
        ["muon", "total", "9", "1,184"],
        ["adam", "embedding.weight", "11 x 8", "1", "88", "adam_lr=0.25"],
        ["adam", "head.weight", "11 x 8", "1", "88", "adam_lr=0.25"],
        ["adam", "router.queries", "4 x 2", "1", "8", "routing_lr=0.125"],
        ["adam", "router.mixers.*.alpha", "3", "12", "36", "routing_lr=0.125"],
        ["adam", "router.lambdas.*", "2", "11", "22", "routing_lr=0.125"],
        ["adam", "total", "26", "242"],
        ["all", "total", "35", "1,426"],
    ]


def test_a_matrix_of_one_row_or_column_is_adams() -> None:
    model = Model(rank=1)
    model.get_submodule("sublayers.1.output").weight = nn.Parameter(torch.ones(9, 1))
    owned = model.owned()
    vectors = {"router.embedding_key.weight", "sublayers.1.output.weight"}
    assert vectors < set(names(owned, "adam")) and not vectors & set(names(owned, "muon"))


def test_unowned_parameters_are_all_named() -> None:
    model = Model()
    model.gain = nn.Parameter(torch.ones(8))
    model.sublayers[2].bias = nn.Parameter(torch.ones(8))
    model.router.extra = nn.ParameterList([torch.ones(8)])
    with pytest.raises(ValueError, match="optimized") as raised:
        model.owned()
    text = str(raised.value)
    assert "- gain: no algorithm owns it; list gain in BODY of lrattnres/optim/groups.py" in text
    assert "sublayers.2.bias: no algorithm owns it; list sublayers.*.bias in BODY" in text
    assert "router.extra.0: no algorithm owns it; give extra.* a role" in text
    assert len(text.splitlines()) == 1 + 3


def test_a_name_that_only_contains_a_pattern_is_unowned() -> None:
    for name in ("_orig_mod.head.weight", "sublayers.0.extra.input.weight", "head.weight.scale"):
        with pytest.raises(ValueError, match=f"{name}: no algorithm owns it"):
            assign([(name, nn.Parameter(torch.ones(2, 2)))], {})


def test_an_owner_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"router.queries: its owner is sgd; write muon or adam"):
        Model().owned(queries=Role("sgd", False, 0.0))


def test_tied_parameters_are_named() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    with pytest.raises(ValueError, match=r"head.weight: the same tensor as embedding.weight"):
        model.owned()


def test_frozen_parameters_are_named() -> None:
    model = Model()
    model.router.queries.requires_grad_(False)
    with pytest.raises(ValueError, match=r"router.queries: requires_grad=False"):
        model.owned()


def test_muon_owns_matrices_only() -> None:
    model = Model()
    model.get_submodule("sublayers.1.input").weight = nn.Parameter(torch.ones(3, 4, 5))
    wrong = r"sublayers.1.input.weight: Muon updates matrices, and its shape is \(3, 4, 5\)"
    with pytest.raises(ValueError, match=wrong):
        model.owned()


@pytest.mark.parametrize("residual", list(paths()))
@pytest.mark.parametrize(
    ("gate", "depth"),
    [
        (False, DepthConfig()),
        (True, DepthConfig(heads=2, input_queries=True, learned_scale=True, query_std=0.5)),
        (False, DepthConfig(embedding_source=False, block_scale=BlockScale.mean)),
        (True, DepthConfig(embedding_source=False, sources=Sources.states, query_std=0.5)),
    ],
)
def test_the_roles_of_a_router_are_those_of_its_parameters(
    residual: str, gate: bool, depth: DepthConfig
) -> None:
    """Every parameter has a role, every role a parameter, and each starts as the model starts."""
    config = ModelConfig(residual, 4, 2, **SIZES, gate=gate, depth=depth)
    device = torch.device("cpu")
    model = build_model(
        config, seed=3, device=device, attention=BACKENDS["sdpa"], dtype=torch.float32
    )
    roles, found = path_of(config).roles(config), dict(model.router.named_parameters())
    assert set(roles) == {pattern_of(name) for name in found}
    for name, parameter in found.items():
        start = roles[pattern_of(name)].start
        if callable(start):
            digest = hashlib.blake2b(f"3/{PATH}{name}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
            expected = start(parameter.shape, torch.Generator().manual_seed(seed))
        else:
            expected = torch.full_like(parameter, start)
        assert torch.equal(parameter, expected), name
    assert {name for name in roles if roles[name].owner == "muon"} <= {"embedding_key.weight"}
