"""What is wrong with the words of a command line, in the place of Hydra's own pages."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from lrattnres.config import ConfigError, expected, fields_of
from lrattnres.config.schema import Leaves, alternatives, leaf_of, unknown
from lrattnres.distributed.ranks import causes
from lrattnres.entry import loosened

# Packages whose errors are about what was asked of them, and not about this program.
OF_HYDRA = {"hydra", "hydra_plugins", "omegaconf", "antlr4", "submitit"}
# Flags with which nothing is composed.
ASIDE = ("help", "hydra_help", "shell_completion", "info", "experimental_rerun")


def flags_of(words: Sequence[str]) -> argparse.Namespace:
    """Hydra's own flags, such as `--multirun`, and the other words as `overrides`.

    Raises:
        ConfigError: there is no such flag, or it lacks its value.
    """
    parser: argparse.ArgumentParser = get_args_parser()
    known = [name for action in parser._actions for name in action.option_strings]

    def refuse(message: str) -> None:
        wrong = [word for word in words if word.startswith("-") and word not in known]
        close = [difflib.get_close_matches(word.partition("=")[0], known, n=1) for word in wrong]
        hints = [f"; did you mean {found[0]}?" for found in close if found]
        raise ConfigError([message + (hints[0] if hints else "")])

    parser.error = refuse  # type: ignore[assignment, method-assign]
    flags: argparse.Namespace = parser.parse_intermixed_args(list(words))
    return flags


def check_words(words: Sequence[str], schema: type, folders: Sequence[Path], many: bool) -> None:
    """Refuses words that Hydra cannot read, and choices that are not there.

    Args:
        words: settings, and choices of groups, as the user wrote them.
        schema: the dataclass of the settings.
        folders: of configurations, whose folders are the groups.
        many: for a sweep, where a word may have several values.

    Raises:
        ConfigError: with an error for each such word.
    """
    groups, leaves, errors = choices_of(folders), fields_of(schema), list[str]()
    for word, read in zip(words, loosened(words, *folders), strict=True):
        try:
            override = OverridesParser.create().parse_override(read)
        except HydraException:
            errors.append(_unreadable(word, leaves, groups))
        else:
            errors += _wrong(word, override, leaves, groups, many)
    if errors:
        raise ConfigError(errors)


def choices_of(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Group -> names of its choices."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/**/*.yaml"):
            group = file.parent.relative_to(folder).as_posix()
            found.setdefault(group, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(found.items())}


def check_name(name: str, folders: Sequence[Path]) -> None:
    """Refuses a `--config-name` that is in none of the folders."""
    there = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    if Path(name).with_suffix("").as_posix() not in there and not any(
        (folder / name).with_suffix(".yaml").is_file() for folder in folders
    ):
        raise ConfigError([_choice("--config-name", name, there)])


def reason(error: Exception, words: Sequence[str], task: Callable[..., object]) -> str | None:
    """The error in one line, if it is Hydra's about the words; None: it is another's.

    Args:
        error: what running `task` under Hydra raised.
        words: of the command line.
        task: what Hydra calls. What it raises itself is not Hydra's.
    """
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    code = task.__code__ if isinstance(task, FunctionType) else None
    last = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    asked = isinstance(error, (HydraException, OmegaConfBaseException, OSError))
    if any(frame.f_code is code for frame in frames):
        return None
    if not asked and last.partition(".")[0] not in OF_HYDRA:
        return None
    own = next((cause for cause in causes(error) if isinstance(cause, ConfigError)), None)
    if own is not None:
        return "; ".join(own.errors)
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return _choice(group, name, list(error.options))
    first = str(error).strip().partition("\n")[0]
    key = next((part for part in first.split("'")[1::2]), None)
    meant = [word for word in words if key and word.lstrip("+~").partition("=")[0] == key]
    if first.startswith("Could not override") and meant and "/" not in str(key):
        return f"{meant[0]}: the configuration has no choice of {key} yet; write +{meant[0]}"
    if first.startswith("Multiple values for") or "appears more than once" in first:
        twice = [word for word in words if word.startswith("+")]
        return f"{', '.join(twice)}: it is chosen already; leave out the +"
    return f"{meant[0]}: {first}" if meant and meant[0] not in first else first


def _wrong(
    word: str, override: Override, leaves: Leaves, groups: Mapping[str, list[str]], many: bool
) -> Iterator[str]:
    key = str(override.key_or_group)
    if override.is_delete():
        if key not in groups and not key.startswith("hydra") and not _there(key, leaves):
            known = [*groups, *leaves]
            yield unknown(key, "", known).replace(f"{key}=:", f"{word}:", 1)
        return
    if override.is_sweep_override() and not many:
        text = f"; if it is one text, write {_as_text(word)}" if _is_text(key, leaves) else ""
        yield f"{word}: has several values; add -m for a run with each{text}"
        return
    if override.is_sweep_override() and not override.is_discrete_sweep():
        yield f"{word}: a sweep takes values one by one; write a,b,c or range(first,end,step)"
        return
    if key in groups:
        yield from _choices(word, override, groups[key])
    elif key.startswith(("hydra.", "hydra/")) or override.package:
        return
    elif not all(part.isidentifier() for part in key.split(".")):
        yield unknown(key, word.partition("=")[2], leaves)
    elif "." not in key and not _there(key, leaves):
        close = difflib.get_close_matches(key, groups, n=1, cutoff=0.7)
        if close and not difflib.get_close_matches(key, leaves, n=1, cutoff=0.7):
            names = ", ".join(groups[close[0]])
            yield f"{word}: no such key; did you mean {close[0]} (one of {names})?"


def _is_text(key: str, leaves: Leaves) -> bool:
    """Whether the value may be a text, as far as is known."""
    kinds = alternatives(leaves[key][0]) if key in leaves else (str,)
    return bool({str, list[str]} & set(kinds))


def _there(key: str, leaves: Leaves) -> bool:
    """Whether a key is a setting, or a part of the schema that has some."""
    return leaf_of(leaves, key) is not None or any(leaf.startswith(key + ".") for leaf in leaves)


def _choices(word: str, override: Override, names: list[str]) -> Iterator[str]:
    """An error for each value of a group that is no choice of it."""
    value: Any = override.value()
    if isinstance(value, Glob):
        if not value.filter(names):
            yield f"{word}: matches none of {', '.join(names)}"
        return
    if override.is_sweep_override():
        value = list(getattr(value, "list", [])) or list(override.sweep_iterator())
    sign, _, _ = word.partition("=")
    for part in value if isinstance(value, list) else [value]:
        name = part.text if isinstance(part, QuotedString) else part
        if not isinstance(name, str) or name not in names:
            written = "null" if name is None else str(name)
            yield _choice(sign, written, names)


def _choice(key: str, value: str, names: Sequence[str]) -> str:
    close = [name for name in names if name.startswith(value)] or difflib.get_close_matches(
        value, names, n=1
    )
    hint = f"; did you mean {close[0]}?" if close and value else ""
    return f"{key}={value}: must be one of {', '.join(names)}{hint}"


def _unreadable(word: str, leaves: Leaves, groups: Mapping[str, list[str]]) -> str:
    found = re.match(r"[+~]*([\w./@:-]+)=(.*)", word, re.DOTALL)
    if not found:
        return f"{word}: must be key=value"
    key, value = found.groups()
    if key in groups:
        return _choice(word.partition("=")[0], value, groups[key])
    leaf = leaf_of(leaves, key)
    if leaf is None and not key.startswith("hydra"):
        return unknown(key, value, leaves)
    if leaf == key and not _is_text(key, leaves):
        return f"{word}: must be {expected(leaves[key][0])}"
    return (
        f"{word}: cannot be read: it has signs with a meaning of their own, or beyond ASCII; if it "
        f"is one text, write {_as_text(word)}"
    )


def _as_text(word: str) -> str:
    """The word as it is written in a shell, its value in the quotes that Hydra wants."""
    key, _, value = word.partition("=")
    text = f"{key}={QuotedString(text=value, quote=Quote.single).with_quotes()}"
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'
