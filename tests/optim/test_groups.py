"""Who owns which parameter: counted by hand, and every way to get it wrong is named."""

import pytest
import torch
from torch import nn

from lrattnres.optim.groups import OWNERS, Owner, assign, ownership_table


class Sublayer(nn.Module):
    def __init__(self, wide: int, narrow: int, dim: int, emit: int):
        super().__init__()
        self.input = nn.Linear(dim, wide, bias=False)
        self.output = nn.Linear(narrow, dim + emit, bias=False)


class Router(nn.Module):
    def __init__(self, queries: int, dim: int, rank: int):
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(queries, rank))
        self.embedding_key = nn.Linear(dim, rank, bias=False)


class Model(nn.Module):
    """The names and shapes of a p_lr model: 2 blocks, vocabulary 11, d 8, SwiGLU 12, r 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.sublayers = nn.ModuleList(
            Sublayer(*sizes, dim=8, emit=2) for _ in range(2) for sizes in ((24, 8), (24, 12))
        )
        self.router = Router(4, 8, 2)


def test_every_parameter_has_one_owner() -> None:
    model = Model()
    owned = assign(model)
    assert [name for name, _ in owned["adam"]] == [
        "embedding.weight",
        "head.weight",
        "router.queries",
    ]
    assert len(owned["muon"]) == 4 * 2 + 1
    assert (
        sum(parameter.numel() for _, parameter in owned["muon"])
        == 4 * 24 * 8 + 2 * 10 * 8 + 2 * 10 * 12 + 2 * 8
    )
    assert {id(parameter) for pairs in owned.values() for _, parameter in pairs} == {
        id(p) for p in model.parameters()
    }
    pairs = assign(model.named_parameters(remove_duplicate=False))
    assert [name for name, _ in pairs["muon"]] == [name for name, _ in owned["muon"]]


def test_the_table_counts_by_pattern_and_shape() -> None:
    rows = [line.split("  ") for line in ownership_table(assign(Model())).splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["owner", "parameters", "shape", "tensors", "elements"],
        ["muon", "sublayers.*.input.weight", "24 x 8", "4", "768"],
        ["muon", "sublayers.*.output.weight", "10 x 8", "2", "160"],
        ["muon", "sublayers.*.output.weight", "10 x 12", "2", "240"],
        ["muon", "router.embedding_key.weight", "2 x 8", "1", "16"],
        ["muon", "total", "9", "1,184"],
        ["adam", "embedding.weight", "11 x 8", "1", "88"],
        ["adam", "head.weight", "11 x 8", "1", "88"],
        ["adam", "router.queries", "4 x 2", "1", "8"],
        ["adam", "total", "3", "184"],
        ["all", "total", "12", "1,368"],
    ]


def test_unowned_parameters_are_all_named() -> None:
    model = Model()
    model.gain = nn.Parameter(torch.ones(8))
    model.sublayers[2].bias = nn.Parameter(torch.ones(8))
    with pytest.raises(ValueError, match="optimized") as raised:
        assign(model)
    assert "gain: owned by no algorithm; list gain under exactly one owner" in str(raised.value)
    assert "sublayers.2.bias: owned by no algorithm; list sublayers.*.bias" in str(raised.value)
    assert len(raised.value.args[0].splitlines()) == 1 + 2


def test_a_name_that_only_contains_a_pattern_is_unowned() -> None:
    for name in ("_orig_mod.head.weight", "sublayers.0.extra.input.weight", "head.weight.scale"):
        with pytest.raises(ValueError, match=f"{name}: owned by no algorithm"):
            assign([(name, nn.Parameter(torch.ones(2, 2)))])


def test_doubly_owned_parameters_are_named() -> None:
    greedy = Owner("muon", (*OWNERS[0].patterns, "head.weight"))
    with pytest.raises(ValueError, match=r"head.weight: owned by muon and adam"):
        assign(Model(), [greedy, OWNERS[1]])


def test_tied_parameters_are_named() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    with pytest.raises(ValueError, match=r"head.weight: the same tensor as embedding.weight"):
        assign(model)


def test_frozen_parameters_are_named() -> None:
    model = Model()
    model.router.queries.requires_grad_(False)
    with pytest.raises(ValueError, match=r"router.queries: requires_grad=False"):
        assign(model)


def test_muon_owns_matrices_only() -> None:
    model = Model()
    model.get_submodule("sublayers.1.input").weight = nn.Parameter(torch.ones(3, 4, 5))
    with pytest.raises(
        ValueError,
        match=r"sublayers.1.input.weight: Muon updates matrices, and this has shape \(3, 4, 5\)",
    ):
        assign(model)


def test_an_owner_without_parameters_is_named() -> None:
    with pytest.raises(ValueError, match=r"muon: owns no parameter(.|\n)*adam: owns no parameter"):
        assign([])
