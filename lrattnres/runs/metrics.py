"""metrics.jsonl: one JSON object a line, and only whole lines, also if the process is killed.

The last entry of a line, `crc`, is a CRC-32 in hexadecimal. It is computed over the line without
this entry, with the `crc` of the line before as initial value (0 for the first line). So a line
that was changed or is missing is noticed.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from lrattnres.runs.files import from_json, to_json, write_atomic


class MetricsError(Exception):
    """A record or a line that is not valid; `str` names the file and the line."""


class MetricsFile:
    """The measurements of one run, in the order of its steps.

    Every record has a whole number `step`. Values are numbers, texts, booleans, None, and lists and
    dictionaries of them. Numbers that are not finite are written as in `to_json`. The first `write`
    opens the file, so a reader may have a MetricsFile too.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._handle: int | None = None
        self._crc = 0  # of the last line

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record as one line, in one system call.

        The line survives the end of the process, but perhaps not that of the machine.

        Raises:
            MetricsError: The record has no step, or a value that JSON does not know.
            OSError: The disk is full; the file then ends as before.
        """
        if type(record.get("step")) is not int:
            raise MetricsError(
                f"{self.path}: step={record.get('step')!r}: every record needs a step, a whole "
                "number"
            )
        try:
            text = to_json(record).encode()
        except (TypeError, ValueError) as error:
            raise MetricsError(
                f"{self.path}: step {record['step']}: {error}; write numbers, texts and lists"
            ) from error
        if self._handle is None:
            self._handle = self._open()
        crc = zlib.crc32(text, self._crc)
        line = text[:-1] + f', "crc": "{crc:08x}"}}\n'.encode()
        try:
            written = os.write(self._handle, line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if written != len(line):
            os.ftruncate(self._handle, os.fstat(self._handle).st_size - written)
            raise OSError(
                f"{self.path}: only {written} of {len(line)} bytes could be written; is the disk "
                "full?"
            )
        self._crc = crc

    def rewind(self, step: int, last: int | None = None) -> list[str]:
        """Removes the records after a step, and an incomplete last line, before a run continues.

        Args:
            step: The last one whose records stay.
            last: The step of the last record up to `step` that was written; None: not known.

        Returns:
            A sentence for each place in what stays where lines are missing or changed.

        Raises:
            MetricsError: A line is not valid; the file is then unchanged.
            OSError: The file cannot be written; it is then unchanged.
        """
        self.close()
        there = self.path.exists()
        kept = [line for line in _parsed(self.path) if line.record["step"] <= step] if there else []
        if there:
            write_atomic(self.path, b"".join(line.text for line in kept))
        return _gaps(self.path, kept, last)

    def close(self) -> None:
        """Closes the file; a later `write` opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """All records, without an incomplete last line.

        Numbers that are not finite are floats again.

        Raises:
            MetricsError: A line is not valid; it is named.
            FileNotFoundError: There is no such file.
        """
        return [line.record for line in _parsed(Path(path))]

    @staticmethod
    def gaps(path: Path, last: int | None = None) -> list[str]:
        """A sentence for each place where lines are missing or changed.

        Args:
            path: The file.
            last: The step up to which there must be records; None: not known.

        Raises:
            MetricsError: A line is not valid; it is named.
            FileNotFoundError: There is no such file.
        """
        return _gaps(Path(path), _parsed(Path(path)), last)

    def _open(self) -> int:
        """Opens the file for appending.

        An incomplete last line, which a killed process left, is removed first. Otherwise the next
        record would be joined to it.
        """
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        whole = self.path.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        os.ftruncate(handle, len(whole))
        self._crc = _split(whole[whole.rfind(b"\n", 0, -1) + 1 : -1])[1] or 0
        return handle


class _Line(NamedTuple):
    """A line of the file.

    Attributes:
        text: As it stands, with its line break.
        record: Without its crc.
        gap: What is wrong before or in this line; None: nothing.
    """

    text: bytes
    record: dict[str, Any]
    gap: str | None


def _gaps(path: Path, lines: list[_Line], last: int | None) -> list[str]:
    """A sentence for each place where lines of a file are missing or changed."""
    gaps = [line.gap for line in lines if line.gap]
    end = max((line.record["step"] for line in lines), default=0)
    if last is not None and end < last:
        gaps.append(f"{path} ends at step {end}; the records up to step {last} are missing")
    return gaps


def _split(line: bytes) -> tuple[bytes, int | None]:
    """A line without its `crc`, and the `crc`; None where an older version wrote none."""
    match = re.fullmatch(rb'(\{.*), "crc": "([0-9a-f]{8})"\}', line, re.DOTALL)
    return (match[1] + b"}", int(match[2], 16)) if match else (line, None)


def _parsed(path: Path) -> list[_Line]:
    """Every line that ends with a line break."""
    parsed, before, checked = list[_Line](), 0, False
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        text, crc = _split(line)
        try:
            record = from_json(text)
        except ValueError as error:
            raise MetricsError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise MetricsError(
                f"{path}, line {number}: not an object with a whole number `step`: {line[:80]!r}"
            )
        # Only the first lines of a file may have no crc.
        wrong = checked if crc is None else crc != zlib.crc32(text, before)
        gap = f"{path}, line {number} (step {record['step']}): "
        gap += "it was changed, or lines before it are missing"
        parsed.append(_Line(line + b"\n", record, gap if wrong else None))
        before, checked = crc or 0, checked or crc is not None
    return parsed
