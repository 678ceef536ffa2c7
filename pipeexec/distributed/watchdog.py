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

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeexec.devices.running_clock import RunningTimer
from pipeexec.distributed.failure import Failure, ReporterElection, SharedFailure, stall_failure
from pipeexec.distributed.status import StatusBoard, StepReporter, look_period
from pipeexec.distributed.store import StoreConnection
from pipeexec.process_end import end_thread_with_process
from pipesim.errors import PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


#: Seconds beyond the timeout that the store has to answer.
_STORE_GRACE = 2.0
#: Longest time that a process waits for a failure that another process posts (s).
_FAILURE_SECONDS = 2.0
#: Longest time that a process waits for the final statuses of the others (s).
_FINAL_STATUS_SECONDS = 2.0
#: Longest time that the holder of the store waits until the others know the elected process (s).
_CONFIRMATION_SECONDS = 2.0
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

    Attributes
    ----------
    board
        Statuses of all processes.
    election
        Elects the process that reports a failure to the user.
    others_may_end
        Whether the other processes may end without an error.
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
        self.others_may_end = False
        self._reporter, self._exited_ranks = reporter, exited_ranks
        self._connection = StoreConnection(store)
        self.board = StatusBoard(self._connection, rank, n_ranks, reporter)
        self.election = ReporterElection(self._connection, rank, n_ranks, holder, exited_ranks)
        self._failure = SharedFailure(self._connection)
        self._period = look_period(n_ranks)
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
        self._failure.wait(_FAILURE_SECONDS)

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
        return self.board.collect_final_statuses(others, _FINAL_STATUS_SECONDS)

    def wait_until_confirmed(self) -> None:
        """Block until all others know of the failure, if this process holds the store."""
        self.election.wait_until_confirmed(_CONFIRMATION_SECONDS)
