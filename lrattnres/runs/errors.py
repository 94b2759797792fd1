"""What can be wrong with a checkpoint, and how several errors are listed."""

from __future__ import annotations

from collections.abc import Iterable

from lrattnres.distributed.ranks import SharedError


class CheckpointError(SharedError, Exception):
    """A checkpoint that cannot be written, is damaged, or does not fit; `str` names the path and
    every error.

    All ranks raise it in the same words.
    """


def listed(errors: Iterable[str]) -> str:
    """One error a line."""
    return "\n".join(f"  - {error}" for error in errors)
