"""Run a command in several processes: they join, and one of them prints an error.

torchrun ends all processes as soon as one fails, so that no process exits before the error is
printed.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pipeexec.distributed.channels import LostConnection
from pipeexec.distributed.join import AbsentError, join
from pipeexec.distributed.processes import Processes
from pipeexec.distributed.store import LaunchError
from pipesim.errors import ExecutionError, PipeError
from pipesim.timeline.timeline import Timeline

#: Seconds that the main thread has to end once a failure is known; then the guard exits.
_EXIT_SECONDS = 5.0
#: Seconds besides the timeout after which a process is ended whose interpreter does not answer.
_STUCK_SECONDS = 5.0
#: Seconds after SIGTERM in which a process may learn of the failure that is the reason.
_SIGTERM_SECONDS = 0.5

JoinedCommand = Callable[[Processes], int]
SavePartial = Callable[[Timeline, str], Path | None]


def run_together(
    command: JoinedCommand,
    print_error: Callable[[str], None],
    save_partial: SavePartial,
    timeout: float,
) -> int:
    """Run a command in one of several processes; return its exit status.

    After a failure a process exits instead of returning: its threads may wait for others for ever.
    One process prints the error, and saves the timeline of the tasks that ran before it. Every
    process stops after ``timeout`` seconds without progress.
    """
    try:
        processes = join(timeout)
    except PipeError as error:
        if _prints_join_error(error):
            print_error(str(error).partition("\n")[0])
        return 2
    guard = _Guard(processes, print_error, save_partial)
    try:
        status = command(processes)
        processes.close()
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the user asked more than once
        guard.fail(error)
    guard.close()
    return status


def _prints_join_error(error: PipeError) -> bool:
    """Return whether this process prints the error of a failed join."""
    if isinstance(error, AbsentError):
        return os.environ["RANK"] == str(error.reporting_rank)
    if isinstance(error, LaunchError) and error.variable in ("RANK", "LOCAL_RANK"):
        return True  # other processes may not know
    return os.environ.get("LOCAL_RANK", "0") == "0"  # one process a machine


class _Guard:
    """End this process when the command has failed in any, whatever its main thread is doing."""

    def __init__(
        self,
        processes: Processes,
        print_error: Callable[[str], None],
        save_partial: SavePartial,
    ) -> None:
        self.processes, self.print_error, self.save_partial = processes, print_error, save_partial
        self._sigterm_time: float | None = None  # s, of `time.monotonic`
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        self._once = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="pipeexec guard", daemon=True).start()

    def close(self) -> None:
        """Stop guarding, after the command has succeeded."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: object) -> None:
        self._sigterm_time = self._sigterm_time or time.monotonic()

    def _run(self) -> None:
        """Watch the main thread, which may be stuck in code of a library."""
        watch, stuck = self.processes.watch, self.processes.timeout + _STUCK_SECONDS
        armed = -stuck
        while not self._closed.wait(0.2):
            if time.monotonic() > armed + 2.0:  # in case this thread does not run either
                faulthandler.dump_traceback_later(stuck, exit=True)
                armed = time.monotonic()
            sigterm = self._sigterm_time
            if sigterm is not None and time.monotonic() > sigterm + _SIGTERM_SECONDS:
                watch.report_sigterm()
            watch.check_store()
            if watch.failure is not None and not self._closed.wait(_EXIT_SECONDS):
                self.fail(ExecutionError(watch.failure.message))

    def fail(self, error: BaseException) -> None:
        """Print the error in one process, and exit."""
        watch = self.processes.watch
        self.processes.fail(error)
        if not self._once.acquire(blocking=False):
            time.sleep(_STUCK_SECONDS + _EXIT_SECONDS)  # meanwhile the other thread exits
        elif watch.election.elect():
            self.print_error(self._text(error))
            watch.election.release_others()
        else:
            watch.election.wait_for_release(_EXIT_SECONDS)
        if watch.failure is not None and watch.failure.kind in ("silent", "lost"):
            self.processes.recorder.kill(watch.failure.rank)
        watch.wait_until_confirmed()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 2)

    def _text(self, error: BaseException) -> str:
        """Return the first line of an error, and the directory of the tasks that ran before it."""
        is_ours = isinstance(error, PipeError) and not isinstance(error, LostConnection)
        text = (str(error) if is_ours else self.processes.watch.explain()).partition("\n")[0]
        timeline = getattr(error, "timeline", None)
        if timeline is None and self.processes.measured is not None:
            timeline = self.processes.measured()
        if not isinstance(timeline, Timeline):
            return text
        try:
            path = self.save_partial(timeline, text)
        except PipeError as second:
            return f"{text}; what ran before is lost: {second}"
        return f"{text}; what ran before is in {path}"
