"""Host threads: several, each of which issues for its own devices, or one with imposed launches.

Each host goes through the tasks of its devices in order of ids. A stream can only wait for an event
that was recorded, so before it gives a task, a host waits until other hosts have issued what the
task needs. That cannot block for ever: the ids are a topological order, and so the host that has
the smallest one of those not issued can go on.

The caller of the step waits meanwhile, and serves signals and timeouts. When something has failed,
or the step is given up, hosts stop before their next task.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter, sleep

import numpy as np

from pipeexec.devices.cpu_streams import CpuEvent
from pipeexec.distributed.processes import Processes
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step
from pipesim.errors import AccuracyWarning
from pipesim.graph.graph import TaskGraph

__all__ = ["HostThreads", "make_host_threads"]

#: Seconds between two looks at whether the step goes on.
_SLICE = 0.1
Gates = Mapping[int, CpuEvent]


class HostThreads:
    """The hosts of a graph's tasks in this process.

    Parameters
    ----------
    graph
        What runs.
    tasks
        Of each host, in order of ids.
    """

    def __init__(self, graph: TaskGraph, tasks: Sequence[Sequence[PlannedTask]]) -> None:
        self.tasks = tasks
        #: Tasks that other hosts have to issue before each.
        self._first = graph.issued_first if len(tasks) > 1 else None
        self._awaited = () if self._first is None else np.unique(self._first.values).tolist()
        self._threads = [own[0].device.host() for own in tasks]

    def start(self, step: Step) -> list[CpuEvent]:
        """Let each host issue its tasks of a step; return an event a host, which passes then."""
        gates = {task: CpuEvent() for task in self._awaited}
        for number, thread in enumerate(self._threads):
            thread.submit(partial(self._issue, step, number, gates))
        return [thread.record() for thread in self._threads]

    def _issue(self, step: Step, number: int, gates: Gates) -> None:
        try:
            step.submit(self._issuable(step, self.tasks[number], gates))
        except BaseException as error:
            step.host_error = step.host_error or error
            step.failure = step.failure or (-1, error)

    def _issuable(
        self, step: Step, tasks: Sequence[PlannedTask], gates: Gates
    ) -> Iterator[PlannedTask]:
        """Yield each task when its host may give it to its stream; then note that it was."""
        assert step.events.took is not None
        due = step.events.zero
        for task in tasks:
            for needed in () if self._first is None else self._first[task.id].tolist():
                if not gates[needed].is_set():
                    while not (step.has_stopped or gates[needed].wait(_SLICE)):
                        pass
                    due = max(due, perf_counter())  # a launch begins after the wait
            if step.has_stopped:
                return
            began = perf_counter()
            due += task.device.launch
            if due > began:
                sleep(due - began)
            yield task
            step.events.took[task.id] = perf_counter() - began
            if task.id in gates:
                gates[task.id].set()


def make_host_threads(
    graph: TaskGraph, tasks: Sequence[PlannedTask], processes: Processes | None
) -> HostThreads | None:
    """Return the hosts of a plan; None where the caller is the only one, and launches are its own.

    Of several processes each has one host.

    Warns
    -----
    AccuracyWarning
        If a graph is simulated with hosts that are processes, which are threads here.
    """
    is_one = processes is not None or not graph.host.any()
    if not is_one and not graph.host_threads:
        warnings.warn(
            f"the {len(np.unique(graph.host))} hosts of graph {graph.name!r} are threads of this "
            "process, which wait for each other; it is simulated with hosts that do not, and comes "
            "out too short: lower it with host_threads=True",
            AccuracyWarning,
            stacklevel=3,
        )
    if is_one and not any(task.device.launch for task in tasks):
        return None
    number = np.zeros(len(graph), np.int64) if is_one else graph.host[graph.device]
    tasks_of_host: dict[int, list[PlannedTask]] = {}
    for task in tasks:
        tasks_of_host.setdefault(int(number[task.id]), []).append(task)
    return HostThreads(graph, [own for _, own in sorted(tasks_of_host.items())])
