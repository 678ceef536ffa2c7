"""`Failure`: what stopped a step, and how all processes agree on the first one."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from pipeexec.distributed.status import Status, StoreConnection
from pipesim.ops import COLLECTIVES, TRANSFERS, Action

__all__ = ["Failure", "SharedFailure", "stall_failure"]


class Failure(NamedTuple):
    """A failure that stops every process.

    Attributes
    ----------
    kind
        ``"raised"``, ``"lost"``, ``"stalled"``, ``"silent"``, ``"late"`` or ``"ended"``.
    rank
        The rank that failed; -1 if none in particular.
    message
        What happened, and where.
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
        end = time.monotonic() + seconds
        while self.first is None and time.monotonic() < end:
            time.sleep(0.01)


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
