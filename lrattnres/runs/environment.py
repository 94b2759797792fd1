"""What a run was started with: versions, code and command line.

Nothing in it names the machine or its owner.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PACKAGE = "lrattnres"


def describe_environment() -> dict[str, Any]:
    """Plain values, ready for JSON; None for what is not installed or not known.

    `time` is in UTC.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="microseconds"),
        "command": sys.orig_argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "cuda": torch.version.cuda,
        "versions": _versions(),
        "git": _git(Path(__file__).parents[2]),
    }


def _versions() -> dict[str, str | None]:
    """Installed versions of everything that the package requires, its extras included.

    And of Triton, which torch installs.
    """
    try:
        required = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was never installed
        required = ["torch", "numpy"]
    names = {match[0] for match in (re.match(r"[\w.-]+", line) for line in required) if match}
    return {name: _version(name) for name in sorted({PACKAGE, "triton"} | names)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(root: Path) -> dict[str, Any] | None:
    """Revision of the package's own checkout, and whether files were changed or added since.

    None without git or a checkout. A repository around an installed package does not count.
    """
    try:
        if Path(_ask(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        return {
            "revision": _ask(root, "rev-parse", "HEAD"),
            "dirty": bool(_ask(root, "status", "--porcelain")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _ask(root: Path, *command: str) -> str:
    asked = subprocess.run(
        ["git", "-C", root, *command], capture_output=True, text=True, check=True, timeout=30
    )
    return asked.stdout.strip()
