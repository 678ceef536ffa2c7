"""Run a step as a process with a time limit; one that hangs leaves the stack of every thread."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

__all__ = ["Ended", "run_process"]

#: Seconds in which a process writes its threads' stacks, and in which one that was killed ends.
_STACKS, _KILLED = 4.0, 10.0
#: Seconds between two calls of ``meanwhile``.
_INTERVAL = 20.0


class Ended(NamedTuple):
    """End of a process: exit status, None if it was stopped; seconds; last line of its log."""

    code: int | None
    seconds: float
    last_line: str


def run_process(
    command: Sequence[str], log: Path, seconds: float, environment: Mapping[str, str],
    folder: Path, meanwhile: Callable[[], None] = lambda: None,
) -> Ended:  # fmt: skip
    """Run a command in ``folder`` for so many seconds at most, and write its output to ``log``.

    A process beyond its time gets SIGABRT, at which Python's fault handler writes the stack of
    every thread, then SIGKILL. ``meanwhile`` is called from time to time.
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
                    meanwhile()
        finally:
            if process.poll() is None:
                stopped_in = _last_line(log)
                stopped_in += _stop(process)
    line = _last_line(log) if stopped_in is None else stopped_in
    return Ended(code, perf_counter() - start, line)


def _stop(process: subprocess.Popen[bytes]) -> str:
    """End a process and its children; return a remark on one that does not end."""
    for number, patience in ((signal.SIGABRT, _STACKS), (signal.SIGKILL, _KILLED)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    return "" if process.poll() is not None else " (its process cannot be killed)"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
