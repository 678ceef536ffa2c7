"""Whether this thread runs a forward that will be recomputed, or recomputes one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["checkpointing", "is_checkpointing", "is_recomputing", "recomputing"]


class _Local(threading.local):
    is_checkpointing = False
    is_recomputing = False


_LOCAL = _Local()


def is_checkpointing() -> bool:
    """Return whether the module that asks runs a forward whose activations are not kept."""
    return _LOCAL.is_checkpointing


def is_recomputing() -> bool:
    """Return whether the module that asks is run again for its backward.

    For what must be done once a forward, such as counting.
    """
    return _LOCAL.is_recomputing


@contextmanager
def checkpointing() -> Iterator[None]:
    """Let `is_checkpointing` be true in this thread."""
    before, _LOCAL.is_checkpointing = _LOCAL.is_checkpointing, True
    try:
        yield
    finally:
        _LOCAL.is_checkpointing = before


@contextmanager
def recomputing() -> Iterator[None]:
    """Let `is_recomputing` be true in this thread."""
    before, _LOCAL.is_recomputing = _LOCAL.is_recomputing, True
    try:
        yield
    finally:
        _LOCAL.is_recomputing = before
