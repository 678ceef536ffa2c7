"""When the tasks of a step ran, read from their events.

CUDA reads the time between two events in some 2 us, twice a task: as long as a loop that never asks
may take for a whole message. So a step's result holds these events, small objects all of them, and
reads them when it is first asked; of the step itself, its batch and activations it holds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeexec.devices.clocks import Clocks
from pipeexec.devices.streams import Event
from pipeexec.executor.process_results import align_collectives, none_if_unknown
from pipesim.graph.graph import TaskGraph
from pipesim.timeline.timeline import Timeline

__all__ = ["Milestone", "Readings"]


class Milestone(NamedTuple):
    """A task that waits for an event within a backward, and the events around that backward."""

    task: int
    event: Event
    began: Event
    ended: Event


@dataclass(frozen=True, eq=False)
class Readings:
    """The events of a step of this process, and what else its timeline has.

    Attributes
    ----------
    graph
        What ran.
    clock
        Of the devices; None if the step failed before it began.
    numbers
        The number among this process's devices of each device of the graph; -1 for those of others.
    on_host
        Whether each device of the graph is a CPU, whose clock is the host's.
    began, ended
        An event a task; None for those that were not issued.
    ran
        Whether each task ran.
    leaders
        Of members of a collective, the member whose times are theirs.
    nbytes, issued
        Of each task: bytes that it moved, and when the host issued it (s).
    order
        The tasks of this process as they were issued.
    host_seconds
        What the host took to issue all tasks.
    took
        What each task took the hosts (s), where they are others than the caller; else None.
    milestones
        Of reductions that wait for a part of a backward.
    is_replay
        Whether the host launched one CUDA graph.
    may_be_running
        Whether some tasks may not have ended.
    """

    graph: TaskGraph
    clock: Clocks | None
    numbers: Sequence[int]
    on_host: NDArray[np.bool_]
    began: Sequence[Event | None]
    ended: Sequence[Event | None]
    ran: NDArray[np.bool_]
    leaders: Mapping[int, int]
    nbytes: NDArray[np.float64]
    issued: Sequence[float]
    host_seconds: float
    order: Sequence[int]
    took: NDArray[np.float64] | None = None
    milestones: Sequence[Milestone] = ()
    is_replay: bool = False
    may_be_running: bool = False

    @cached_property
    def timeline(self) -> Timeline:
        """When each task ran; NaN for those that did not, or ran in other processes."""
        graph = self.graph
        start, end = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
        for task in np.flatnonzero(self.ran).tolist():
            began, ended = self.began[task], self.ended[task]
            if self.clock is None or began is None or ended is None:
                continue
            if self.may_be_running and not ended.is_set():
                continue
            device = self.numbers[int(graph.device[task])]
            start[task] = self.clock.seconds(device, began)
            end[task] = self.clock.seconds(device, ended)
        for task, leader in self.leaders.items():
            if not np.isnan(end[task]):
                start[task], end[task] = start[leader], end[leader]
        # GPUs have clocks of their own, which do not tell when the host did something.
        issued = np.where(self.on_host[graph.device] & ~np.isnan(start), self.issued, np.nan)
        times = align_collectives(graph, start, end)
        return Timeline(graph, *times, self.nbytes, issued=none_if_unknown(issued))

    @property
    def milestone_shares(self) -> dict[int, float]:
        """Share of its backward after which each bucket's gradients were there, by reduction."""
        shares: dict[int, float] = {}
        for task, event, began, ended in self.milestones:
            whole = max(ended.seconds_since(began), 1e-9)
            shares[task] = max(shares.get(task, 0.0), event.seconds_since(began) / whole)
        return shares

    @property
    def host_times(self) -> NDArray[np.float64] | None:
        """What the host took to issue each task (s); NaN for others, None of a replay."""
        if self.is_replay or self.took is not None:
            return self.took
        seconds = np.full(len(self.graph), np.nan)
        order = np.array(self.order, dtype=np.int64)
        seconds[order] = np.diff(np.array(self.issued)[order], append=self.host_seconds)
        return seconds

    @property
    def clock_error(self) -> float:
        """The most that times of two devices can be wrong against each other (s)."""
        return 0.0 if self.clock is None else self.clock.error

    def fields(self) -> dict[str, Any]:
        """Return what a step's result has of this, by the names that it has there."""
        return {
            "timeline": self.timeline,
            "clock_error": self.clock_error,
            "milestones": self.milestone_shares,
            "host_times": self.host_times,
        }
