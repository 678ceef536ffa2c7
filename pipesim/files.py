"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from pipesim.errors import ArgumentError

__all__ = ["write_whole"]


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it.

    Raises
    ------
    ArgumentError
        If the folder is not there, or cannot be written in.
    """
    try:
        handle, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=".part"
        )
    except OSError as error:
        raise ArgumentError(
            f"cannot write {path}: {error.strerror}; name a file in a folder that can be written"
        ) from error
    os.close(handle)
    try:
        write(Path(temporary))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
