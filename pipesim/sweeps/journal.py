"""`Journal`: rows of results in a file. It survives a kill, and has one writer at a time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from pipesim.errors import ArgumentError
from pipesim.utils.files import check_path, check_target, write_errors
from pipesim.utils.texts import CHECKSUM, checksum, parse_json

_START = b'{"digest": "'


class Journal:
    """A file of JSON lines, one a row, appended one by one; ``rows`` has them by digest, in order.

    - A later line of a digest replaces an earlier one.
    - While the journal is open its file is locked (``flock``). The lock ends with the process,
      even with a killed one.
    - A last line that a kill cut short is dropped.
    - Each line has a checksum. Lines of older versions have none, and are read too.

    ``problem`` returns the problem of a row that was read, or an empty text.
    """

    def __init__(
        self, path: Path | str, problem: Callable[[Mapping[str, Any]], str] = lambda row: ""
    ) -> None:
        self.path = check_path("path", path, "write")
        self.problem = problem
        self.rows: dict[str, dict[str, Any]] = {}
        self._file: BinaryIO

    def __enter__(self) -> Self:
        check_target(self.path)
        with write_errors(self.path):
            self._file = self.path.open("a+b", buffering=0)
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def append(self, digest: str, row: Mapping[str, Any]) -> None:
        """Append a row to the file."""
        record = {"digest": digest, **row}
        record[CHECKSUM] = checksum(record)
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        data = memoryview(line.encode() + b"\n")
        with write_errors(self.path):
            while data:  # on a full disk a write may be short; the next one then raises
                data = data[self._file.write(data) :]
        self.rows[digest] = dict(row)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ArgumentError(
                f"another process is writing {self.path}; wait for it, or name another file"
            ) from error
        except OSError as error:  # a network file system may have no locks
            raise ArgumentError(
                f"cannot lock {self.path}: {error.strerror}; its file system may have no locks "
                "(flock), without which two processes could write at once; name a file on another, "
                "such as a local disk"
            ) from error

    def _read(self) -> None:
        """Read the rows, and drop an unfinished last line."""
        number, whole, rest = 0, 0, b""
        with open(self._file.fileno(), "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    rest = line
                    break
                self._read_line(number, line)
                whole += len(line)
        if rest and not (rest.startswith(_START) or _START.startswith(rest)):
            raise self._not_a_row(number)
        os.ftruncate(self._file.fileno(), whole)

    def _read_line(self, number: int, line: bytes) -> None:
        try:
            row = parse_json(line)
        except ValueError as error:
            raise self._not_a_row(number, str(error)) from error
        if not isinstance(row, dict) or not isinstance(row.get("digest"), str):
            raise self._not_a_row(number)
        expected = checksum(row)
        if row.pop(CHECKSUM, expected) != expected:
            raise ArgumentError(
                f"{self.path}, line {number} was changed after it was written: its checksum does "
                "not match; remove the line to have its row run again"
            )
        digest = row.pop("digest")
        if problem := self.problem(row):
            raise ArgumentError(
                f"{self.path}, line {number}: {problem}; remove the line to have its row run again"
            )
        self.rows[digest] = row

    def _not_a_row(self, number: int, reason: str = "") -> ArgumentError:
        return ArgumentError(
            f"{self.path}, line {number} is no row of results; name another file, or remove the "
            f"line to have its row run again{reason and f' ({reason})'}"
        )
