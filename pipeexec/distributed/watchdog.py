"""`Watchdog`: a thread that detects a step without progress.

It names the waiting processes and the missing ones.

Every process publishes several times a second which task each of its devices is running, and reads
what the others publish. The first failure, whichever process posts it, stops all of them: an
exception in a stage, a lost connection, no progress anywhere for as long as the timeout, a process
that no longer updates its status.

Time in which this process was frozen counts for nothing: see `RunningTimer`.

`StatusBoard` exchanges the statuses, `SharedFailure` keeps the first failure, and
`ReporterElection` elects the process that reports it to the user.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeexec.devices.running_clock import RunningClock, RunningTimer
from pipeexec.distributed.store import StoreConnection
from pipeexec.process_end import end_thread_with_process
from pipesim.errors import PeerError
from pipesim.ops import COLLECTIVES, TRANSFERS, Action

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


#: Seconds beyond the timeout that the store has to answer.
_STORE_GRACE = 2.0
#: Longest time that a process waits for a failure or a final status that another process posts, and
#: the holder of the store until the others know the elected process (s).
_ANSWER_SECONDS = 2.0
#: Longest time that `Watchdog.close` waits for the thread (s).
_JOIN_SECONDS = 2.0


class Watchdog:
    """Detect failures of all processes, and publish the failures of this one.

    Parameters
    ----------
    store
        A separate connection to the shared store.
    rank, n_ranks
        Number of this process, and how many there are.
    timeout
        Seconds without progress after which a step has failed.
    reporter
        Source of this process's status.
    exited_ranks
        Returns the ranks of processes that have surely ended.
    holder
        The rank whose process holds the store; None if it is the launcher.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        n_ranks: int,
        timeout: float,
        reporter: StepReporter,
        exited_ranks: Callable[[], list[int]],
        *,
        holder: int | None = None,
    ) -> None:
        self.rank, self.n_ranks, self.timeout, self.holder = rank, n_ranks, timeout, holder
        self.others_may_end = False  # without an error
        self._reporter, self._exited_ranks = reporter, exited_ranks
        self._connection = StoreConnection(store)
        self.board = StatusBoard(self._connection, rank, n_ranks, reporter)
        self.election = ReporterElection(self._connection, rank, n_ranks, holder, exited_ranks)
        self._failure = SharedFailure(self._connection)
        self._period = _look_period(n_ranks)
        self._n_answers = 0  # of the store
        self._n_answers_seen, self._answer_timer = 0, RunningTimer(timeout + _STORE_GRACE)
        self._progress: Any = None
        self._progress_timer = RunningTimer(timeout, self._period)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipeexec watchdog", daemon=True)
        end_thread_with_process(self._thread, self._closed.set)
        self.board.publish()
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(_JOIN_SECONDS)  # the thread may be in a store that does not answer

    def _run(self) -> None:
        while not self._closed.wait(self._period):
            try:
                self._look()
            except RuntimeError as error:  # the store is lost, and the process that holds it
                self.report_lost_store(error)
            except Exception as error:  # else this process would seem lost
                text = f"the watchdog of rank {self.rank} failed: {type(error).__name__}: {error}"
                self.post(Failure("raised", self.rank, text))
            if self.failure is not None:
                self.election.follow_election(self._closed)
                return

    def _look(self) -> None:
        """Exchange statuses with the other processes, and post a failure if there is one."""
        exited_rank = self._exited_rank()  # before failures are read: it may have posted one
        with self._connection.lock:
            self.board.publish()
            has_failed = self._failure.read()
            self._n_answers += 1
            if has_failed or not self.board.read_all():
                return
        if exited_rank >= 0:
            self._post_loss(exited_rank)
        else:
            self._check_progress()

    def _exited_rank(self) -> int:
        """Return a process that has surely ended, too early; -1 if none."""
        return -1 if self.others_may_end else next(iter(self._exited_ranks()), -1)

    def _check_progress(self) -> None:
        """Post a failure if a process is silent, or nothing has moved anywhere."""
        silent_rank = self.board.silent_rank(self.timeout)
        if silent_rank >= 0:
            text = f"rank {silent_rank} has not updated its status for {self.timeout:g} s"
            text = f"{text}; {self.board.describe_last_task(silent_rank)}"
            self.post(Failure("silent", silent_rank, text))
            return
        statuses = [self.board.statuses[rank] for rank in range(self.n_ranks)]
        progress = [(s.step, s.in_step, s.n_ended) for s in statuses]
        if progress != self._progress or not any(s.in_step for s in statuses):
            self._progress = progress
            self._progress_timer.restart()
        elif self._progress_timer.is_over:
            self.post(stall_failure(statuses, self.timeout))

    # Failures

    @property
    def failure(self) -> Failure | None:
        """The failure that stops every process; None if this process knows of none."""
        return self._failure.first

    def post(self, failure: Failure) -> Failure:
        """Make a failure that of all processes, unless there is one; return the one that counts."""
        return self._failure.post(failure)

    def wait_for_failure(self) -> None:
        """Block until something has failed anywhere, for two seconds at most."""
        self._failure.wait(_ANSWER_SECONDS)

    def check(self) -> None:
        """Raise `PeerError` if something has failed anywhere."""
        if self.failure is not None:
            raise PeerError(self.explain())

    def explain(self) -> str:
        """Return what failed, and the statuses of all other processes."""
        assert self.failure is not None
        others = self.board.describe_others(self.failure.rank)
        return self.failure.message + (f"; meanwhile {others}" if others else "")

    def describe_loss(self, rank: int) -> str:
        """Return the message for a process that was lost, with its last known task."""
        return f"rank {rank} was lost; {self.board.describe_last_task(rank)}"

    def _post_loss(self, rank: int) -> None:
        self.post(Failure("lost", rank, self.describe_loss(rank)))

    def report_sigterm(self) -> None:
        """Post that this process received SIGTERM.

        A launcher sends it when another process has failed; a process that has ended is then the
        failure.
        """
        if self.failure is None and (exited_rank := self._exited_rank()) >= 0:
            self._post_loss(exited_rank)
        if self.failure is None:
            status = self._reporter.read_status()
            message = f"rank {self.rank} received SIGTERM: {status}"
            self.post(Failure("ended", self.rank, message))

    # The store

    def check_store(self) -> None:
        """Abandon a store that has not answered for too long: its process may be stopped."""
        if self._n_answers != self._n_answers_seen:
            self._n_answers_seen = self._n_answers
            self._answer_timer.restart()
        elif self.failure is None and self._answer_timer.is_over:
            self._connection.abandon()
            error = RuntimeError(f"it has not answered for {self.timeout:g} s")
            self.report_lost_store(error)

    def report_lost_store(self, error: RuntimeError) -> None:
        """Note in this process that the store is lost, unless something has failed before."""
        if self.holder is None:
            first = str(error).splitlines()[0]
            text = f"the launcher, which held the store, was lost: {first}"
        else:
            last_task = self.board.describe_last_task(self.holder)
            text = f"rank {self.holder}, which held the store, was lost; {last_task}"
        rank = -1 if self.holder is None else self.holder
        self._failure.set_first(Failure("lost", rank, text))

    # After a failure

    def publish_final_status(self, timeline: bytes = b"") -> None:
        """Publish the final status and the timeline of this process, for the others' errors."""
        self.board.publish_final_status(timeline)

    def collect_final_statuses(self) -> dict[int, bytes]:
        """Return the timeline of each process that still answers; wait two seconds at most."""
        failure = self.failure
        lost = failure.rank if failure and failure.kind in ("lost", "silent") else -1
        others = set(range(self.n_ranks)) - {lost}
        return self.board.collect_final_statuses(others, _ANSWER_SECONDS)

    def wait_until_confirmed(self) -> None:
        """Block until all others know of the failure, if this process holds the store."""
        self.election.wait_until_confirmed(_ANSWER_SECONDS)


# Statuses


def _look_period(n_ranks: int) -> float:
    """Return the least seconds between two looks at the store: all processes read each other."""
    return max(0.2, 0.01 * n_ranks)


class Head(NamedTuple):
    """Head of a device's queues: its first task that has not ended."""

    device: int
    task: str  # of its compute stream, or of its messages
    place: str  # stage and micro-batch of the task
    running: bool
    waits_for: str  # tasks; empty if it has begun

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

        ``read_status`` is called from the watchdog's thread. ``describe_last_task`` returns the
        last known task of a rank that does not answer, as text.
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

    ``statuses`` has the latest known status of each rank. Calls of the store raise RuntimeError if
    it is lost.
    """

    def __init__(
        self, connection: StoreConnection, rank: int, n_ranks: int, reporter: StepReporter
    ) -> None:
        self._connection, self._reporter = connection, reporter
        self.rank, self.n_ranks = rank, n_ranks
        self.statuses: dict[int, Status] = {}
        self._n_beats = 0
        self._last_changes: dict[int, tuple[bytes, float]] = {}  # text of each rank, and its time
        self._clock = RunningClock(max(0.5, 2 * _look_period(n_ranks)))

    def publish(self) -> None:
        """Publish the status of this process; the caller holds the lock, if others use it."""
        status = self._reporter.read_status()
        self.statuses[self.rank] = status
        self._n_beats += 1
        text = json.dumps([self._n_beats, status])
        self._connection.store.set(f"beat/{self.rank}", text)

    def read_all(self) -> bool:
        """Read the statuses of all processes; return whether every process has published one.

        The caller holds the lock.
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


# Failures

_PAUSE = 0.02  # s, between two looks into the store


class Failure(NamedTuple):
    """A failure that stops every process."""

    kind: str  # "raised", "lost", "stalled", "silent", "late" or "ended"
    rank: int  # that failed; -1 if none in particular
    message: str  # the failure and its place


class SharedFailure:
    """The first failure of any process, which counts for all of them.

    ``first`` is None if nothing has failed, as far as this process knows.
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
        """Return whether a process has posted a failure, and keep it; the caller holds the lock."""
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
    was elected. The launcher holds it if ``holder`` is None. ``exited_ranks`` returns the ranks of
    processes that have surely ended.
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
        """Block until all others know who is elected, if this process holds the store."""
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
    """Return the failure of a step in which nothing has moved for ``timeout`` seconds.

    It names one culprit, the first of these that exists:

    1. A task that has begun and does not end, and does not wait for another process. 2. A
    collective, if every process is in the step: any of its members may hold it up. 3. A process
    that is not in the step.

    Otherwise it names none: the error lists besides what each device waits for.
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
