"""How a schema of dataclasses is written, and how a composed tree becomes one.

`parse` turns a plain tree into a dataclass and collects every fault before it raises.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import field
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")


class ConfigError(Exception):
    """One or more faults of a configuration; `str` lists them all, one a line."""

    def __init__(self, faults: list[str]):
        self.faults = faults
        super().__init__("\n".join(f"  - {fault}" for fault in faults))


def option(
    help: str,
    default: Any = MISSING,
    *,
    may_change: bool = False,
    at_least: Any = None,
    at_most: Any = None,
) -> Any:
    """A documented field. `may_change`: a run may be continued with another value; results depend on it by rounding at most."""
    metadata = {"help": help, "may_change": may_change, "at_least": at_least, "at_most": at_most}
    if isinstance(default, type):  # a part of the schema, dict or list
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def defaults(schema: type) -> dict[str, Any]:
    """The schema as a plain tree: defaults where there are some, `???` where `configs/` must speak."""
    return OmegaConf.to_container(OmegaConf.structured(schema), enum_to_str=True)  # type: ignore[return-value]


def fields_of(schema: type, prefix: str = "") -> dict[str, tuple[Any, dict[str, Any]]]:
    """Dotted key -> (type, metadata of `option`) of every leaf, in the order of the schema."""
    leaves: dict[str, tuple[Any, dict[str, Any]]] = {}
    hints = get_type_hints(schema)
    for item in dataclasses.fields(schema):
        key, kind = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(kind):
            leaves |= fields_of(kind, key + ".")  # type: ignore[arg-type]
        else:
            leaves[key] = (kind, dict(item.metadata))
    return leaves


Leaves = dict[str, tuple[Any, dict[str, Any]]]


def leaf_of(leaves: Leaves, key: str) -> str | None:
    """The setting that a dotted key is, or lies below, where that one is a dictionary of free settings; None: no such."""
    leaf = key
    while leaf not in leaves:
        leaf, dot, _ = leaf.rpartition(".")
        if not dot:
            return None
    return leaf if leaf == key or get_origin(leaves[leaf][0]) is dict else None


def values_of(config: Any) -> dict[str, Any]:
    """Dotted key -> plain value of every leaf that `fields_of` names; a dictionary of free settings is one value."""
    flat = flatten(plain(config))
    leaves = fields_of(type(config))
    values = {key: flat.get(key, {}) for key in leaves}
    for key, value in flat.items():
        leaf = leaf_of(leaves, key)
        if leaf is not None and leaf != key:
            values[leaf] = values[leaf] | {key.removeprefix(leaf + "."): value}
    return values


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
    """A dataclass as nested dictionaries of plain values, enums by name: what is written to a run folder."""
    return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)  # type: ignore[return-value]


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


def parse(schema: type[T], tree: dict[str, Any]) -> T:
    """A plain tree as an instance of `schema`.

    Raises ConfigError with every unknown key, wrong type and missing value at once.
    """
    return _parse(schema, tree, "")


def parse_options(options: type[T], values: dict[str, Any], prefix: str) -> T:
    """`values`, the free settings that a schema keeps as a dictionary, as an instance of the dataclass that means them.

    Args:
        options: a dataclass, frozen or not, whose fields are written with `option`.
        values: setting -> value.
        prefix: what the settings stand below, such as `model.path`: errors name keys as they are written by the user.

    Raises:
        ConfigError: with every unknown key, wrong type and missing value at once.
    """
    return _parse(options, values, prefix + ".")


def _parse(schema: type[T], tree: dict[str, Any], prefix: str) -> T:
    leaves, faults = fields_of(schema), []
    target = OmegaConf.structured(schema)
    OmegaConf.set_readonly(target, False)  # as a frozen dataclass makes it
    given, free = flatten(tree), dict[str, Any]()
    for key, value in given.items():
        leaf = leaf_of(leaves, key)
        if leaf is None:
            close = difflib.get_close_matches(key, leaves, n=1) or difflib.get_close_matches(
                key.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.5
            )
            hint = f"; did you mean {prefix}{close[0]}?" if close else ""
            faults.append(f"{prefix}{key}={value}: no such key{hint}")
        elif value == MISSING:
            continue
        elif leaf != key:
            free[key] = value
        else:
            fault = _assign(target, key, value, leaves[key][0])
            faults += [prefix + fault] if fault else []
    for key, value in free.items():
        OmegaConf.update(target, key, value, force_add=True)
    for key, (kind, metadata) in leaves.items():
        if given.get(key, MISSING) == MISSING and OmegaConf.is_missing(*_parent(target, key)):
            wanted = f"{expected(kind)}: {metadata['help']}"
            faults.append(f"{prefix}{key}: not set; write {prefix}{key}=… ({wanted})")
    if faults:
        raise ConfigError(faults)
    return OmegaConf.to_object(target)  # type: ignore[return-value]


def _parent(target: Any, key: str) -> tuple[Any, str]:
    *path, last = key.split(".")
    for name in path:
        target = target[name]
    return target, last


def _assign(target: Any, key: str, value: Any, kind: Any) -> str | None:
    """Sets one leaf; returns what is wrong with the value, if anything. Texts are not taken for numbers."""
    kinds = alternatives(kind)
    text_for_number = (
        isinstance(value, str)
        and str not in kinds
        and not any(isinstance(part, type) and issubclass(part, Enum) for part in kinds)
    )
    number_for_text = str in kinds and isinstance(value, (int, float, bool))
    truth_for_number = isinstance(value, bool) and bool not in kinds
    null = value is None and type(None) not in kinds
    if not (text_for_number or (truth_for_number and not number_for_text) or null):
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
