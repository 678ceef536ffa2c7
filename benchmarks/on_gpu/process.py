"""Run a step as a process with a time limit; one that hangs leaves the stack of every thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

#: Signal that asks a process for its stacks; one that has not called `print_stacks_when_asked`
#: ends at it.
ASKS = signal.SIGUSR1

#: Seconds in which a process prints stacks when it is asked, in which the fault handler does, and
#: in which a process that was killed ends.
_ASKED, _STACKS, _KILLED = 2.0, 4.0, 5.0
#: Seconds between two calls of ``meanwhile``.
_INTERVAL = 5.0


class Ended(NamedTuple):
    """End of a process: exit status, None if it was stopped; seconds; last line of its log."""

    code: int | None
    seconds: float
    last_line: str


def run_process(
    command: Sequence[str], log: Path, seconds: float, environment: Mapping[str, str],
    folder: Path, meanwhile: Callable[[float, str], None] = lambda seconds, line: None,
    stopping: Callable[[float, str], None] = lambda seconds, line: None, answers: bool = False,
) -> Ended:  # fmt: skip
    """Run a command in ``folder`` for so many seconds at most, and write its output to ``log``.

    A process beyond its time is asked for its stacks if it ``answers``. Then it gets SIGABRT, at
    which Python's fault handler writes the stack of every thread, and SIGKILL. The fault handler
    needs no lock, so that it shows a process that hangs; it may crash at threads that run. The
    answer needs Python's lock, so that it shows a process that runs. ``meanwhile`` is called
    every 5 s, with the seconds so far and the last line of the log; ``stopping`` is called with
    them before the first signal.
    """
    start = perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=folder, process_group=0,
            env={**environment, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        code, stopped_in = None, None
        try:
            while code is None and (left := seconds - (perf_counter() - start)) > 0:
                try:
                    code = process.wait(min(_INTERVAL, left))
                except subprocess.TimeoutExpired:
                    meanwhile(perf_counter() - start, _last_line(log))
        finally:
            if process.poll() is None:
                stopped_in = _last_line(log)
                try:
                    stopping(perf_counter() - start, stopped_in)
                finally:
                    stopped_in += _stop(process, answers)
    line = _last_line(log) if stopped_in is None else stopped_in
    return Ended(code, perf_counter() - start, line)


def print_stacks_when_asked() -> None:
    """Let this process print the stack of every thread at the signal `ASKS`."""

    def answer(*_: object) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for number, frame in sys._current_frames().items():
            print(f"thread {names.get(number, number)}:", file=sys.stderr)
            traceback.print_stack(frame)
        sys.stderr.flush()

    signal.signal(ASKS, answer)


def _stop(process: subprocess.Popen[bytes], answers: bool) -> str:
    """End a process and its children; return a remark on one that does not end."""
    asks = [(ASKS, _ASKED)] if answers else []
    for number, patience in (*asks, (signal.SIGABRT, _STACKS), (signal.SIGKILL, _KILLED)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    return "" if process.poll() is not None else " (its process cannot be killed)"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
