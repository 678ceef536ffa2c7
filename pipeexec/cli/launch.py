"""A command that several processes run together: they join, and of an error only one speaks.

torchrun ends the others as soon as one process fails, so nobody leaves before the error is said.
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
from pipeexec.distributed.join import join
from pipeexec.distributed.launch_environment import LaunchError
from pipeexec.distributed.processes import Processes
from pipeexec.distributed.roll_call import AbsentError
from pipesim.errors import ExecutionError, PipeError
from pipesim.timeline.timeline import Timeline

__all__ = ["run_together"]

#: Seconds that a process has to end once a failure is known; what hangs is then ended from outside.
_EXIT_SECONDS = 5.0
#: The same, before a process is ended whose interpreter does not answer any more.
_STUCK = 5.0

#: The same, in which a process that was told to end may learn of a failure that is the reason.
_TOLD = 0.5

Command = Callable[[Processes], int]
Leave = Callable[[Timeline, str], Path | None]


def run_together(command: Command, say: Callable[[str], None], leave: Leave, timeout: float) -> int:
    """Run a command in one of several processes; return its exit status.

    A process does not return from a failure, but exits: threads may wait for others for ever.

    Parameters
    ----------
    command
        Every process runs it.
    say
        Tells the user of an error; called in one process.
    leave
        Writes what was measured before an error somewhere, and returns where; in the same process.
    timeout
        Seconds without progress after which every process stops.
    """
    try:
        processes = join(timeout)
    except PipeError as error:
        if _speaks(error):
            say(str(error).partition("\n")[0])
        return 2
    guard = _Guard(processes, say, leave)
    try:
        status = command(processes)
        processes.close()
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the user asked more than once
        guard.fail(error)
    guard.close()
    return status


def _speaks(error: PipeError) -> bool:
    """Return whether this process tells the user that it could not join."""
    if isinstance(error, AbsentError):
        return os.environ["RANK"] == str(error.speaker)
    if isinstance(error, LaunchError) and error.variable in ("RANK", "LOCAL_RANK"):
        return True  # nobody else may know
    return os.environ.get("LOCAL_RANK", "0") == "0"  # one a machine


class _Guard:
    """Ends this process when the command has failed anywhere, whatever its main thread is at."""

    def __init__(self, processes: Processes, say: Callable[[str], None], leave: Leave) -> None:
        self.processes, self.say, self.leave = processes, say, leave
        self._told: float | None = None  # when this process was told to end
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        self._once = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="pipeexec guard", daemon=True).start()

    def close(self) -> None:
        """The command has ended well."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: object) -> None:
        self._told = self._told or time.monotonic()

    def _run(self) -> None:
        """Watch over the main thread, which may be stuck in code that is not ours."""
        watch, stuck = self.processes.watch, self.processes.timeout + _STUCK
        armed = -stuck
        while not self._closed.wait(0.2):
            if time.monotonic() > armed + 2.0:  # should even this thread not get its turn
                faulthandler.dump_traceback_later(stuck, exit=True)
                armed = time.monotonic()
            if self._told is not None and time.monotonic() > self._told + _TOLD:
                watch.report_sigterm()
            watch.check_store()
            if watch.failure is not None and not self._closed.wait(_EXIT_SECONDS):
                self.fail(ExecutionError(watch.failure.message))

    def fail(self, error: BaseException) -> None:
        """Let one process say what went wrong, and exit."""
        watch = self.processes.watch
        self.processes.fail(error)
        if not self._once.acquire(blocking=False):
            time.sleep(_STUCK + _EXIT_SECONDS)  # meanwhile the other thread exits
        elif watch.speaker.elect():
            self.say(self._text(error))
            watch.speaker.release_others()
        else:
            watch.speaker.wait_for_release(_EXIT_SECONDS)
        if watch.failure is not None and watch.failure.kind in ("silent", "lost"):
            self.processes.recorder.kill(watch.failure.rank)
        watch.wait_until_confirmed()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 2)

    def _text(self, error: BaseException) -> str:
        """Return the first line of an error, and where what ran before it is."""
        is_ours = isinstance(error, PipeError) and not isinstance(error, LostConnection)
        text = (str(error) if is_ours else self.processes.watch.explain()).partition("\n")[0]
        timeline = getattr(error, "timeline", None)
        if timeline is None and self.processes.measured is not None:
            timeline = self.processes.measured()
        if not isinstance(timeline, Timeline):
            return text
        try:
            path = self.leave(timeline, text)
        except PipeError as second:
            return f"{text}; what ran before is lost: {second}"
        return f"{text}; what ran before is in {path}"
