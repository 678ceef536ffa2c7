"""`warn_caller`: warnings that name the line of the user's code, however deep the call."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

#: Packages that no warning names: these two, and those through which users call them.
_PACKAGES = ("pipesim", "pipeexec", "torch", "contextlib", "functools")


def caller_line() -> tuple[str, int]:
    """Return file and line of the innermost frame that is of none of these packages."""
    frame, _ = _caller()
    return frame.f_code.co_filename, frame.f_lineno


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line of the call stack that is of none of these packages."""
    warnings.warn(message, category, stacklevel=_caller()[1])


def _caller() -> tuple[FrameType, int]:
    """Return that frame, and how far it is above the caller, which is 1."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    return frame, level
