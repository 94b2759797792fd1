"""The files of a streamed corpus, listed once and pinned in the run folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHOWN = 10


@dataclass(frozen=True)
class File:
    """One parquet file.

    Attributes:
        path: relative to the root.
        bytes: its size.
        rows: of each of its row groups.
        sizes: bytes of text in each of its row groups.
        footer: a hash of the parquet footer, which holds the place and the statistics of every
            column chunk.
    """

    path: str
    bytes: int
    rows: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    footer: str = ""


@dataclass(frozen=True)
class Listing:
    """The files of a corpus, in the order of their paths, and where they lie.

    Attributes:
        root: `data.root`.
        revision: the commit of the hub; None elsewhere.
        files: with their row groups.
    """

    root: str
    revision: str | None
    files: tuple[File, ...]

    @property
    def fingerprint(self) -> str:
        """The same for copies of the same files, wherever they lie."""
        content = json.dumps([dataclasses.astuple(file) for file in self.files])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def plain(self) -> dict[str, Any]:
        """For JSON; `read` is the inverse."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def read(plain: Mapping[str, Any]) -> Listing:
        """The inverse of `plain`. Raises KeyError or TypeError for what that did not make."""
        files = (
            File(**entry | {name: tuple(entry[name]) for name in ("rows", "sizes")})
            for entry in plain["files"]
        )
        return Listing(plain["root"], plain["revision"], tuple(files))


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How two listings (as `plain` gives them) differ, in words.

    Returns:
        A line for each of the first files that are gone, new or changed.
    """
    before, after = (
        {entry["path"]: entry for entry in listing.get("files", [])} for listing in (then, now)
    )
    found = [f"{path}: gone" for path in before if path not in after]
    found += [f"{path}: new" for path in after if path not in before]
    for path in before:
        if path in after and before[path] != after[path]:
            parts = [
                name
                for name in ("bytes", "rows", "footer")
                if before[path][name] != after[path][name]
            ]
            sizes = f"{before[path]['bytes']:,} bytes then, {after[path]['bytes']:,} now"
            found.append(f"{path}: changed ({', '.join(parts)}; {sizes})")
    return first(found)


def first(names: list[str]) -> list[str]:
    """The first names of a list, and how many more there are."""
    return names[:SHOWN] + ([f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else [])


def hidden(path: str) -> bool:
    """Whether a part of a relative path begins with a dot or an underscore, as copies do."""
    return any(part.startswith((".", "_")) for part in path.split("/"))


def warn_hidden(root: str, paths: list[str]) -> None:
    """Says how many hidden files of `data.root` are left out."""
    if paths:
        warnings.warn(
            f"data.root={root}: {len(paths):,} files left out, since a part of their path begins "
            f"with a dot or an underscore: {', '.join(first(paths))}",
            stacklevel=3,
        )
