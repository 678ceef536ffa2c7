"""Read the times of a step's tasks from their events.

CUDA takes about 2 us to read the time between two events, and each task needs two such reads. A
training loop that never uses the times would lose as much time as a whole message may take. So the
result of a step holds the events, which are small, and reads them at the first access. It does not
hold the step, its batch or its activations.
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
from pipeexec.executor.results.process_results import none_if_all_nan
from pipesim.graph.graph import TaskGraph
from pipesim.timeline.collective_starts import align_collectives
from pipesim.timeline.timeline import Timeline


class Milestone(NamedTuple):
    """A task that waits for an event inside a backward, and that backward's start and end event."""

    task: int
    event: Event
    start: Event
    end: Event


@dataclass(frozen=True, eq=False)
class Readings:
    """Events of a step of this process, and the other columns of its timeline.

    Attributes
    ----------
    graph
        Task graph of the step.
    clock
        Clocks of the devices; None if the step failed before it started.
    local_numbers
        Position of each device of the graph among this process's devices; -1 for remote devices.
    on_host
        Whether each device of the graph is a CPU, whose clock is the host's.
    start_events, end_events
        An event a task; None if the task was not issued.
    ran
        Whether each task ran.
    leaders
        For members of a collective that another member of this process runs: that member.
    nbytes, issued
        Bytes that each task moved, and the time at which the host issued it (s).
    order
        The tasks of this process in the order in which they were issued.
    host_seconds
        Time in which the host issued all tasks (s).
    issue_seconds
        Time in which host threads issued each task (s); None without host threads.
    milestones
        Events of reductions that wait for a part of a backward.
    is_replay
        Whether the host launched one CUDA graph.
    may_be_running
        Whether some tasks may not have ended.
    """

    graph: TaskGraph
    clock: Clocks | None
    local_numbers: Sequence[int]
    on_host: NDArray[np.bool_]
    start_events: Sequence[Event | None]
    end_events: Sequence[Event | None]
    ran: NDArray[np.bool_]
    leaders: Mapping[int, int]
    nbytes: NDArray[np.float64]
    issued: Sequence[float]
    host_seconds: float
    order: Sequence[int]
    issue_seconds: NDArray[np.float64] | None = None
    milestones: Sequence[Milestone] = ()
    is_replay: bool = False
    may_be_running: bool = False

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the step; NaN for tasks that did not run, or ran in other processes."""
        graph = self.graph
        start, end = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
        for task in np.flatnonzero(self.ran).tolist():
            start_event, end_event = self.start_events[task], self.end_events[task]
            if self.clock is None or start_event is None or end_event is None:
                continue
            if self.may_be_running and not end_event.is_set():
                continue
            device = self.local_numbers[int(graph.device[task])]
            start[task] = self.clock.seconds(device, start_event)
            end[task] = self.clock.seconds(device, end_event)
        for task, leader in self.leaders.items():
            if not np.isnan(end[task]):
                start[task], end[task] = start[leader], end[leader]
        # A GPU's clock is not the host's: issue times are unknown on it.
        issued = np.where(self.on_host[graph.device] & ~np.isnan(start), self.issued, np.nan)
        times = align_collectives(graph, start, end)
        return Timeline(graph, *times, self.nbytes, issued=none_if_all_nan(issued))

    @property
    def milestone_shares(self) -> dict[int, float]:
        """Share of its backward after which each bucket's gradients are computed, by reduction."""
        shares: dict[int, float] = {}
        for task, event, start, end in self.milestones:
            duration = max(end.seconds_since(start), 1e-9)
            shares[task] = max(shares.get(task, 0.0), event.seconds_since(start) / duration)
        return shares

    @property
    def host_times(self) -> NDArray[np.float64] | None:
        """Time in which the host issued each task (s); NaN for others, None for a replay."""
        if self.is_replay or self.issue_seconds is not None:
            return self.issue_seconds
        seconds = np.full(len(self.graph), np.nan)
        order = np.array(self.order, dtype=np.int64)
        seconds[order] = np.diff(np.array(self.issued)[order], append=self.host_seconds)
        return seconds

    @property
    def clock_error(self) -> float:
        """Largest error of time differences between two devices (s)."""
        return 0.0 if self.clock is None else self.clock.error

    def fields(self) -> dict[str, Any]:
        """Return the fields of `StepResult` that come from events, by name."""
        return {
            "timeline": self.timeline,
            "clock_error": self.clock_error,
            "milestones": self.milestone_shares,
            "host_times": self.host_times,
        }
