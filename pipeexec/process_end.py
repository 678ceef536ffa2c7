"""End of a process: its threads leave torch's code before the interpreter ends.

A daemon thread that needs the interpreter's lock, while the interpreter ends, is ended by Python.
If torch's C++ code called Python's lock, this aborts the whole process (SIGABRT), whatever exit
status the script was to have. So, when the script has ended:

1. Each thread is asked to end.
2. After a short wait, the connections are broken for whose messages threads may wait for long.
3. The remaining threads have some seconds to end. A stage that hangs may outlast them.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

#: Seconds in which threads end that wait for nothing; further seconds for all others.
_IDLE_SECONDS, _BUSY_SECONDS = 0.2, 5.0


class Breakable(Protocol):
    """Connections to other processes."""

    def break_connections(self) -> None:
        """Let every thread that waits for a message end its wait with an error."""
        ...


_THREADS: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = (
    weakref.WeakKeyDictionary()
)
_CONNECTIONS: weakref.WeakSet[Breakable] = weakref.WeakSet()


def end_thread_with_process(thread: threading.Thread, stop: Callable[[], object]) -> None:
    """At the end of the process, call ``stop`` and wait for the end of a daemon thread.

    ``stop`` must not refer to the owner of the thread, which would then never be garbage.
    """
    _THREADS[thread] = stop


def end_connections_with_process(connections: Breakable) -> None:
    """At the end of the process, break connections if threads still wait."""
    _CONNECTIONS.add(connections)


def end_threads() -> None:
    """End the threads of this process, as the module describes; also called by its end."""
    for stop in list(_THREADS.values()):
        stop()
    if not _join(_IDLE_SECONDS):
        for connections in list(_CONNECTIONS):
            connections.break_connections()
        _join(_BUSY_SECONDS)


def _join(seconds: float) -> bool:
    """Wait for the end of all threads, so long in all; return whether all have ended."""
    deadline = time.monotonic() + seconds
    threads = [thread for thread in list(_THREADS) if thread is not threading.current_thread()]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


atexit.register(end_threads)
