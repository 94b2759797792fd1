"""Which runs may stand in one table, and which runs are seeds of the same entry.

Two runs can be compared if two things hold. All settings that results depend on are equal, except
the seed and the residual path. And both read the same corpus and tokenizer, by their fingerprints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lrattnres.config import ConfigError, ModelConfig, defaults, flatten, parse
from lrattnres.report.paper import PaperRow, row_of
from lrattnres.report.read import DEFAULTS, SCHEMA, Run
from lrattnres.residual.base import ResidualPath, path_of, paths
from lrattnres.residual.plan import named

# Settings of the model that a residual path may or may not use.
SHARED = frozenset({"rank", "blocks", "routing", "gate", "depth"})
# Settings that have their own place in a row; all others are shown as NAME=VALUE.
SHOWN = tuple(f"model.{name}" for name in ("residual", "rank", "blocks", "routing", "path"))
# All of the model but its residual path.
SIZE = tuple(
    key
    for key in SCHEMA
    if key.startswith("model.") and key not in SHOWN and key.split(".")[1] not in SHARED
)
# Settings that a match may change.
MATCHED = (
    "steps",
    "optimizer.warmup",
    "model.layers",
    "model.dim",
    "model.heads",
    "model.mlp_width",
)


@dataclass(frozen=True)
class Choice:
    """The residual path of a run: what differs between the rows of a table.

    Attributes:
        residual: Name of the path. This version need not know it.
        blocks: Number of depth blocks. None: full, or not used by the path.
        rank: Width of a key. None: not used by the path.
        routing: What is done with the mixture, if it is not what was published.
        others: (setting, value) of further settings of the path that are not at their defaults.
        matched: (setting, value) of what the run was matched to another by.
    """

    residual: str
    blocks: int | tuple[int, ...] | None
    rank: int | None
    routing: str | None
    others: tuple[tuple[str, Any], ...]
    matched: tuple[tuple[str, Any], ...]

    @property
    def plain(self) -> bool:
        """Whether it is the residual path that the others are compared with."""
        return is_plain(self.residual)

    @property
    def family(self) -> str:
        """The path without the width of its keys, such as `s_lr full` or `denseformer`."""
        return " ".join([self.residual, *granularity(self.residual, self.blocks)])

    @property
    def label(self) -> str:
        """A short name for a legend, made of the names of the settings."""
        parts = [self.family]
        parts += [f"r={self.rank}"] if self.rank else []
        parts += [self.routing] if self.routing else []
        named = (*self.others, *self.matched)
        return " ".join(
            [*parts, *(f"{name.removeprefix('model.')}={value}" for name, value in named)]
        )


def is_plain(residual: str) -> bool:
    """Whether this is the residual path that the others are compared with."""
    return residual in paths() and paths()[residual].plain


def granularity(residual: str, blocks: int | tuple[int, ...] | None) -> list[str]:
    """The depth blocks in short: ["N=4"], ["full"], or [] for a path that has none.

    Args:
        residual: Name of the path.
        blocks: Number of depth blocks, or their sizes; None: full, or not used by the path.
    """
    if blocks:
        return [f"N={named(blocks)}"]
    return ["full"] if residual in paths() and "blocks" in paths()[residual].uses else []


def blocks_of(blocks: int | tuple[int, ...] | None) -> int:
    """How many depth blocks there are; 0 for None."""
    return len(blocks) if isinstance(blocks, tuple) else blocks or 0


@dataclass(frozen=True)
class Entry:
    """The runs of one residual path, one for each seed.

    Attributes:
        choice: The path.
        row: Its row of the paper's Table 1; None: it is no row of it.
        runs: Ordered by seed.
    """

    choice: Choice
    row: PaperRow | None
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """A short name for tables and legends, with its row of the paper's table."""
        return f"{self.row.row} {self.choice.label}" if self.row else self.choice.label

    @property
    def losses(self) -> dict[int, float]:
        """Held-out loss in nats per token, by seed."""
        return {run.seed: loss for run in self.runs if (loss := run.val_loss) is not None}

    @cached_property
    def path(self) -> ResidualPath | type[ResidualPath] | None:
        """The path with these settings, on the meta device.

        Its class, if this version does not know some of the settings. None, if it does not know the
        path.
        """
        config = model_of(self.runs[0])
        if config is None:
            return paths().get(self.choice.residual)
        with torch.device("meta"):
            return path_of(config)(config)

    @property
    def attends(self) -> bool:
        """Whether a read is a softmax over sources; of an unknown path its diagnostics tell."""
        if self.path is not None:
            return self.path.attends
        return any(any((run.diagnostics or {}).get("mean_weight") or ()) for run in self.runs)

    @property
    def linear(self) -> bool:
        """Whether a read is a sum of the outputs, with one number for each."""
        return self.path is None or self.path.linear


@dataclass
class Group:
    """Finished runs that can be compared.

    Attributes:
        name: A letter: A for the group with the most runs.
        conditions: The settings and fingerprints that all its runs share.
        runs: All of them.
        notes: Sentences for the reader of the report.
        entries: One for each residual path: rows of the paper's table first, then the others.
    """

    name: str
    conditions: dict[str, Any]
    runs: list[Run]
    notes: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def plain(self) -> Entry | None:
        """The entry of the plain residual stream, with which the others are compared."""
        return next(
            (entry for entry in self.entries if entry.choice.plain and not entry.choice.matched),
            None,
        )


def model_of(run: Run) -> ModelConfig | None:
    """The model settings of a run; None if this version does not know its path or its settings."""
    prefix = "model."
    model = {
        key.removeprefix(prefix): value
        for key, value in run.settings.items()
        if key.startswith(prefix)
    }
    if model["residual"] not in paths():
        return None
    try:
        config = parse(ModelConfig, model)
        return None if any(path_of(config).errors(config)) else config
    except (ConfigError, ValueError):
        return None


def choice_of(run: Run) -> Choice:
    """The residual path of a run, in one spelling.

    N = 2L is full, a setting that the path does not use is None, and the path's own settings count
    where they are not at their defaults. For a path that this version does not know, every setting
    counts.
    """
    settings = run.settings
    residual, rank, blocks, routing, _ = (settings[key] for key in SHOWN)
    path = paths().get(residual)
    used, usual = SHARED, dict(DEFAULTS)
    if path is not None:
        used = path.uses
        usual |= flatten(defaults(path.Options), "model.path.")
        rank = rank if "rank" in used else None
        blocks = blocks if "blocks" in used and blocks != 2 * settings["model.layers"] else None
        blocks = tuple(blocks) if isinstance(blocks, list) else blocks
        routing = path.other_routing(routing)
    others = tuple(
        (key, _hashable(settings[key]))
        for key in sorted(settings)
        if key.startswith("model.")
        and key not in (*SIZE, *SHOWN)
        and key.split(".")[1] not in SHARED - used
        and settings[key] != usual.get(key)
    )
    matched = tuple(
        (key, _hashable(settings[key]))
        for key in sorted(settings)
        if _is_match(key) and settings[key] is not None
    )
    return Choice(residual, blocks, rank, routing, others, matched)


def compare(runs: list[Run]) -> tuple[list[Group], list[Run], list[str]]:
    """Sorts runs into groups that can be compared.

    Returns:
        Groups, the one with the most runs first; unfinished runs; and a sentence for each run that
        is not counted, as another has the same settings and seed.
    """
    unfinished = [run for run in runs if run.val_loss is None]
    finished = [run for run in runs if run.val_loss is not None]
    groups: list[Group] = []
    # A run that states less joins a group of runs that state more. So the order is: everything
    # known, no fingerprints, matched.
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
                "Not in one table with group A, because "
                f"{'; '.join(_differences(groups[0], group))}."
            )
    return groups, unfinished, errors


def conditions_of(run: Run) -> dict[str, Any]:
    """The settings and fingerprints that must be equal for a comparison.

    The place of the corpus does not count if its fingerprint is known.
    """
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
    """The group that a run belongs to; None if there is none yet.

    For a run that was matched to another, the settings that a match may change are not compared.
    For a run without fingerprints they are not compared either, but its corpus must be in the same
    place as that of another run of the group. In both cases exactly one group must fit.
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
            f"{run.name} has no fingerprints of corpus and tokenizer: "
            "only their names are known to agree."
        )
    return near[0]


def _fill(group: Group) -> list[str]:
    """Makes the entries of a group. Returns a sentence for each run that is not counted."""
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
    return place, blocks_of(choice.blocks), choice.rank or 0, len(choice.others), str(choice)


def _differences(first: Group, other: Group) -> list[str]:
    """What differs in the conditions of two groups, a sentence each."""
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
