"""How a schema of dataclasses is written, and how a composed tree becomes one.

`parse` turns a plain tree into a dataclass and collects every fault before it raises.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import field
from enum import Enum
from typing import Any, TypeVar, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")


class ConfigError(Exception):
    """One or more faults of a configuration; `str` lists them all, one a line."""

    def __init__(self, faults: list[str]):
        self.faults = faults
        super().__init__("\n".join(f"  - {fault}" for fault in faults))


def option(help: str, default: Any = MISSING, *, may_change: bool = False) -> Any:
    """A documented field. `may_change`: a run may be continued with another value; results depend on it by rounding at most."""
    metadata = {"help": help, "may_change": may_change}
    if dataclasses.is_dataclass(default):
        return field(default_factory=default, metadata=metadata)  # type: ignore[arg-type]
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


def expected(kind: Any) -> str:
    """What a value of this type may be, in words."""
    options = getattr(kind, "__args__", (kind,))
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        list[str]: "a list of texts",
        type(None): "null",
    }
    parts = [
        "one of " + ", ".join(member.name for member in part)
        if isinstance(part, type) and issubclass(part, Enum)
        else words[part]
        for part in options
    ]
    return " or ".join(parts)


def parse(schema: type[T], tree: dict[str, Any]) -> T:
    """A plain tree as an instance of `schema`.

    Raises ConfigError with every unknown key, wrong type and missing value at once.
    """
    leaves, faults = fields_of(schema), []
    target = OmegaConf.structured(schema)
    given = flatten(tree)
    for key, value in given.items():
        if key not in leaves:
            close = difflib.get_close_matches(key, leaves, n=1) or difflib.get_close_matches(
                key.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.5
            )
            faults.append(
                f"{key}={value}: no such key" + (f"; did you mean {close[0]}?" if close else "")
            )
        elif value == MISSING:
            continue
        else:
            fault = _assign(target, key, value, leaves[key][0])
            faults += [fault] if fault else []
    for key in leaves:
        if given.get(key, MISSING) == MISSING and OmegaConf.is_missing(*_parent(target, key)):
            faults.append(
                f"{key}: not set; write {key}=… ({expected(leaves[key][0])}: {leaves[key][1]['help']})"
            )
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
    kinds = getattr(kind, "__args__", (kind,))
    text_for_number = (
        isinstance(value, str)
        and str not in kinds
        and not any(issubclass(part, Enum) for part in kinds)
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
