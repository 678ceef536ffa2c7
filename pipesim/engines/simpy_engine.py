"""The reference engine: the rules of docs/time.md as SimPy processes, hosts, streams, links.

Times are made by ``max`` (waiting for several events) and ``+`` (timeouts) alone, so that other
engines can be compared with ``==``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from pipesim.costs import TaskCosts
from pipesim.graph import TaskGraph
from pipesim.ops import RECVS, SENDS

__all__ = ["run"]

Process = Generator[simpy.Event, Any, None]
#: SimPy serves events of one moment by priority: 0 urgent, 1 normal, and links when all is known.
_LAST = 2


def run(graph: TaskGraph, costs: TaskCosts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return start and end of each task, in seconds; NaN for tasks that never run."""
    step = _Step(graph, costs)
    step.env.run()
    return step.start, step.end


class _Link:
    """Serves transfers first come, first served; of one moment, the smaller id first (rule 8)."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.busy = False
        self.waiting: list[tuple[float, int, simpy.Event]] = []

    def request(self, task: int) -> simpy.Event:
        """Return an event that fires when ``task`` may hold the link."""
        granted = self.env.event()
        self.waiting.append((self.env.now, task, granted))
        self._serve_later()
        return granted

    def release(self) -> None:
        self.busy = False
        self._serve_later()

    def _serve_later(self) -> None:
        """Serve when every request of this moment is known."""
        event = self.env.event()
        event.callbacks.append(self._serve)
        event._ok, event._value = True, None  # what succeed() does, but with our priority
        self.env.schedule(event, priority=_LAST)  # type: ignore[arg-type]

    def _serve(self, _: simpy.Event) -> None:
        if self.waiting and not self.busy:
            first = min(self.waiting)
            self.waiting.remove(first)
            self.busy = True
            first[2].succeed()


class _Step:
    """One simulated step: the events of every task, and the processes that fire them."""

    def __init__(self, graph: TaskGraph, costs: TaskCosts) -> None:
        self.graph, self.costs = graph, costs
        self.env = env = simpy.Environment()
        n = len(graph)
        self.start, self.end = np.full(n, np.nan), np.full(n, np.nan)
        self.issued = [env.event() for _ in range(n)]
        self.reached = [env.event() for _ in range(n)]
        self.started = [env.event() for _ in range(n)]
        self.ended = [env.event() for _ in range(n)]
        self.head: dict[int, simpy.Event] = {}  # of a SEND: its first byte arrives
        self.tail: dict[int, simpy.Event] = {}  # of a SEND: its last byte arrives
        self.links: dict[int, _Link] = {}
        self.is_send, self.is_recv = graph.is_op(SENDS), graph.is_op(RECVS)
        host_of = graph.host[graph.device]
        for host in np.unique(host_of):
            env.process(self.issue(np.flatnonzero(host_of == host).tolist()))
        for stream in range(len(graph.queues)):
            env.process(self.serve(graph.queues[stream].tolist()))

    def issue(self, tasks: Iterable[int]) -> Process:
        """Be a host: issue tasks in id order, each at its launch cost (rule 7)."""
        for task in tasks:
            if self.costs.launch[task] > 0:
                yield self.env.timeout(self.costs.launch[task])
            self.issued[task].succeed()

    def serve(self, queue: Iterable[int]) -> Process:
        """Be a stream: run tasks one at a time, in queue order (rules 1 and 2)."""
        for task in queue:
            yield self.issued[task]
            for needed in self.graph.dependencies[task].tolist():
                yield self.ended[needed]
            self.reached[task].succeed()
            if self.is_send[task]:
                yield from self.send(task)
            elif self.is_recv[task]:
                yield from self.receive(task)
            else:
                yield from self.compute(task)
            self.end[task] = self.env.now
            self.ended[task].succeed()

    def begin(self, task: int) -> None:
        """Note the start."""
        self.start[task] = self.env.now
        self.started[task].succeed()

    def compute(self, task: int) -> Process:
        """Hold the stream for the task's duration, once all members of its group are here."""
        group = int(self.graph.group[task])
        if group >= 0:  # rule 9
            for member in np.flatnonzero(self.graph.group == group).tolist():
                yield self.reached[member]
        self.begin(task)
        yield self.env.timeout(self.costs.duration[task])

    def send(self, task: int) -> Process:
        """Hold link and stream for the bytes; head and tail arrive a latency later (rule 4)."""
        if self.graph.rendezvous:  # rule 6
            yield self.reached[self.graph.pair[task]]
        duration, latency = self.costs.duration[task], self.costs.latency[task]
        link = self.links.setdefault(int(self.costs.link[task]), _Link(self.env))
        if duration > 0:
            yield link.request(task)
        self.head[task] = self.env.timeout(latency)
        self.begin(task)
        if duration > 0:
            yield self.env.timeout(duration)
            link.release()
        self.tail[task] = self.env.timeout(latency)

    def receive(self, task: int) -> Process:
        """Start when the head has arrived, end when the tail has (rule 4)."""
        send = int(self.graph.pair[task])
        yield self.started[send]
        yield self.head[send]
        self.begin(task)
        yield self.ended[send]
        yield self.tail[send]
