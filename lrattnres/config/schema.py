"""How a schema of dataclasses is written, and how a tree of settings becomes one.

A setting is a field written with `option`: its type, default, bounds and help stand there and
nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")
Leaves = dict[str, tuple[Any, Mapping[str, Any]]]
LARGEST = 10**15  # of a whole number without an upper bound of its own


class ConfigError(Exception):
    """What makes a configuration impossible: `errors`, one line each. `str` lists them all."""

    def __init__(self, errors: list[str]):
        self.errors = errors
        super().__init__("\n".join(f"  - {error}" for error in errors))


def option(
    help: str,
    default: Any = MISSING,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    may_change: bool = False,
    kind: Any = None,
) -> Any:
    """A setting: a field of a dataclass with what is known of it.

    Args:
        help: what it means, for the documentation and for messages.
        default: its value where none is given; a class (a part of the schema, dict or list) is
            called for it; left out: the setting must be given.
        at_least, above: lower bound of a number, included or excluded.
        at_most, below: upper bound of a number, included or excluded.
        may_change: a run may be continued with another value; what it computes then differs by
            rounding at most.
        kind: the type of a field that is annotated as Any, since OmegaConf has no union with lists.
    """
    limits = {"at_least": at_least, "at_most": at_most, "above": above, "below": below}
    metadata = {
        "help": help,
        "may_change": may_change,
        "kind": kind,
        "limits": {name: limit for name, limit in limits.items() if limit is not None},
    }
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def defaults(schema: type) -> dict[str, Any]:
    """The schema as a plain tree: defaults, and `???` where `configs/` must speak."""
    structured = OmegaConf.structured(schema)
    tree: Any = OmegaConf.to_container(structured, enum_to_str=True)
    return tree


def fields_of(schema: type, prefix: str = "") -> Leaves:
    """Dotted key -> (type, metadata of `option`) of every setting, in the order of the schema."""
    leaves: Leaves = {}
    hints = get_type_hints(schema)
    for item in dataclasses.fields(schema):
        key, kind = prefix + item.name, item.metadata.get("kind") or hints[item.name]
        if dataclasses.is_dataclass(kind):
            leaves |= fields_of(kind, key + ".")  # type: ignore[arg-type]
        else:
            leaves[key] = (kind, item.metadata)
    return leaves


def leaf_of(leaves: Leaves, key: str) -> str | None:
    """The setting that a dotted key is, or lies below where it is a dictionary, if there is one."""
    leaf = key
    while leaf not in leaves:
        leaf, dot, _ = leaf.rpartition(".")
        if not dot:
            return None
    return leaf if leaf == key or get_origin(leaves[leaf][0]) is dict else None


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a nested dictionary."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[prefix + str(key)] = value
    return leaves


def plain(config: Any) -> dict[str, Any]:
    """A dataclass as nested dictionaries of plain values, enums by name, as a run folder has it."""
    structured = OmegaConf.structured(config)
    tree: Any = OmegaConf.to_container(structured, enum_to_str=True)
    return tree


def values_of(config: Any) -> dict[str, Any]:
    """Dotted key -> plain value of every setting of `fields_of`; a dictionary is one value."""
    leaves = fields_of(type(config))
    values: dict[str, Any] = {key: {} for key in leaves}
    for key, value in flatten(plain(config)).items():
        leaf = leaf_of(leaves, key)
        assert leaf is not None
        if leaf == key:
            values[key] = value
        else:
            values[leaf][key.removeprefix(leaf + ".")] = value
    return values


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The types that a value may have: the members of a union, else the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def expected(kind: Any) -> str:
    """What a value of this type may be, in words."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        list[str]: "a list of texts",
        list[int]: "a list of whole numbers",
        list[float]: "a list of numbers",
        dict[str, Any]: "settings of its own, each key.NAME=…",
        type(None): "null",
    }
    parts = [
        "one of " + ", ".join(member.name for member in part)
        if isinstance(part, type) and issubclass(part, Enum)
        else words[part]
        for part in alternatives(kind)
    ]
    return " or ".join(parts)


def span(limits: Mapping[str, float]) -> str:
    """The bounds of an `option` in words, such as `between 0 and 256`; empty: there are none."""
    if limits.keys() == {"at_least", "at_most"}:
        return f"between {limits['at_least']} and {limits['at_most']}"
    if limits.keys() == {"above", "below"}:
        return f"between {limits['above']} and {limits['below']}, both excluded"
    return " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items())


def out_of_bounds(config: Any) -> Iterator[str]:
    """An error for each number of a configuration that its `option` does not allow."""
    values = values_of(config)
    for key, (_, metadata) in fields_of(type(config)).items():
        yield from _beyond(key, values[key], metadata["limits"])


def beyond_use(config: Any) -> bool:
    """Whether a number is not finite, or so large that a check which counts would not end."""
    values = values_of(config)
    return any(
        (isinstance(number := values[key], float) and not math.isfinite(number))
        or (isinstance(number, int) and number > metadata["limits"].get("at_most", LARGEST))
        for key, (_, metadata) in fields_of(type(config)).items()
    )


def _beyond(key: str, value: Any, limits: Mapping[str, float]) -> Iterator[str]:
    many = isinstance(value, Sequence) and not isinstance(value, str)
    for number in value if many else [value]:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if isinstance(number, float) and not math.isfinite(number):
            yield f"{key}={value}: must be a finite number"
        elif not (
            number >= limits.get("at_least", number)
            and number <= limits.get("at_most", number)
            and ("above" not in limits or number > limits["above"])
            and ("below" not in limits or number < limits["below"])
        ):
            yield f"{key}={value}: must be {span(limits)}"
        elif isinstance(number, int) and number > limits.get("at_most", LARGEST):
            yield f"{key}={value}: must be at most {LARGEST}"


def parse(schema: type[T], tree: dict[str, Any]) -> T:
    """A tree of plain values as an instance of `schema`.

    Bounds alone make no error here: the checks of a command name those together with settings
    that contradict each other (`lrattnres.config.checks`).

    Args:
        schema: a dataclass whose fields are written with `option`.
        tree: nested dictionaries, or dotted keys, or both.

    Raises:
        ConfigError: with every unknown key, wrong type and missing value at once, and then also
            every value out of its bounds.
    """
    return _parsed(schema, tree, "")[0]


def parse_options(options: type[T], values: dict[str, Any], prefix: str) -> T:
    """The free settings that a schema keeps as a dictionary, as the dataclass that means them.

    Args:
        options: a dataclass, frozen or not, whose fields are written with `option`.
        values: setting -> value.
        prefix: what the settings stand below, such as `model.path`: errors name keys as the user
            writes them.

    Raises:
        ConfigError: with every unknown key, wrong type, missing value and value out of its bounds.
    """
    parsed, bounds = _parsed(options, values, prefix + ".")
    if bounds:
        raise ConfigError(bounds)
    return parsed


def unknown(key: str, value: Any, known: Collection[str], prefix: str = "") -> str:
    """The error for a setting that is not in `known`, with the one that was perhaps meant."""
    close = difflib.get_close_matches(key, known, n=1) or difflib.get_close_matches(
        key.rsplit(".", 1)[-1], known, n=1, cutoff=0.5
    )
    hint = f"; did you mean {prefix}{close[0]}?" if close else ""
    if not close and len(known) <= 12:
        names = ", ".join(prefix + name for name in known)
        hint = f"; write one of {names}" if names else "; there are no settings here, leave it out"
    return f"{prefix}{key}={value}: no such key{hint}"


def _parsed(schema: type[T], tree: dict[str, Any], prefix: str) -> tuple[T, list[str]]:
    """With an error for each value out of its bounds."""
    leaves, errors, bounds = fields_of(schema), list[str](), list[str]()
    target = OmegaConf.structured(schema)
    OmegaConf.set_readonly(target, False)  # as a frozen dataclass makes it
    given, free = flatten(tree), dict[str, Any]()
    for key, value in given.items():
        leaf = leaf_of(leaves, key)
        if leaf is None:
            errors.append(unknown(key, value, leaves, prefix))
        elif value == MISSING:
            continue
        elif leaf != key:
            free[key] = value
        elif error := _assign(target, key, value, leaves[key][0]):
            errors.append(prefix + error)
        else:
            set_to = OmegaConf.select(target, key)
            bounds += _beyond(prefix + key, set_to, leaves[key][1]["limits"])
    for key, value in free.items():
        OmegaConf.update(target, key, value, force_add=True)
    for key, (kind, metadata) in leaves.items():
        if given.get(key, MISSING) == MISSING and OmegaConf.is_missing(*_parent(target, key)):
            wanted = f"{expected(kind)}: {metadata['help']}"
            errors.append(f"{prefix}{key}: not set; write {prefix}{key}=… ({wanted})")
    if errors:
        raise ConfigError(errors + bounds)
    return OmegaConf.to_object(target), bounds  # type: ignore[return-value]


def _parent(target: Any, key: str) -> tuple[Any, str]:
    *path, last = key.split(".")
    for name in path:
        target = target[name]
    return target, last


def _assign(target: Any, key: str, value: Any, kind: Any) -> str | None:
    """Sets one setting, or says what is wrong with it. A text is not taken for a number."""
    kinds = alternatives(kind)
    text_for_number = (
        isinstance(value, str)
        and str not in kinds
        and not any(isinstance(part, type) and issubclass(part, Enum) for part in kinds)
    )
    number_for_text = str in kinds and isinstance(value, (int, float, bool))
    truth_for_number = isinstance(value, bool) and bool not in kinds
    null = value is None and type(None) not in kinds
    many = len(kinds) > 2 and not any(_is_one(value, part) for part in kinds)
    if not (text_for_number or (truth_for_number and not number_for_text) or null or many):
        try:
            OmegaConf.update(target, key, str(value) if number_for_text else value)
            return None
        except OmegaConfBaseException:
            pass
    hint = (
        f"; write {key}=null"
        if str(value).lower() in ("none", "null", "~") and type(None) in kinds
        else ""
    )
    hint = hint or ("; write true or false" if kinds == (bool,) else "")
    return f"{key}={value}: must be {expected(kind)}{hint}"


def _is_one(value: Any, kind: Any) -> bool:
    """Whether a value is of one type of a union with lists."""
    if get_origin(kind) is not list:
        return type(value) is kind
    (item,) = get_args(kind)
    return isinstance(value, Sequence) and all(type(one) is item for one in value)
