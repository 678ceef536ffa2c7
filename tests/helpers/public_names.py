"""Public names: those that the packages export, and those that their rooms add."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pipeexec
import pipesim

#: Rooms of the commands, and of parts of searches.
INNER = ("cli", "order_search")


def public_values() -> Iterator[tuple[str, Any]]:
    """Yield the name that users write, such as ``"ps.planning.Plan"``, and the value, of each."""
    for short, package in (("ps", pipesim), ("px", pipeexec)):
        for name in package.__all__:
            yield f"{short}.{name}", getattr(package, name)
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            room = info.name.partition(".")[2]
            if room[0] != "_" and room not in INNER:
                module = importlib.import_module(info.name)
                for name in sorted({*getattr(module, "__all__", ())} - {*package.__all__}):
                    yield f"{short}.{room}.{name}", getattr(module, name)
