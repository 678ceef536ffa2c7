"""Print lines to the user, in one process only where several run the same command."""

from __future__ import annotations

import os
import sys
from typing import Any


def is_printer() -> bool:
    """Return whether this process prints: rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def print_error(text: str, kind: str = "error: ") -> None:
    """Print a line to stderr, if this process prints."""
    if is_printer():
        print_error_here(text, kind)


def print_error_here(text: str, kind: str = "error: ") -> None:
    """Print a line to stderr, whichever process this is."""
    print(f"pipeexec: {kind}{text}", file=sys.stderr, flush=True)


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a line; in place of `warnings.showwarning`."""
    print_error(str(message), kind="warning: ")


def print_progress(line: str) -> None:
    """Print an indented line to stderr, if this process prints."""
    if is_printer():
        print(f"  {line}", file=sys.stderr, flush=True)


def print_result(text: str) -> None:
    """Print text to stdout, if this process prints."""
    if is_printer():
        print(text, flush=True)
