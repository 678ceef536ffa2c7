"""Schedules in settings: a name in the registry, or a file that holds the orders."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from pipesim.scheduling.closed_forms import Counts
from pipesim.scheduling.registry import ScheduleInfo, options_of_schedules, schedule_info
from pipesim.scheduling.schedule import Schedule

_SUFFIXES = (".csv", ".txt")


def is_file(name: object) -> bool:
    """Return whether a name is that of a file: it ends in .csv or .txt, or has a slash."""
    return (
        isinstance(name, str)
        and name not in options_of_schedules()
        and (name.endswith(_SUFFIXES) or "/" in name)
    )


def source_info(name: str) -> ScheduleInfo:
    """Return the information on a registered schedule, or on the schedule in a file.

    Raises
    ------
    ScheduleError
        For a file that cannot be read.
    """
    if not is_file(name):
        return schedule_info(name)
    schedule = _load(name)
    n_devices, n_microbatches = schedule.n_devices, schedule.n_microbatches
    return ScheduleInfo(
        name=name,
        summary="from a file",
        source=name,
        build=lambda p, m: schedule,
        options=(),
        counts=Counts(
            f"just the {n_devices} devices and {n_microbatches} micro-batches of its file",
            lambda p, m: (p, m) == (n_devices, n_microbatches),
        ),
    )


def file_counts(name: object) -> dict[str, int]:
    """Return ``n_devices`` and ``n_microbatches`` of the schedule in a file; {} for other names."""
    if not isinstance(name, str) or not is_file(name):
        return {}
    schedule = _load(name)
    return {"n_devices": schedule.n_devices, "n_microbatches": schedule.n_microbatches}


def file_digest(name: str) -> str:
    """Return a digest of the orders in a file."""
    return hashlib.sha256(_load(name).grid().encode()).hexdigest()[:32]


def _load(name: str) -> Schedule:
    """Return the schedule in a file, read again only after the file has changed."""
    try:
        state = Path(name).stat()
    except (OSError, ValueError):  # ValueError: no path can have a null character
        return Schedule.load(name)  # raises the right error
    return _cached_load(name, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _cached_load(name: str, *state: int) -> Schedule:
    """Load a file, once for all rows of a sweep; ``state`` is its time of change (ns) and size."""
    return Schedule.load(name)
