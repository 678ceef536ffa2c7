"""Files of a run: those of a folder, or those in a list."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pipesim.errors import TimelineError
from pipesim.utils.files import check_path, is_folder


def files_of(paths: Path | str | Iterable[Path | str], pattern: str) -> list[Path]:
    """Return the files of a folder that match ``pattern``, by name; or files in their order.

    Raises
    ------
    TimelineError
        For no files.
    """
    from pipesim.trace.trace_files import list_files  # which takes a while to import

    if isinstance(paths, str | os.PathLike) and is_folder(folder := check_path("paths", paths)):
        files = sorted(folder.glob(pattern))
        if not files:
            raise TimelineError(f"the folder {folder} has no {pattern}")
        return files
    return list_files(paths)
