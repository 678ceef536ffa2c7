"""`warn_caller`: warnings that name the line of the user's code, however deep the call."""

from __future__ import annotations

import sys
import warnings

#: Packages that no warning names: these two, and those through which users call them.
_PACKAGES = ("pipesim", "pipeexec", "torch", "contextlib", "functools")


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line of the call stack that is of none of these packages."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
