"""`Failure`: what stopped a step. All processes agree on the first, and elect one to report it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from pipeexec.devices.running_clock import RunningTimer
from pipeexec.distributed.status import Status
from pipeexec.distributed.store import StoreConnection
from pipesim.ops import COLLECTIVES, TRANSFERS, Action

_PAUSE = 0.02  # s, between two looks into the store


class Failure(NamedTuple):
    """A failure that stops every process.

    Attributes
    ----------
    kind
        ``"raised"``, ``"lost"``, ``"stalled"``, ``"silent"``, ``"late"`` or ``"ended"``.
    rank
        The rank that failed; -1 if none in particular.
    message
        The failure and its place.
    """

    kind: str
    rank: int
    message: str


class SharedFailure:
    """The first failure of any process, which counts for all of them.

    Attributes
    ----------
    first
        The failure that counts; None if nothing has failed, as far as this process knows.
    """

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection
        self.first: Failure | None = None

    def post(self, failure: Failure) -> Failure:
        """Publish a failure, unless there is one already; return the one that counts."""
        with self._connection.lock:
            try:
                text = self._connection.store.compare_set("failure", "", json.dumps(failure))
                failure = Failure(*json.loads(text))
            except RuntimeError:  # without a store each process has its own failure
                pass
        return self.set_first(failure)

    def read(self) -> bool:
        """Return whether a process has posted a failure, and keep it; the caller holds the lock.

        Raises
        ------
        RuntimeError
            If the store is lost.
        """
        store = self._connection.store
        is_posted = bool(store.check(["failure"]))
        if is_posted:
            self.set_first(Failure(*json.loads(store.get("failure"))))
        return is_posted

    def set_first(self, failure: Failure) -> Failure:
        """Keep a failure in this process, unless there is one; return the one that counts."""
        if self.first is None:
            self.first = failure
        return self.first

    def wait(self, seconds: float) -> None:
        """Block until something has failed anywhere, for ``seconds`` at most."""
        timer = RunningTimer(seconds)
        while self.first is None and not timer.is_over:
            time.sleep(0.01)


class ReporterElection:
    """Elects one process to print the error; the others wait until it has, and exit silently.

    The process that holds the store exits last: without the store the others could not learn who
    was elected.

    Parameters
    ----------
    connection
        To the shared store.
    rank, n_ranks
        Number of this process, and how many there are.
    holder
        The rank whose process holds the store; None if it is the launcher.
    exited_ranks
        Returns the ranks of processes that have surely ended.
    """

    def __init__(
        self,
        connection: StoreConnection,
        rank: int,
        n_ranks: int,
        holder: int | None,
        exited_ranks: Callable[[], list[int]],
    ) -> None:
        self._connection, self._exited_ranks = connection, exited_ranks
        self.rank, self.n_ranks, self.holder = rank, n_ranks, holder
        self._elected = -1  # as far as this process knows

    def elect(self) -> bool:
        """Return whether this process is elected; the first process that calls this is.

        Without a store the elected process is the one that this process knows of, or else the
        lowest rank that does not hold the store.
        """
        connection = self._connection
        try:
            with connection.lock:
                elected = connection.store.compare_set("reporting_rank", "", str(self.rank))
            return int(elected) == self.rank
        except RuntimeError:
            if self._elected >= 0:
                return self._elected == self.rank
            return self.rank == (0 if self.holder is None else min({0, 1} - {self.holder}))

    def follow_election(self, closed: threading.Event) -> None:
        """Block until a process is elected, and confirm it; until ``closed`` or without a store.

        The elected process may end, and take the store with it.
        """
        connection = self._connection
        with contextlib.suppress(RuntimeError):
            while not closed.wait(0.05):
                with connection.lock:
                    if connection.store.check(["reporting_rank"]):
                        self._elected = int(connection.store.get("reporting_rank"))
                        connection.store.set(f"confirmed/{self.rank}", "")
                        return

    def wait_until_confirmed(self, seconds: float) -> None:
        """Block until all others know who is elected, if this process holds the store.

        Parameters
        ----------
        seconds
            Longest time to wait (s).
        """
        connection = self._connection
        timer = RunningTimer(seconds)
        with contextlib.suppress(RuntimeError):
            while self.holder == self.rank and not timer.is_over:
                others = set(range(self.n_ranks)) - {self.rank, *self._exited_ranks()}
                names = [f"confirmed/{rank}" for rank in others]
                with connection.lock:
                    if not others or connection.store.check(names):
                        return
                time.sleep(_PAUSE)

    def release_others(self) -> None:
        """Let the other processes exit: the error is printed."""
        with contextlib.suppress(RuntimeError), self._connection.lock:
            self._connection.store.set("error_printed", "")

    def wait_for_release(self, seconds: float) -> None:
        """Block until the elected process has printed the error, for ``seconds`` at most."""
        connection = self._connection
        timer = RunningTimer(seconds)
        with contextlib.suppress(RuntimeError):
            while not timer.is_over:
                with connection.lock:
                    if connection.store.check(["error_printed"]):
                        return
                time.sleep(_PAUSE)


def stall_failure(statuses: list[Status], timeout: float) -> Failure:
    """Return the failure of a step in which nothing moves.

    It names one culprit, the first of these that exists:

    1. A task that has begun and does not end, and does not wait for another process.
    2. A collective, if every process is in the step: any of its members may hold it up.
    3. A process that is not in the step.

    Otherwise it names none: the error lists besides what each device waits for.

    Parameters
    ----------
    statuses
        Of each process.
    timeout
        Seconds for which nothing has moved.
    """
    step = max(status.step for status in statuses)
    begun_tasks = [
        (Action.parse(head.task).op, status, head)
        for status in statuses
        for head in status.heads
        if status.in_step and head.running
    ]
    independent = [x for x in begun_tasks if x[0] not in TRANSFERS | COLLECTIVES]
    collectives = [x for x in begun_tasks if x[0] in COLLECTIVES]
    if independent or (collectives and all(status.in_step for status in statuses)):
        _, status, head = (independent or collectives)[0]
        return Failure(
            "stalled",
            status.rank,
            f"{head.task} hangs (rank {status.rank}, device {head.device}, {head.place}, "
            f"step {status.step}): no task has ended for {timeout:g} s",
        )
    for status in statuses:
        if not status.in_step:
            return Failure(
                "stalled",
                status.rank,
                f"rank {status.rank} does not come to step {step}: it is still {status}, for "
                f"{timeout:g} s",
            )
    return Failure("stalled", -1, f"nothing has moved for {timeout:g} s in step {step}")
