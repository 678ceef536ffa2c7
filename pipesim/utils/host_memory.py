"""Check that arrays fit in this machine's memory, before they are allocated."""

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

#: Bytes of each task in a graph, and 8 more while the graph is built.
BYTES_PER_TASK = 32
#: Bytes of the start and the end of a task.
_BYTES_OF_TIMES = 16
#: Peak bytes of each action while a named schedule is built; 9 of them remain.
_BYTES_PER_ACTION = 24
#: Bytes of each stage while a placement is built, and of each row of a sweep; both measured.
_BYTES_PER_STAGE, _BYTES_PER_ROW = 120, 4000
#: Bytes of each micro-batch: its number, that times the number of paths, and its path.
_BYTES_PER_MICROBATCH = 24
#: Number of stages or micro-batches for which every machine has memory.
_FEW = 100_000
#: About: each forward and backward has a SEND and a RECV, except at the ends of the pipeline.
_TASKS_PER_ACTION = 3
#: Largest number that messages show; it still is a float. Larger ones are shown as this one.
_MOST = 10**300
_ADVICE = "use fewer micro-batches, devices or replicas"


def available_memory() -> int:
    """Return the bytes that this process can still allocate: machine, cgroup and ulimit."""
    return min([_machine_bytes(), *_cgroup_bytes(), *_process_bytes()])


def _process_bytes() -> list[int]:
    """Return the bytes left under the limit of this process's address space, if it has one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        pages = 0
    return [max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))]


def _cgroup_bytes() -> list[int]:
    """Return the bytes left under the limit of a container or job, if any (cgroup v2)."""
    try:
        name = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].split("\n", 1)[0]
        folder = Path("/sys/fs/cgroup") / name.lstrip("/")
        limit, used = ((folder / f"memory.{x}").read_text() for x in ("max", "current"))
        return [max(0, int(limit) - int(used))]
    except (OSError, ValueError, IndexError):  # another version, no limit, or no cgroup
        return []


def _machine_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(subject: str, nbytes: int, advice: str = _ADVICE) -> None:
    """Raise if ``nbytes`` are more than this process can still allocate.

    Raises
    ------
    CapacityError
        The message has the bytes that are needed and those that are available.
    """
    available = available_memory()
    if nbytes > available:
        raise CapacityError(
            f"{subject} needs {_gigabytes(nbytes)}, and {_gigabytes(available)} are available; "
            f"{advice}"
        )


def check_schedule(name: str, n_actions: int) -> None:
    """Raise if there is no memory to build a schedule of at least ``n_actions``.

    Raises
    ------
    CapacityError
        The message also has the bytes of its graph.
    """
    available, nbytes = available_memory(), n_actions * _BYTES_PER_ACTION
    if nbytes > available:
        n_tasks = _TASKS_PER_ACTION * n_actions
        needed = f"{_gigabytes(nbytes)} and its graph of {_count(n_tasks)} tasks "
        raise CapacityError(
            f"schedule {name!r} of {_count(n_actions)} actions needs {needed}"
            f"{_gigabytes(_graph_bytes(n_tasks))}, but {_gigabytes(available)} are available; "
            f"{_ADVICE}"
        )


def check_stages(n_stages: int) -> None:
    """Raise if a placement of ``n_stages``, copies counted, would not fit.

    Raises
    ------
    CapacityError
        The message has the number of stages and their bytes.
    """
    if n_stages <= _FEW:  # called often, and reading the available memory takes longer than this
        return
    nbytes = n_stages * _BYTES_PER_STAGE
    check_memory(f"a placement of {_count(n_stages)} stages", nbytes, "use fewer devices or stages")


def check_microbatches(n_microbatches: int) -> None:
    """Raise if an array of ``n_microbatches`` would not fit.

    Raises
    ------
    CapacityError
        The message has the number of micro-batches and their bytes.
    """
    if n_microbatches <= _FEW:  # as for stages
        return
    nbytes = n_microbatches * _BYTES_PER_MICROBATCH
    check_memory(f"a list of {_count(n_microbatches)} micro-batches", nbytes)


def check_rows(n_rows: int) -> None:
    """Raise if a sweep of ``n_rows`` would not fit.

    Raises
    ------
    CapacityError
        The message has the number of rows and their bytes.
    """
    nbytes = n_rows * _BYTES_PER_ROW
    check_memory(f"a sweep of {_count(n_rows)} rows", nbytes, "give fewer values to its keys")


def check_tasks(n_actions: int) -> None:
    """Raise if the graph of ``n_actions`` compute actions would not fit, by an estimate.

    Raises
    ------
    CapacityError
        The message has the number of tasks and their bytes.
    """
    check_graph(_TASKS_PER_ACTION * n_actions)


def check_graph(n_tasks: int) -> None:
    """Raise if a graph of ``n_tasks``, with their times, would not fit.

    Raises
    ------
    CapacityError
        The message has the number of tasks and their bytes.
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
