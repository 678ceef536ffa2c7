"""`Cache`: values by key, made at their first use."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")


class Cache:
    """Values by key. With more than ``most`` of them, the oldest are dropped."""

    def __init__(self, most: int | None = None) -> None:
        self._values: dict[Hashable, object] = {}
        self._most = most

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key, made at its first use; it has the same type at each use."""
        values = self._values
        if key not in values:
            while self._most is not None and len(values) >= self._most:
                del values[next(iter(values))]
            values[key] = make()
        return values[key]  # type: ignore[return-value]  # of this key
