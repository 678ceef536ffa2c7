"""Refuse what does not fit in memory before it is allocated."""

from __future__ import annotations

import os
from pathlib import Path

from pipesim.errors import CapacityError

__all__ = ["BYTES_PER_TASK", "available_memory", "check_memory", "check_schedule", "check_tasks"]

#: What a graph holds of each task, and what wiring it needs besides (8).
BYTES_PER_TASK = 32
#: Start and end of a task, in seconds.
_BYTES_OF_TIMES = 16
#: What building a named schedule takes of each action at its peak; 9 of them stay.
_BYTES_PER_ACTION = 24
#: Each forward and backward comes with its SEND and RECV, save at the pipeline's ends.
_TASKS_PER_ACTION = 3
#: A whole number that is still a float; larger ones are said to be as large.
_MOST = 10**300
_ADVICE = "use fewer micro-batches, devices or replicas"


def available_memory() -> int:
    """Return the bytes that this machine can still give out without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(what: str, nbytes: int, advice: str = _ADVICE) -> None:
    """Raise if ``nbytes`` are more than the machine has left.

    Raises
    ------
    CapacityError
        Saying how much is needed and how much there is.
    """
    there = available_memory()
    if nbytes > there:
        raise CapacityError(
            f"{what} needs {_gigabytes(nbytes)}, and {_gigabytes(there)} are available; {advice}"
        )


def check_schedule(name: str, n_actions: int) -> None:
    """Raise if there is no memory to build a schedule of at least ``n_actions``.

    Raises
    ------
    CapacityError
        Saying also what its graph would need.
    """
    there, nbytes = available_memory(), n_actions * _BYTES_PER_ACTION
    if nbytes > there:
        tasks, of_tasks = _tasks(n_actions)
        raise CapacityError(
            f"schedule {name!r} of {_count(n_actions)} actions needs {_gigabytes(nbytes)} and its "
            f"graph of {_count(tasks)} tasks {_gigabytes(of_tasks)}, but {_gigabytes(there)} are "
            f"available; {_ADVICE}"
        )


def check_tasks(n_actions: int) -> None:
    """Raise if the graph of ``n_actions`` compute actions, and its times, would not fit.

    Raises
    ------
    CapacityError
        Saying how many tasks that are, and what they need.
    """
    tasks, nbytes = _tasks(n_actions)
    check_memory(f"a graph of {_count(tasks)} tasks", nbytes)


def _tasks(n_actions: int) -> tuple[int, int]:
    """Return the tasks of ``n_actions``, at most, and the bytes of their graph and times."""
    tasks = _TASKS_PER_ACTION * n_actions
    return tasks, tasks * (BYTES_PER_TASK + _BYTES_OF_TIMES)


def _count(n: int) -> str:
    """Return ``6,000`` or ``6e+12``."""
    return f"{n:,}" if n < 10**6 else f"{min(n, _MOST):.3g}"


def _gigabytes(nbytes: int) -> str:
    return f"{min(nbytes, _MOST) / 1e9:.3g} GB"
