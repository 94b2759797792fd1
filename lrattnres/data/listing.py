"""The files of a streamed corpus, listed once and pinned in the run folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHOWN = 10


@dataclass(frozen=True)
class File:
    """`path` is relative to the root. `rows` and `sizes` (bytes of text) are those of its row groups; `footer` is a hash
    of the parquet footer, which holds the place and the statistics of every column chunk.
    """

    path: str
    bytes: int
    rows: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    footer: str = ""


@dataclass(frozen=True)
class Listing:
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
        """Raises KeyError or TypeError for what `plain` did not make."""
        files = (
            File(**entry | {name: tuple(entry[name]) for name in ("rows", "sizes")})
            for entry in plain["files"]
        )
        return Listing(plain["root"], plain["revision"], tuple(files))


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, how two listings (as `plain` gives them) differ: files that are gone, new or changed."""
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
    return found[:SHOWN] + ([f"and {len(found) - SHOWN} more files"] if len(found) > SHOWN else [])
