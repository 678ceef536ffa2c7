"""An attribute that has another value for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["changed"]


@contextmanager
def changed(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value in a block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
