"""Which algorithm updates which parameter: one table of name patterns, and a check that it leaves nothing out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn import Parameter

Named = nn.Module | Iterable[tuple[str, Parameter]]
Assignment = dict[str, list[tuple[str, Parameter]]]


@dataclass(frozen=True)
class Owner:
    """An algorithm and the names of its parameters; `*` stands for the index of a sub-layer."""

    name: str
    patterns: tuple[str, ...]


DEPTH = (
    "router.ablations.query_projections",
    "router.ablations.source_scales",
)  # small, and start at a constant, as queries do
GAINS = (
    "sublayers.*.gain.gain",
    "sublayers.*.query_gain.gain",
    "sublayers.*.key_gain.gain",
    "final.gain",
)

OWNERS = (
    # Matrices that act on hidden states, each as it is stored: qkv, up_gate, and output with its key rows, are one each.
    Owner(
        "muon",
        ("sublayers.*.input.weight", "sublayers.*.output.weight", "router.embedding_key.weight"),
    ),
    # Lookup tables and vectors, whose rows are no basis of one linear map.
    Owner(
        "adam",
        ("embedding.weight", "head.weight", "router.queries", "router.gates", *DEPTH, *GAINS),
    ),
)


def pattern_of(name: str) -> str:
    """The name with every index replaced by `*`: sublayers.7.input.weight -> sublayers.*.input.weight."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def assign(parameters: Named, owners: Sequence[Owner] = OWNERS) -> Assignment:
    """Owner's name -> its (name, parameter) pairs, in the order of the model.

    Takes a module, or (name, parameter) pairs from `named_parameters(remove_duplicate=False)`: without that argument
    torch leaves out the second name of a tied parameter, and nothing is left to be checked.

    Raises ValueError that names every parameter with no owner or several, frozen, tied to another, or owned by Muon
    and not a matrix, and every owner that is left without a parameter.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.named_parameters(remove_duplicate=False)
    owned: Assignment = {owner.name: [] for owner in owners}
    faults: list[str] = []
    first_name: dict[int, str] = {}
    for name, parameter in parameters:
        names = [owner.name for owner in owners if pattern_of(name) in owner.patterns]
        if len(names) != 1:
            found = f"owned by {' and '.join(names)}" if names else "owned by no algorithm"
            faults.append(
                f"{name}: {found}; list {pattern_of(name)} under exactly one owner in lrattnres/optim/groups.py"
            )
        if not parameter.requires_grad:
            faults.append(
                f"{name}: requires_grad=False; every parameter is trained, register a constant as a buffer"
            )
        if first_name.setdefault(id(parameter), name) != name:
            faults.append(
                f"{name}: the same tensor as {first_name[id(parameter)]}; give each its own, tied weights have no owner"
            )
        if names == ["muon"] and parameter.ndim != 2:
            faults.append(
                f"{name}: Muon updates matrices, and this has shape {tuple(parameter.shape)}; let Adam own it"
            )
        if len(names) == 1:
            owned[names[0]].append((name, parameter))
    faults += [
        f"{name}: owns no parameter; is this the model of lrattnres/model?"
        for name, pairs in owned.items()
        if not pairs
    ]
    if faults:
        raise ValueError(
            "parameters that cannot be optimized:\n" + "\n".join(f"  - {fault}" for fault in faults)
        )
    return owned


def ownership_table(owned: Assignment) -> str:
    """The assignment as text, one line for each pattern and shape, with totals; printed when a run starts.

    Shapes are rows x columns, elements are counted over the whole model.
    """
    lines = [("owner", "parameters", "shape", "tensors", "elements")]
    for owner, pairs in owned.items():
        rows: dict[tuple[str, str], list[int]] = defaultdict(list)
        for name, parameter in pairs:
            rows[pattern_of(name), " x ".join(map(str, parameter.shape))].append(parameter.numel())
        lines += [(owner, *key, str(len(sizes)), f"{sum(sizes):,}") for key, sizes in rows.items()]
        lines.append(_total(owner, pairs))
    lines.append(_total("all", [pair for pairs in owned.values() for pair in pairs]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.ljust(width) if place < 3 else cell.rjust(width)
            for place, (cell, width) in enumerate(cells)
        )
        for cells in (zip(line, widths, strict=True) for line in lines)
    ]
    return "\n".join(aligned)


def _total(owner: str, pairs: list[tuple[str, Parameter]]) -> tuple[str, str, str, str, str]:
    return (
        owner,
        "total",
        "",
        str(len(pairs)),
        f"{sum(parameter.numel() for _, parameter in pairs):,}",
    )
