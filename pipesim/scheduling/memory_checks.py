"""Check that a schedule, and the graph that it is lowered to, fit in memory before they are built.

The checks of graphs are here too, since the error of `check_schedule` has the bytes of the graph.
"""

from __future__ import annotations

from pipesim.errors import CapacityError
from pipesim.utils import host_memory
from pipesim.utils.host_memory import bytes_text, check_memory, count_text

#: Advice for a schedule or a graph that would not fit.
FEWER_TASKS = "use fewer micro-batches, devices or replicas"
#: Bytes of each task in a graph, and 8 more while the graph is built.
BYTES_PER_TASK = 32
#: Bytes of the start and the end of a task.
_BYTES_OF_TIMES = 16
#: Peak bytes of each action while a named schedule is built; 9 of them remain.
_BYTES_PER_ACTION = 24
#: Bytes of each stage while a placement is built (measured).
_BYTES_PER_STAGE = 120
#: Bytes of each micro-batch: its number, that times the number of paths, and its path.
_BYTES_PER_MICROBATCH = 24
#: Number of stages or micro-batches for which every machine has memory.
_FEW = 100_000
#: About: each forward and backward has a SEND and a RECV, except at the ends of the pipeline.
_TASKS_PER_ACTION = 3


def check_schedule(name: str, n_actions: int) -> None:
    """Raise if there is no memory to build a schedule of at least ``n_actions``."""
    available = host_memory.available_memory()
    nbytes = n_actions * _BYTES_PER_ACTION
    if nbytes > available:
        n_tasks = _TASKS_PER_ACTION * n_actions
        needed = f"{bytes_text(nbytes)} and its graph of {count_text(n_tasks)} tasks "
        raise CapacityError(
            f"schedule {name!r} of {count_text(n_actions)} actions needs {needed}"
            f"{bytes_text(_graph_bytes(n_tasks))}, but {bytes_text(available)} are available; "
            f"{FEWER_TASKS}"
        )


def check_stages(n_stages: int) -> None:
    """Raise if a placement of ``n_stages``, copies counted, would not fit."""
    if n_stages <= _FEW:  # called often, and reading the available memory takes longer than this
        return
    nbytes = n_stages * _BYTES_PER_STAGE
    subject = f"a placement of {count_text(n_stages)} stages"
    check_memory(subject, nbytes, "use fewer devices or stages")


def check_microbatches(n_microbatches: int) -> None:
    """Raise if an array of ``n_microbatches`` would not fit."""
    if n_microbatches <= _FEW:  # as for stages
        return
    nbytes = n_microbatches * _BYTES_PER_MICROBATCH
    check_memory(f"a list of {count_text(n_microbatches)} micro-batches", nbytes, FEWER_TASKS)


def check_tasks(n_actions: int) -> None:
    """Raise if the graph of ``n_actions`` compute actions would not fit, by an estimate."""
    check_graph(_TASKS_PER_ACTION * n_actions)


def check_graph(n_tasks: int) -> None:
    """Raise if a graph of ``n_tasks``, with their times, would not fit."""
    check_memory(f"a graph of {count_text(n_tasks)} tasks", _graph_bytes(n_tasks), FEWER_TASKS)


def _graph_bytes(n_tasks: int) -> int:
    return n_tasks * (BYTES_PER_TASK + _BYTES_OF_TIMES)
