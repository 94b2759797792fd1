"""metrics.jsonl: one JSON object a line, whole lines only, whatever kills the process that writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lrattnres.runs.files import from_json, to_json, write_atomic


class MetricsError(Exception):
    """A record that is none, or a line that cannot be read; `str` names the file and the line."""


class MetricsFile:
    """The measurements of one run, in the order of its steps.

    Every record has a whole number `step`. Values are numbers, texts, true, false, null, and lists and dictionaries of
    them; numbers that are not finite are written as the texts "nan", "inf" and "-inf" (see `to_json`).
    The file is opened by the first `write`, so readers may hold a MetricsFile too.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._handle: int | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line with one system call: it is there after the process, though not after the machine.

        Raises MetricsError for a record without a step, or with what JSON does not know, and OSError when the disk is
        full; the file then ends as before.
        """
        if type(record.get("step")) is not int:
            raise MetricsError(
                f"{self.path}: step={record.get('step')!r}: every record needs a step, a whole number"
            )
        try:
            line = to_json(record).encode() + b"\n"
        except (TypeError, ValueError) as fault:
            raise MetricsError(
                f"{self.path}: step {record['step']}: {fault}; write numbers, texts and lists"
            ) from fault
        if self._handle is None:
            self._handle = self._open()
        try:
            written = os.write(self._handle, line)
        except OSError as fault:
            raise OSError(fault.errno, fault.strerror, str(self.path)) from fault
        if written != len(line):
            os.ftruncate(self._handle, os.fstat(self._handle).st_size - written)
            raise OSError(
                f"{self.path}: only {written} of {len(line)} bytes could be written; is the disk full?"
            )

    def rewind(self, step: int) -> None:
        """Drops what came after `step`, and a torn last line: the run goes on from there.

        Raises MetricsError that names the line for any other fault; the file is then unchanged.
        """
        self.close()
        if self.path.exists():
            lines = [line for line, record in _parsed(self.path) if record["step"] <= step]
            write_atomic(self.path, b"".join(lines))

    def close(self) -> None:
        """Closes the file; a later `write` opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """All records, numbers that are not finite as floats. A torn last line is left out.

        Raises MetricsError that names the line for any other fault, and FileNotFoundError.
        """
        return [record for _, record in _parsed(Path(path))]

    def _open(self) -> int:
        """For appending. What a killed process left of a line goes first, or the next record would be joined to it."""
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        os.ftruncate(handle, self.path.read_bytes().rfind(b"\n") + 1)
        return handle


def _parsed(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """(bytes, record) of every line that ends; what follows the last line break was torn."""
    lines = path.read_bytes().split(b"\n")[:-1]
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            record = from_json(line)
        except ValueError as fault:
            raise MetricsError(f"{path}, line {number}: not JSON: {fault}") from fault
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise MetricsError(
                f"{path}, line {number}: not an object with a whole number `step`: {line[:80]!r}"
            )
        parsed.append((line + b"\n", record))
    return parsed
