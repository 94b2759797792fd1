"""Which runs may stand in one table, and which are seeds of the same thing.

Two runs can be compared if every setting on which results depend is the same, but for the seed and the residual path,
and if both read the same corpus and tokenizer by their fingerprints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lrattnres.report.paper import PaperRow, row_of
from lrattnres.report.read import DEFAULTS, SCHEMA, Run
from lrattnres.residual.base import paths

PATH = tuple(f"model.{name}" for name in ("residual", "rank", "blocks", "routing"))
# All of the model but its residual path.
SIZE = tuple(
    key
    for key in SCHEMA
    if key.startswith("model.")
    and key not in (*PATH, "model.gate")
    and not key.startswith("model.depth.")
)
MATCHED = (
    "steps",
    "optimizer.warmup",
    "model.layers",
    "model.dim",
    "model.heads",
    "model.mlp_width",
)  # what a match may alter


@dataclass(frozen=True)
class Choice:
    """The residual path of a run: what differs between the rows of a table. blocks=None: full; `others` are further
    settings of the model that are not at their defaults; `matched` what the run was matched to another by.
    """

    residual: str
    blocks: int | None
    rank: int | None
    routing: str | None
    others: tuple[tuple[str, Any], ...]
    matched: tuple[tuple[str, Any], ...]

    @property
    def routed(self) -> bool:
        return self.residual not in paths() or paths()[self.residual].attends

    @property
    def plain(self) -> bool:
        """Whether it is the plain residual stream."""
        return self.residual in paths() and paths()[self.residual].plain

    @property
    def label(self) -> str:
        """Short enough for a legend; the settings' own names."""
        parts = [self.residual]
        parts += [f"N={self.blocks}" if self.blocks else "full"] if self.routed else []
        parts += [f"r={self.rank}"] if self.rank else []
        parts += [self.routing] if self.routing else []
        return " ".join(
            [
                *parts,
                *(
                    f"{name.removeprefix('model.')}={value}"
                    for name, value in (*self.others, *self.matched)
                ),
            ]
        )


@dataclass(frozen=True)
class Entry:
    """The runs of one residual path, one a seed, by seed; `row` of the paper's table, if it is one."""

    choice: Choice
    row: PaperRow | None
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        return f"{self.row.row} {self.choice.label}" if self.row else self.choice.label

    @property
    def losses(self) -> dict[int, float]:
        """Held-out loss by seed."""
        return {run.seed: loss for run in self.runs if (loss := run.val_loss) is not None}


@dataclass
class Group:
    """Finished runs that can be compared, in the order of the paper's table, then the others."""

    name: str
    conditions: dict[str, Any]
    runs: list[Run]
    notes: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def plain(self) -> Entry | None:
        """The run with the plain residual stream, to which the others are compared."""
        return next(
            (entry for entry in self.entries if entry.choice.plain and not entry.choice.matched),
            None,
        )


def choice_of(run: Run) -> Choice:
    """`run`'s residual path in one spelling: N = 2L is full, and what a variant does not use is None."""
    settings = run.settings
    residual, rank, blocks, routing = (settings[key] for key in PATH)
    path = paths().get(residual)
    if path is not None:
        rank = rank if "rank" in path.uses else None
        blocks = (
            blocks if "blocks" in path.uses and blocks != 2 * settings["model.layers"] else None
        )
        routing = path.other_routing(routing)
    names = sorted(
        key for key in settings if key.startswith("model.") and key not in (*SIZE, *PATH)
    )
    others = tuple(
        (key, _hashable(settings[key])) for key in names if settings[key] != DEFAULTS.get(key)
    )
    matched = tuple(
        (key, _hashable(settings[key]))
        for key in sorted(settings)
        if _is_match(key) and settings[key] is not None
    )
    return Choice(residual, blocks, rank, routing, others, matched)


def compare(runs: list[Run]) -> tuple[list[Group], list[Run], list[str]]:
    """Groups, the one with the most runs first; unfinished runs; and duplicates and cautions, one sentence each."""
    unfinished = [run for run in runs if run.val_loss is None]
    finished = [run for run in runs if run.val_loss is not None]
    groups: list[Group] = []
    # Who states less joins a group of those who state more, so the order is: everything known, no fingerprints, matched.
    for run in sorted(finished, key=lambda run: (bool(choice_of(run).matched), not run.identity)):
        host = _host(run, groups)
        if host is None:
            host = Group("", conditions_of(run), [])
            groups.append(host)
        host.runs.append(run)
    groups.sort(key=lambda group: (-len(group.runs), group.runs[0].name))
    errors: list[str] = []
    for number, group in enumerate(groups):
        group.name = _letters(number)
        errors += _fill(group)
        if number:
            group.notes.append(
                f"Not in one table with group A, because {'; '.join(_differences(groups[0], group))}."
            )
    return groups, unfinished, errors


def conditions_of(run: Run) -> dict[str, Any]:
    """What must be equal for a comparison. Where the corpus lies does not count once its fingerprint is known."""
    settings = {
        key: value
        for key, value in run.settings.items()
        if (key in SIZE or not key.startswith("model."))
        and not _is_match(key)
        and key not in ("name", "seed")
        and not (key in SCHEMA and SCHEMA[key][1]["may_change"])
    }
    if run.identity:
        settings.pop("data.root", None)
    return settings | {f"fingerprint of the {key}": value for key, value in run.identity.items()}


def _host(run: Run, groups: list[Group]) -> Group | None:
    """The group that `run` belongs to.

    What a match altered is left out of the comparison. So are the fingerprints where `run` has none: then the corpus must at
    least lie where that of another run of the group does. Either way only if one group is left.
    """
    conditions, lenient = conditions_of(run), set(MATCHED) if choice_of(run).matched else set()
    exact = [group for group in groups if group.conditions == conditions]
    if exact:
        return exact[0]
    if not run.identity:
        lenient |= {
            key for group in groups for key in group.conditions if key.startswith("fingerprint")
        } | {"data.root"}
    if not lenient:
        return None
    near = [
        group
        for group in groups
        if _without(group.conditions, lenient) == _without(conditions, lenient)
    ]
    if not run.identity:
        root = run.settings["data.root"]
        near = [
            group
            for group in near
            if any(member.settings["data.root"] == root for member in group.runs)
        ]
    if len(near) != 1:
        return None
    if not run.identity:
        near[0].notes.append(
            f"{run.name} has no fingerprints of corpus and tokenizer: only their names are known to agree."
        )
    return near[0]


def _fill(group: Group) -> list[str]:
    """Makes the entries of a group; returns what was left out of them."""
    errors: list[str] = []
    by_choice: dict[Choice, dict[int, Run]] = {}
    for run in sorted(group.runs, key=lambda run: run.name):
        first = by_choice.setdefault(choice_of(run), {}).setdefault(run.seed, run)
        if first is not run:
            same = (
                "the same loss"
                if first.val_loss == run.val_loss
                else f"loss {run.val_loss} against {first.val_loss}"
            )
            errors.append(
                f"{run.name}: not counted: same settings and seed as {first.name} ({same})"
            )
            group.runs.remove(run)
    for choice, seeds in by_choice.items():
        plain = not (choice.routing or choice.others or choice.matched)
        row = (
            row_of(
                {"residual": choice.residual, "blocks": choice.blocks, "rank": choice.rank},
                _dim(group),
            )
            if plain
            else None
        )
        group.entries.append(Entry(choice, row, tuple(seeds[seed] for seed in sorted(seeds))))
    group.entries.sort(
        key=lambda entry: (entry.row.row if entry.row else "~", *_order(entry.choice))
    )
    return errors


def _order(choice: Choice) -> tuple[Any, ...]:
    names = list(paths())
    place = names.index(choice.residual) if choice.residual in names else len(names)
    return place, choice.blocks or 0, choice.rank or 0, str(choice)


def _differences(first: Group, other: Group) -> list[str]:
    keys = sorted(first.conditions.keys() | other.conditions.keys())
    none = "not stated"
    pairs = [
        (key, first.conditions.get(key, none), other.conditions.get(key, none)) for key in keys
    ]
    return [
        f"{key} is {there} here and {here} there" for key, here, there in pairs if here != there
    ]


def _dim(group: Group) -> int:
    return int(group.conditions["model.dim"])


def _without(conditions: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in conditions.items() if key not in keys}


def _is_match(key: str) -> bool:
    return key.partition(".")[0].startswith("match")


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _letters(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"A{number}"
