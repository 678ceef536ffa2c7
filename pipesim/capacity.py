"""Refuse what does not fit in memory before it is allocated."""

from __future__ import annotations

import os
from pathlib import Path

from pipesim.errors import CapacityError

__all__ = ["available_memory", "check_memory"]


def available_memory() -> int:
    """Return the bytes that this machine can still give out without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(what: str, nbytes: float) -> None:
    """Raise if ``nbytes`` are more than the machine has left.

    Raises
    ------
    CapacityError
        Saying how much is needed and how much there is.
    """
    there = available_memory()
    if nbytes > there:
        raise CapacityError(
            f"{what} needs {nbytes / 1e9:.3g} GB, and {there / 1e9:.3g} GB are available; "
            "use fewer micro-batches, devices or replicas"
        )
