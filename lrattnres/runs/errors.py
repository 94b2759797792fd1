"""The error of checkpoints, and how errors are put into messages."""

from __future__ import annotations

from collections.abc import Iterable

from lrattnres.distributed.ranks import SharedError


class CheckpointError(SharedError, Exception):
    """A checkpoint cannot be written, is damaged, or does not fit.

    `str` names the path and every error. All ranks raise it with the same words.
    """


def listed(errors: Iterable[str]) -> str:
    """Errors as lines of a message, one each."""
    return "\n".join(f"  - {error}" for error in errors)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its class if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
