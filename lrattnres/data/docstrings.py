"""The documentation of the installed Python and torch as a corpus: a few megabytes of English that
need no download.
"""

from __future__ import annotations

import ast
import importlib.util
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from lrattnres.data.errors import DataError
from lrattnres.data.text import clean, content_hash

# Characters. At 200, with Python 3.11 and torch 2.13, about 8,500 documents and 6.0 MB remain of
# 22,000 and 7.3 MB.
SHORTEST = 200
# Tests hold files that are broken on purpose, and other packages must not change the corpus.
_LEFT_OUT = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages"}


def installed_sources() -> list[Path]:
    """The folders of the standard library and of torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        raise DataError(
            "data.corpus=docstrings: torch is not installed as a package; reinstall it or write "
            "data=files"
        )
    return [Path(sysconfig.get_path("stdlib")), Path(torch.submodule_search_locations[0])]


def read_docstrings(folders: Sequence[Path]) -> Iterator[str]:
    """Docstrings of at least SHORTEST characters, indentation removed, each text once, in order of
    the files' paths.

    A file that this Python cannot parse is named in a warning. The texts that torch attaches with
    `add_docstr` are
    left out: most are templates whose placeholders are filled in when torch is imported.
    """
    seen = set()
    for folder in folders:
        for path in sorted(
            folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()
        ):
            if _LEFT_OUT.isdisjoint(path.relative_to(folder).parts[:-1]):
                for text in map(clean, _docstrings(path)):
                    key = content_hash(text)
                    if len(text) >= SHORTEST and key not in seen:
                        seen.add(key)
                        yield text


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        warnings.warn(f"docstrings: {path} left out, it does not parse ({error})", stacklevel=2)
        return
    except OSError as error:
        raise DataError(
            f"docstrings: {path} cannot be read ({error}); reinstall the package it belongs to"
        ) from error
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
