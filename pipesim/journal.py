"""`Journal`: rows of results in a file that survives being killed, and has one writer at a time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from pipesim.errors import ArgumentError

__all__ = ["Journal"]

_START = b'{"digest": "'


class Journal:
    """JSON lines, one a row, appended as they come; a later line of a digest replaces an earlier.

    While it is open the file is locked (``flock``, which ends with the process, however it ends).
    A last line that was cut short by a kill is dropped.

    Attributes
    ----------
    rows
        The rows by their digest, in the order of the file.

    Raises
    ------
    ArgumentError
        If the file cannot be written or locked, is being written, is no regular file (a device
        might be read without end), or holds something else.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.rows: dict[str, dict[str, Any]] = {}
        self._file: BinaryIO

    def __enter__(self) -> Self:
        self._open()
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
        """Write a row, in one go."""
        line = json.dumps({"digest": digest, **row}, ensure_ascii=False, allow_nan=False)
        data = memoryview(line.encode() + b"\n")
        while data:  # a write may be short where the disk is full; the next one then says so
            data = data[self._file.write(data) :]
        self.rows[digest] = dict(row)

    def _open(self) -> None:
        try:
            regular = self.path.is_file() or not self.path.exists()
            if regular:
                self._file = self.path.open("a+b", buffering=0)
        except (OSError, ValueError) as error:  # ValueError: no path can have a null character
            reason = error.strerror if isinstance(error, OSError) else error
            raise ArgumentError(
                f"cannot write {self.path}: {reason}; name a file in a folder that can be written"
            ) from error
        if not regular:
            raise ArgumentError(
                f"cannot write {self.path}: it is a folder, a device or a pipe; name a regular "
                "file, or one that is not there yet"
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ArgumentError(
                f"another sweep is writing {self.path}; wait for it, or name another file"
            ) from error
        except OSError as error:  # a network file system may have no locks
            raise ArgumentError(
                f"cannot lock {self.path}: {error.strerror}; its file system may have no locks "
                "(flock), without which two sweeps could write at once; name a file on another, "
                "such as a local disk"
            ) from error

    def _read(self) -> None:
        """Read the rows, and drop a line that was not finished."""
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), 1):
            self._read_line(number, line)
        rest = content[whole:]
        if rest and not (rest.startswith(_START) or _START.startswith(rest)):
            raise self._foreign(content.count(b"\n") + 1)
        os.ftruncate(self._file.fileno(), whole)

    def _read_line(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
            self.rows[row.pop("digest")] = row
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._foreign(number) from error

    def _foreign(self, number: int) -> ArgumentError:
        return ArgumentError(
            f"{self.path}, line {number} is no row of a sweep; name another file, or remove the "
            "line to have its row run again"
        )
