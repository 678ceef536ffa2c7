"""Trap for a step that stalls without a known cause: stacks of all threads, and stolen time."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: How much later than the text is due the stacks are written without Python's lock, in seconds.
#: Stacks read while their threads run may be freed meanwhile, which kills the process.
_LATE = 5.0

#: Columns of the first line of /proc/stat, in hundredths of a second of all cores together.
_COLUMNS = "user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"


def _machine_seconds() -> dict[str, float]:
    """Return the seconds that the cores of this machine spent in each way since its start."""
    try:
        row = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:  # not Linux
        return {}
    ticks = os.sysconf("SC_CLK_TCK")
    return {name: int(x) / ticks for name, x in zip(_COLUMNS, row, strict=False)}


@contextmanager
def stall_trap(seconds: float = 5.0) -> Iterator[None]:
    """Write what this process and the machine do, each time that a block is ``seconds`` older.

    The text goes to standard error, which a failure of the test shows with that of other processes:
    the stack of every thread, also if one keeps Python's lock for 5 s more, the time of the process
    on a core, and the seconds that the cores were busy, idle and stolen by other machines.
    """
    start, before, is_over = time.monotonic(), _machine_seconds(), threading.Event()
    file = sys.__stderr__ or sys.stderr

    def watch() -> None:
        while not is_over.wait(seconds):
            faulthandler.dump_traceback_later(seconds + _LATE, file=file)
            spent = {k: x - before[k] for k, x in _machine_seconds().items()}
            cores = ", ".join(f"{name} {x:.2f}" for name, x in spent.items())
            load = " ".join(f"{x:.2f}" for x in os.getloadavg())
            sys.stderr.write(
                f"stall trap: process {os.getpid()} after {time.monotonic() - start:.1f} s, its "
                f"CPU time {time.process_time():.2f} s, load {load}; seconds of all cores: "
                f"{cores}\n"
            )
            sys.stderr.flush()
            faulthandler.dump_traceback(file)

    thread = threading.Thread(target=watch, name="stall trap", daemon=True)
    thread.start()
    faulthandler.dump_traceback_later(seconds + _LATE, file=file)
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
