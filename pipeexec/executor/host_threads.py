"""Host threads that issue tasks: one for each simulated host, or one with imposed launch times.

Each host issues the tasks of its devices in order of ids. A stream can only wait for an event that
was recorded. So a host waits until other hosts have issued the tasks that its next task needs. This
cannot deadlock: ids are a topological order, so the host of the smallest unissued id can continue.

The caller of the step waits meanwhile and handles signals and timeouts. After a failure, or when
the step is abandoned, hosts stop before their next task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter, sleep

import numpy as np

from pipeexec.devices.device import has_launches, launch_seconds
from pipeexec.devices.streams import CpuEvent
from pipeexec.distributed.processes import Processes
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step
from pipesim.errors import AccuracyWarning
from pipesim.graph.graph import TaskGraph
from pipesim.utils.caller_warnings import warn_caller

#: Seconds between two checks of whether the step was stopped.
_CHECK_SECONDS = 0.1
IssuedEvents = Mapping[int, CpuEvent]


class HostThreads:
    """Host threads of this process; ``tasks`` are those of each host, in order of ids."""

    def __init__(self, graph: TaskGraph, tasks: Sequence[Sequence[PlannedTask]]) -> None:
        self.tasks = tasks
        self._op = graph.op.tolist()
        #: For each task, the tasks that other hosts have to issue before it; None for one host.
        self._issued_first = graph.issued_first if len(tasks) > 1 else None
        self._awaited_tasks = (
            () if self._issued_first is None else np.unique(self._issued_first.values).tolist()
        )
        self._threads = [host_tasks[0].device.host() for host_tasks in tasks]

    def start(self, step: Step) -> list[CpuEvent]:
        """Make each host issue its tasks of a step; return an event a host, set when it is done."""
        issued_events = {task: CpuEvent() for task in self._awaited_tasks}
        for number, thread in enumerate(self._threads):
            thread.submit(partial(self._issue, step, number, issued_events))
        return [thread.record() for thread in self._threads]

    def _issue(self, step: Step, number: int, issued_events: IssuedEvents) -> None:
        """Issue the tasks of a host; store its first error in the step."""
        try:
            step.submit(self._paced_tasks(step, self.tasks[number], issued_events))
        except BaseException as error:
            step.host_error = step.host_error or error
            step.failure = step.failure or (-1, error)

    def _paced_tasks(
        self, step: Step, tasks: Sequence[PlannedTask], issued_events: IssuedEvents
    ) -> Iterator[PlannedTask]:
        """Yield each task when its host may issue it; then record its time and set its event.

        A task may be issued after the tasks that it needs, and after its imposed launch time.
        """
        issue_seconds = step.events.issue_seconds
        assert issue_seconds is not None
        due = step.events.zero
        for task in tasks:
            for needed in (
                () if self._issued_first is None else self._issued_first[task.id].tolist()
            ):
                issued = issued_events[needed]
                while not (step.has_stopped or issued.wait(_CHECK_SECONDS)):
                    pass
                due = max(due, issued.time or due)  # a launch begins after the tasks it needs
            if step.has_stopped:
                return
            start = perf_counter()
            due += launch_seconds(task.device, self._op[task.id])
            if due > start:
                sleep(due - start)
            yield task
            issue_seconds[task.id] = perf_counter() - start
            if task.id in issued_events:
                issued_events[task.id].set()


def make_host_threads(
    graph: TaskGraph, tasks: Sequence[PlannedTask], processes: Processes | None
) -> HostThreads | None:
    """Return the host threads of a plan; None if the caller's thread issues all tasks.

    The caller's thread does so for one host without imposed launch times. With several processes,
    each process has one host.
    """
    has_one_host = processes is not None or not graph.host.any()
    if not has_one_host and not graph.host_threads:
        warn_caller(
            f"the {len(np.unique(graph.host))} hosts of graph {graph.name!r} run as threads of "
            "this process, which wait for each other; the graph models hosts that do not, so its "
            "simulated makespan is too short: lower it with host_threads=True",
            AccuracyWarning,
        )
    if has_one_host and not any(map(has_launches, {task.device for task in tasks})):
        return None
    host = np.zeros(len(graph), np.int64) if has_one_host else graph.host[graph.device]
    tasks_by_host: dict[int, list[PlannedTask]] = {}
    for task in tasks:
        tasks_by_host.setdefault(int(host[task.id]), []).append(task)
    return HostThreads(graph, [host_tasks for _, host_tasks in sorted(tasks_by_host.items())])
