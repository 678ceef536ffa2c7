"""`Status`: the task that each device of a process is running, and how processes exchange it.

Every process publishes its status in the shared store several times a second, and reads those of
the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pipeexec.devices.running_clock import RunningClock, RunningTimer
from pipeexec.distributed.store import StoreConnection


def look_period(n_ranks: int) -> float:
    """Return the least seconds between two looks at the store: all processes read each other."""
    return max(0.2, 0.01 * n_ranks)


class Head(NamedTuple):
    """Head of a device's queues: its first task that has not ended.

    Attributes
    ----------
    device
        Number of the device.
    task
        The first task of its compute stream that has not ended, or of its messages.
    place
        Stage and micro-batch of the task, as text.
    running
        Whether the task has begun.
    waits_for
        The tasks that it waits for, as text; empty if it has begun.
    """

    device: int
    task: str
    place: str
    running: bool
    waits_for: str

    def __str__(self) -> str:
        if self.running:
            return f"device {self.device} in {self.task} ({self.place})"
        waiting = f", waiting for {self.waits_for}" if self.waits_for else ""
        return f"device {self.device} before {self.task} ({self.place}){waiting}"


class Status(NamedTuple):
    """Status of a process: its step, how many tasks have ended, and the heads of its devices."""

    rank: int
    step: int
    in_step: bool
    n_ended: int
    heads: list[Head]

    @classmethod
    def from_json(cls, text: bytes) -> Status:
        """Return the status in a JSON text."""
        rank, step, in_step, n_ended, heads = json.loads(text)
        return cls(rank, step, in_step, n_ended, [Head(*head) for head in heads])

    def __str__(self) -> str:
        if not self.in_step:
            return f"rank {self.rank} between steps ({self.step} ended)"
        heads = "; ".join(map(str, self.heads)) or "no task to do"
        return f"rank {self.rank} in step {self.step}: {heads}"


class StepReporter:
    """Status of this process, from the pipeline that runs a step.

    Several pipelines may share the processes, one step at a time. Each of them starts and ends its
    steps here.
    """

    def __init__(self, rank: int) -> None:
        self._read: Callable[[], Status] = lambda: Status(rank, 0, False, 0, [])
        self._describe: Callable[[int], str] | None = None

    def start_step(
        self, read_status: Callable[[], Status], describe_last_task: Callable[[int], str]
    ) -> None:
        """Take the status from a step that begins.

        Parameters
        ----------
        read_status
            Returns the status of this process; called from the watchdog's thread.
        describe_last_task
            Returns the last known task of a rank that does not answer, as text.
        """
        self._read, self._describe = read_status, describe_last_task

    def end_step(self, status: Status) -> None:
        """Keep the status of a step that has ended, until the next one begins."""
        self._read = lambda: status

    def read_status(self) -> Status:
        """Return the status of this process."""
        return self._read()

    def describe_last_task(self, rank: int) -> str | None:
        """Return the last known task of a rank; None before the first step."""
        return None if self._describe is None else self._describe(rank)


class StatusBoard:
    """Publishes the status of this process, and reads those of all processes.

    Parameters
    ----------
    connection
        To the shared store.
    rank, n_ranks
        Number of this process, and how many there are.
    reporter
        Source of this process's status.

    Attributes
    ----------
    statuses
        Latest known status of each rank.
    """

    def __init__(
        self, connection: StoreConnection, rank: int, n_ranks: int, reporter: StepReporter
    ) -> None:
        self._connection, self._reporter = connection, reporter
        self.rank, self.n_ranks = rank, n_ranks
        self.statuses: dict[int, Status] = {}
        self._n_beats = 0
        self._last_changes: dict[int, tuple[bytes, float]] = {}  # text of each rank, and its time
        self._clock = RunningClock(max(0.5, 2 * look_period(n_ranks)))

    def publish(self) -> None:
        """Publish the status of this process; the caller holds the lock, if others use the store.

        Raises
        ------
        RuntimeError
            If the store is lost.
        """
        status = self._reporter.read_status()
        self.statuses[self.rank] = status
        self._n_beats += 1
        text = json.dumps([self._n_beats, status])
        self._connection.store.set(f"beat/{self.rank}", text)

    def read_all(self) -> bool:
        """Read the statuses of all processes; the caller holds the lock.

        Returns
        -------
        bool
            Whether every process has published one.

        Raises
        ------
        RuntimeError
            If the store is lost.
        """
        store = self._connection.store
        names = [f"beat/{rank}" for rank in range(self.n_ranks)]
        if not store.check(names):
            return False
        now = self._clock.read()
        for rank, text in enumerate(store.multi_get(names)):
            if self._last_changes.get(rank, (b"", now))[0] != text:
                self._last_changes[rank] = text, now
                self.statuses[rank] = Status.from_json(json.dumps(json.loads(text)[1]).encode())
        return True

    def silent_rank(self, timeout: float) -> int:
        """Return a rank that has published nothing for longer than ``timeout``; -1 if none.

        Only time in which this process read statuses counts.
        """
        now = self._clock.read()
        silent = [r for r, (_, time_) in self._last_changes.items() if now - time_ > timeout]
        return silent[0] if silent else -1

    def others_in_step(self) -> bool:
        """Return whether another process was in a step at its latest status."""
        return any(s.in_step for rank, s in list(self.statuses.items()) if rank != self.rank)

    def describe_last_status(self, rank: int) -> str:
        """Return the latest status of a process, as text."""
        return f"last seen {self.statuses.get(rank) or f'rank {rank} at its start'}"

    def describe_last_task(self, rank: int) -> str:
        """Return the last known task of a process that does not answer, as text."""
        text = self._reporter.describe_last_task(rank)
        return self.describe_last_status(rank) if text is None else text

    def describe_others(self, rank: int) -> str:
        """Return the statuses of all processes but one, as text."""
        return "; ".join(str(s) for r, s in sorted(self.statuses.items()) if r != rank)

    def publish_final_status(self, timeline: bytes = b"") -> None:
        """Publish the final status and the timeline of this process; without a store, nothing."""
        with self._connection.lock:
            status = self._reporter.read_status()
            self.statuses[self.rank] = status
            try:
                self._connection.store.set(f"timeline/{self.rank}", timeline)
                self._connection.store.set(f"final_status/{self.rank}", json.dumps(status))
            except RuntimeError:
                return

    def collect_final_statuses(self, ranks: Iterable[int], seconds: float) -> dict[int, bytes]:
        """Return the timeline that each of ``ranks`` published, and keep its final status.

        Wait ``seconds`` at most; ranks that do not answer until then are left out.
        """
        timelines: dict[int, bytes] = {}
        timer, missing = RunningTimer(seconds), set(ranks)
        with self._connection.lock:
            try:
                while missing and not timer.is_over:
                    for rank in sorted(missing):
                        store, name = self._connection.store, f"final_status/{rank}"
                        if store.check([name]):
                            self.statuses[rank] = Status.from_json(store.get(name))
                            timelines[rank] = bytes(store.get(f"timeline/{rank}"))
                            missing.discard(rank)
                    time.sleep(0.01)
            except RuntimeError:
                return timelines
        return timelines
