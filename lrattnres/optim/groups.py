"""Which algorithm updates which parameter, and a check that no parameter is left out.

The parameters of the body are listed here. Those of the residual path come with the roles that the
path itself gives them, so a new path changes nothing in this file.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch.nn import Parameter

from lrattnres.residual.base import Role, pattern_of

Named = Iterable[tuple[str, Parameter]]
Roles = Mapping[str, Role]
Assignment = dict[str, list[tuple[str, Parameter]]]

PATH = "router."
"""What the names of the residual path's parameters begin with."""

BODY = {
    # Lookup tables: their rows are not the basis of one linear map.
    "embedding.weight": "adam",
    "head.weight": "adam",
    # Matrices that act on hidden states. Each is one matrix as it is stored: queries, keys and
    # values; gate and up; an output projection with the rows that write keys.
    "sublayers.*.input.weight": "muon",
    "sublayers.*.output.weight": "muon",
    # Norm gains are vectors.
    "sublayers.*.gain.gain": "adam",
    "sublayers.*.query_gain.gain": "adam",
    "sublayers.*.key_gain.gain": "adam",
    "final.gain": "adam",
}
"""The owner of each parameter outside the residual path; `*` stands for an index."""


def assign(parameters: Named, roles: Roles) -> Assignment:
    """Gives every parameter to the algorithm that updates it.

    A matrix of a single row or column is a vector: it is Adam's, although its table says Muon.

    Args:
        parameters: (name, parameter) pairs from `named_parameters(remove_duplicate=False)`. Without
            that argument torch leaves out the second name of a tied parameter.
        roles: the roles of the residual path's parameters, by their names inside the path, with
            every index replaced by `*`.

    Returns:
        The pairs of "muon" and of "adam", each in the order of the model.

    Raises:
        ValueError: names every parameter that has no owner or an unknown one, that is frozen, that
            is tied to another, or that is Muon's and not a matrix.
    """
    owners = BODY | {PATH + name: role.owner for name, role in roles.items()}
    owned: Assignment = {"muon": [], "adam": []}
    errors: list[str] = []
    first_name: dict[int, str] = {}
    for name, parameter in parameters:
        pattern = pattern_of(name)
        owner = owners.get(pattern)
        if owner == "muon" and parameter.ndim == 2 and 1 in parameter.shape:
            owner = "adam"
        if owner is None:
            where = (
                f"give {pattern.removeprefix(PATH)} a role in the roles of its residual path"
                if name.startswith(PATH)
                else f"list {pattern} in BODY of lrattnres/optim/groups.py"
            )
            errors.append(f"{name}: no algorithm owns it; {where}")
        elif owner not in owned:
            errors.append(f"{name}: its owner is {owner}; write {' or '.join(owned)}")
        elif owner == "muon" and parameter.ndim != 2:
            shape = tuple(parameter.shape)
            errors.append(f"{name}: Muon updates matrices, and its shape is {shape}; write adam")
        else:
            owned[owner].append((name, parameter))
        if not parameter.requires_grad:
            errors.append(f"{name}: requires_grad=False; register a constant as a buffer")
        if (first := first_name.setdefault(id(parameter), name)) != name:
            errors.append(f"{name}: the same tensor as {first}; each parameter needs its own")
    if errors:
        listed = "\n".join(f"  - {error}" for error in errors)
        raise ValueError(f"parameters that cannot be optimized:\n{listed}")
    return owned


def ownership_table(rates: Iterable[tuple[str, str, Named]]) -> str:
    """Who updates which parameter, as text: one line for each pattern, shape and learning rate.

    Args:
        rates: (owner, what its peak learning rate is, parameters), an owner's entries in a row.
            Shapes are rows x columns; elements are counted over the whole model.
    """
    lines: list[tuple[str, ...]] = [
        ("owner", "parameters", "shape", "tensors", "elements", "peak rate")
    ]
    totals: dict[str, list[int]] = {}
    for owner, entries in itertools.groupby(rates, key=lambda entry: entry[0]):
        rows: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for _, rate, parameters in entries:
            for name, parameter in parameters:
                shape = " x ".join(map(str, parameter.shape))
                rows[pattern_of(name), shape, rate].append(parameter.numel())
        for (pattern, shape, rate), sizes in rows.items():
            lines.append((owner, pattern, shape, str(len(sizes)), f"{sum(sizes):,}", rate))
        totals[owner] = [size for sizes in rows.values() for size in sizes]
        lines.append(_total(owner, totals[owner]))
    lines.append(_total("all", [size for sizes in totals.values() for size in sizes]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place in (3, 4) else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _total(owner: str, sizes: list[int]) -> tuple[str, ...]:
    return (owner, "total", "", str(len(sizes)), f"{sum(sizes):,}", "")
