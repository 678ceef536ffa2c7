"""`warn_caller`: warnings that name the line of the user's code, however deep the call."""

from __future__ import annotations

import sys
import warnings

_PACKAGES = ("pipesim", "pipeexec")


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line of the call stack that is of neither package."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
