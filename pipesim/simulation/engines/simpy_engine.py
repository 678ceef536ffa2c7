"""The reference engine: the rules of docs/time.md as SimPy processes for hosts, streams and links.

Times are computed with ``max`` (wait for several events) and ``+`` (timeouts) only, so that other
engines can be compared with ``==``.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Generator, Iterable
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import simpy
from numpy.typing import NDArray

from pipesim.costs.task_costs import TaskCosts
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COPIES, RECVS, SENDS

Process = Generator[simpy.Event, Any, None]
#: SimPy serves events of equal time by priority: 0 urgent, 1 normal, then 2: links are granted when
#: all requests of this time are known.
_LAST = 2


def run(graph: TaskGraph, costs: TaskCosts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return start and end of each task, in seconds; NaN for tasks that never run."""
    step = _SimulatedStep(graph, costs)
    step.env.run()
    return step.start, step.end


class _Request(NamedTuple):
    """Request of a transfer or collective for its links, since a time in seconds."""

    since: float
    #: The SEND, or the first member of the collective.
    task: int
    #: Links to hold; the count of a link is the number of members of a collective that hold it.
    links: Counter[int]
    #: Event that fires when the links are granted.
    granted: simpy.Event


class _Links:
    """Queue of requests for links: first come, first served; at equal times by task id (rule 8).

    A request for several links waits in the queue of each. It is granted when it is the first in
    all of these queues and all of its links are free.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.busy: Counter[int] = Counter()
        self.waiting: list[_Request] = []

    def request(self, task: int, links: Counter[int]) -> simpy.Event:
        """Return an event that fires when ``task`` may hold its links."""
        granted = self.env.event()
        insort(self.waiting, _Request(self.env.now, task, links, granted), key=itemgetter(0, 1))
        self._serve_later()
        return granted

    def release(self, links: Counter[int]) -> None:
        self.busy -= links
        self._serve_later()

    def _serve_later(self) -> None:
        """Schedule `_serve` for when all requests of the current time are known."""
        event = self.env.event()
        event.callbacks.append(self._serve)
        event._ok, event._value = True, None  # as succeed() does, but with another priority
        self.env.schedule(event, priority=_LAST)  # type: ignore[arg-type]

    def _serve(self, _: simpy.Event) -> None:
        unavailable = set(self.busy)
        for request in list(self.waiting):
            if unavailable.isdisjoint(request.links):
                self.waiting.remove(request)
                self.busy += request.links
                request.granted.succeed()
            unavailable.update(request.links)  # later requests wait behind this one, served or not


class _SimulatedStep:
    """One simulated step: the events of each task, and the processes that fire them."""

    def __init__(self, graph: TaskGraph, costs: TaskCosts) -> None:
        self.graph = graph
        self.duration, self.latency = costs.duration, costs.latency
        self.launch, self.link_numbers = costs.launch, costs.links
        self.env = env = simpy.Environment()
        n = len(graph)
        self.start, self.end = np.full(n, np.nan), np.full(n, np.nan)
        self.issued: list[simpy.Event] = [env.event() for _ in range(n)]
        self.reached = [env.event() for _ in range(n)]
        self.started = [env.event() for _ in range(n)]
        self.ended = [env.event() for _ in range(n)]
        self.head: dict[int, simpy.Event] = {}  # by SEND: its first byte arrives
        self.tail: dict[int, simpy.Event] = {}  # by SEND: its last byte arrives
        self.partial: list[int] = graph.partial_dependency.tolist()
        self.share = costs.share
        self.part_done: dict[int, simpy.Event] = {}  # by bucket: its gradients are complete
        self.buckets: dict[int, list[int]] = {}  # by backward: the buckets that need a part of it
        for bucket in np.flatnonzero(graph.partial_dependency >= 0).tolist():
            self.buckets.setdefault(self.partial[bucket], []).append(bucket)
        self.links = _Links(env)
        self.granted: dict[int, simpy.Event] = {}  # by collective: it may hold its links
        self.in_threads = graph.host_threads and bool(graph.host.any())
        self.is_send, self.is_recv = graph.is_op(SENDS), graph.is_op(RECVS)
        self.is_copy = graph.is_op(COPIES)
        if costs.issued is not None:
            self.issued = [env.timeout(moment) for moment in costs.issued.tolist()]
        else:
            host_of = graph.host[graph.device]
            for host in np.unique(host_of):
                env.process(self.issue(np.flatnonzero(host_of == host).tolist()))
        for stream in range(len(graph.queues)):
            env.process(self.serve(graph.queues[stream].tolist()))

    def issue(self, tasks: Iterable[int]) -> Process:
        """Run a host: issue tasks in id order, each after its launch cost (rule 7)."""
        for task in tasks:
            for first in self.graph.issued_first[task].tolist() if self.in_threads else ():
                yield self.issued[first]
            if self.launch[task] > 0:
                yield self.env.timeout(self.launch[task])
            self.issued[task].succeed()

    def serve(self, queue: Iterable[int]) -> Process:
        """Run a stream: execute tasks one at a time, in queue order (rules 1 and 2)."""
        for task in queue:
            yield self.issued[task]
            for needed in self.graph.dependencies[task].tolist():
                if self.partial and needed == self.partial[task]:
                    yield self.started[needed]
                    yield self.part_done[task]
                else:
                    yield self.ended[needed]
            self.reached[task].succeed()
            if self.is_send[task]:
                yield from self.send(task)
            elif self.is_recv[task]:
                yield from self.receive(task)
            elif self.is_copy[task]:
                yield from self.copy(task)
            else:
                yield from self.compute(task)
            self.end[task] = self.env.now
            self.ended[task].succeed()

    def begin(self, task: int) -> None:
        """Record the start of a task; schedule the end of each bucket of its gradients (rule 3)."""
        self.start[task] = self.env.now
        for bucket in self.buckets.get(task, ()):
            self.part_done[bucket] = self.env.timeout(self.share[bucket] * self.duration[task])
        self.started[task].succeed()

    def held(self, task: int) -> Counter[int]:
        """Return the links that a SEND, or a member of a collective, holds while it runs."""
        return Counter(set(self.link_numbers[task].tolist()) - {-1})

    def compute(self, task: int) -> Process:
        """Hold the stream for a task's duration; hold a collective member's links too."""
        links: Counter[int] = Counter()
        if self.graph.group[task] >= 0:
            links = yield from self.meet(task)
        self.begin(task)
        yield self.env.timeout(self.duration[task])
        if links:
            self.links.release(links)

    def meet(self, task: int) -> Generator[simpy.Event, Any, Counter[int]]:
        """Wait for all members of a collective (rule 9), then for the links of all (rule 8).

        Return the links that this member holds.
        """
        group = int(self.graph.group[task])
        members = self.graph.collectives[group].tolist()
        for member in members:
            yield self.reached[member]
        if self.duration[members].min() <= 0:
            return Counter()
        if group not in self.granted:
            links = Counter(link for member in members for link in self.held(member))
            self.granted[group] = self.links.request(min(members), links)
        yield self.granted[group]
        return self.held(task)

    def send(self, task: int) -> Process:
        """Hold links and stream while bytes are sent; they arrive one latency later (rule 4)."""
        if self.graph.rendezvous:  # rule 6
            yield self.reached[self.graph.pair[task]]
        duration, latency = self.duration[task], self.latency[task]
        links = self.held(task)
        if duration > 0:
            yield self.links.request(task, links)
        self.head[task] = self.env.timeout(latency)
        self.begin(task)
        if duration > 0:
            yield self.env.timeout(duration)
            self.links.release(links)
        self.tail[task] = self.env.timeout(latency)

    def copy(self, task: int) -> Process:
        """Hold the host's link and the stream while activations are copied (rule 8)."""
        duration, links = self.duration[task], self.held(task)
        if duration > 0:
            yield self.links.request(task, links)
        self.begin(task)
        if duration > 0:
            yield self.env.timeout(duration)
            self.links.release(links)

    def receive(self, task: int) -> Process:
        """Start at the arrival of the first byte, end at that of the last byte (rule 4)."""
        send = int(self.graph.pair[task])
        yield self.started[send]
        yield self.head[send]
        self.begin(task)
        yield self.ended[send]
        yield self.tail[send]
