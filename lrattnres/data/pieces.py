"""Reading a local file a piece at a time."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np

from lrattnres.data.errors import UnreadableError


class Pieces:
    """An open file from which any piece can be read, by several threads at once.

    It is no memory map: where a mapped file becomes shorter, the next access ends the process with a
    bus error. Here it raises.

    Attributes:
        path: the file.
        size: its bytes when it was opened.
    """

    def __init__(self, path: Path, remedy: str):
        """Opens the file.

        Args:
            path: the file.
            remedy: what a person does about a damaged one, for the message.

        Raises:
            OSError: the file cannot be opened.
        """
        self.path, self._remedy = path, remedy
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self.size = os.fstat(self._file).st_size

    def read(self, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`.

        Raises:
            UnreadableError: the file ends before that, or its disk fails.
        """
        content, position = b"", start
        while position < start + length:
            try:
                piece = os.pread(self._file, start + length - position, position)
            except OSError as error:
                raise UnreadableError(f"{self.path}: {error}; {self._remedy}") from error
            if not piece:
                raise UnreadableError(
                    f"{self.path}: cut short: it ends after {position:,} bytes, where "
                    f"{start + length:,} were there; {self._remedy}"
                )
            content, position = (content + piece if content else piece), position + len(piece)
        return content

    def array(self, start: int, count: int, dtype: np.dtype) -> np.ndarray:
        """`count` numbers of type `dtype` [count] that begin at byte `start`; see `read`."""
        return np.frombuffer(self.read(start, count * dtype.itemsize), dtype=dtype)
