"""Refuse what does not fit in memory before it is allocated."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from pipesim.errors import CapacityError

__all__ = [
    "BYTES_PER_TASK",
    "available_memory",
    "check_graph",
    "check_memory",
    "check_microbatches",
    "check_rows",
    "check_schedule",
    "check_stages",
    "check_tasks",
]

#: What a graph holds of each task, and what wiring it needs besides (8).
BYTES_PER_TASK = 32
#: Start and end of a task, in seconds.
_BYTES_OF_TIMES = 16
#: What building a named schedule takes of each action at its peak; 9 of them stay.
_BYTES_PER_ACTION = 24
#: What a placement takes of each stage while it is made, and a sweep of each row, by measurement.
_BYTES_PER_STAGE, _BYTES_PER_ROW = 120, 4000
#: Integers of each micro-batch: its number, that times the number of paths, and its path.
_BYTES_PER_MICROBATCH = 24
#: Stages or micro-batches that any machine has memory for.
_FEW = 100_000
#: About: each forward and backward comes with its SEND and RECV, save at the pipeline's ends.
_TASKS_PER_ACTION = 3
#: A whole number that is still a float; larger ones are said to be as large.
_MOST = 10**300
_ADVICE = "use fewer micro-batches, devices or replicas"


def available_memory() -> int:
    """Return the bytes that this process can still get: of the machine, its cgroup, and ulimit."""
    return min([_of_machine(), *_of_cgroup(), *_of_process()])


def _of_process() -> list[int]:
    """Return what is left under the limit of this process's address space, if there is one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        pages = 0
    return [max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))]


def _of_cgroup() -> list[int]:
    """Return what is left under the limit of a container or job, if there is one (cgroup v2)."""
    try:
        name = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].split("\n", 1)[0]
        folder = Path("/sys/fs/cgroup") / name.lstrip("/")
        limit, used = ((folder / f"memory.{x}").read_text() for x in ("max", "current"))
        return [max(0, int(limit) - int(used))]
    except (OSError, ValueError, IndexError):  # another version, no limit, or no cgroup
        return []


def _of_machine() -> int:
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
        n_tasks = _TASKS_PER_ACTION * n_actions
        needed = f"{_gigabytes(nbytes)} and its graph of {_count(n_tasks)} tasks "
        raise CapacityError(
            f"schedule {name!r} of {_count(n_actions)} actions needs {needed}"
            f"{_gigabytes(_graph_bytes(n_tasks))}, but {_gigabytes(there)} are available; {_ADVICE}"
        )


def check_stages(n_stages: int) -> None:
    """Raise if a placement of so many stages, copies counted, would not fit.

    Raises
    ------
    CapacityError
        Saying how many stages that are, and what they need.
    """
    if n_stages <= _FEW:  # asked often, and reading what is left takes longer than such a placement
        return
    nbytes = n_stages * _BYTES_PER_STAGE
    check_memory(f"a placement of {_count(n_stages)} stages", nbytes, "use fewer devices or stages")


def check_microbatches(n_microbatches: int) -> None:
    """Raise if an array of so many micro-batches would not fit.

    Raises
    ------
    CapacityError
        Saying how many micro-batches that are, and what they need.
    """
    if n_microbatches <= _FEW:  # as for stages
        return
    nbytes = n_microbatches * _BYTES_PER_MICROBATCH
    check_memory(f"a list of {_count(n_microbatches)} micro-batches", nbytes)


def check_rows(n_rows: int) -> None:
    """Raise if a sweep of so many rows would not fit.

    Raises
    ------
    CapacityError
        Saying how many rows that are, and what they need.
    """
    nbytes = n_rows * _BYTES_PER_ROW
    check_memory(f"a sweep of {_count(n_rows)} rows", nbytes, "give fewer values to its keys")


def check_tasks(n_actions: int) -> None:
    """Raise if the graph of ``n_actions`` compute actions would not fit, as far as is known yet.

    Raises
    ------
    CapacityError
        Saying how many tasks that are, and what they need.
    """
    check_graph(_TASKS_PER_ACTION * n_actions)


def check_graph(n_tasks: int) -> None:
    """Raise if a graph of so many tasks, and their times, would not fit.

    Raises
    ------
    CapacityError
        Saying how many tasks that are, and what they need.
    """
    check_memory(f"a graph of {_count(n_tasks)} tasks", _graph_bytes(n_tasks))


def _graph_bytes(n_tasks: int) -> int:
    """Return the bytes of a graph and its times."""
    return n_tasks * (BYTES_PER_TASK + _BYTES_OF_TIMES)


def _count(n: int) -> str:
    """Return ``6,000`` or ``6e+12``."""
    return f"{n:,}" if n < 10**6 else f"{min(n, _MOST):.3g}"


def _gigabytes(nbytes: int) -> str:
    return f"{min(nbytes, _MOST) / 1e9:.3g} GB"
