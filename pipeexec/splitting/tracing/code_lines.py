"""Lines of the model's code, for messages."""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path

import torch

#: Folders whose code is not the model's: torch, and this package.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_STANDARD_LIBRARY = Path(linecache.__file__).parent


def present_line() -> str:
    """Return the line of the model's code that runs now, and its file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return _text(frame.f_code.co_filename, frame.f_lineno)


def line_of_error(error: BaseException) -> str:
    """Return the last line of the model's code that an error has passed; empty if there is none.

    Callers of this package are not in a traceback, so that its first lines are of this package.
    """
    rows = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [
        (file, line)
        for file, line in rows
        if not file.startswith(_LIBRARIES) and Path(file).parent != _STANDARD_LIBRARY
    ]
    return f", at {_text(*own[-1])}" if own else ""


def _text(file: str, line: int) -> str:
    return f"`{linecache.getline(file, line).strip():.80}` ({Path(file).name}, line {line})"
