"""`FlightRecorder`: records each process's current task, readable after that process dies.

Each process records the current task of each of its devices in a few bytes of memory that all
processes of its machine have mapped. The file behind this memory is unlinked as soon as all have
mapped it: the kernel frees it with the last process, however the processes end. Each process also
holds a handle (pidfd) of each other one, which tells whether that process has ended.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from pipeexec.devices.running_clock import RunningTimer
from pipesim.errors import ExecutionError

#: Seconds in which a process whose connection broke ends.
_EXIT_SECONDS = 1.0
_N_WORDS = 512
_N_BYTES = 8 * _N_WORDS
#: Indices of words: steps that have begun, steps that have ended, the graph, and the first task.
N_BEGUN, N_ENDED, GRAPH, FIRST_TASK = range(4)
#: Streams whose tasks have a word; tasks of further streams are not recorded.
MOST_STREAMS = _N_WORDS - FIRST_TASK


class Record(NamedTuple):
    """Record of a process: steps begun, steps ended, number of the graph, and current tasks."""

    n_begun: int
    n_ended: int
    graph: int
    tasks: list[int]


class FlightRecorder:
    """Record of this process, and those of the others on its machine once it is connected.

    Attributes
    ----------
    own
        Words of this process, int64: how many steps have begun, how many have ended, the number of
        the graph, then for each stream of its devices the number of the current task plus 1; 0
        between tasks.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.own = memoryview(bytearray(_N_BYTES)).cast("q")  # until it is connected
        self._maps: dict[int, memoryview] = {}
        self._handles: dict[int, int] = {}  # of the other processes of this machine

    def connect(self, share: Callable[[Any], list[Any]]) -> None:
        """Share records with the other processes; every process must call this.

        ``share`` exchanges JSON between all processes. It raises ExecutionError if there is no room
        for the record in the folder of temporary files.
        """
        handle, path = _make_file()
        try:
            host = socket.gethostname()
            files = share([host, path, os.getpid(), handle])
            handles: dict[int, int] = {}
            for other, (other_host, *other_file) in enumerate(files):
                if other == self.rank:
                    self._maps[other] = _map_file(handle)
                elif other_host == host:
                    pidfd = self._map(other, *other_file)
                    if pidfd is not None:
                        handles[other] = pidfd
            share(None)  # all have mapped it
            self._handles = handles  # at once: the watchdog's thread iterates over it
            weakref.finalize(self, _close, list(handles.values()))
        finally:
            os.close(handle)
            os.unlink(path)
        self.own = self._maps[self.rank]

    def _map(self, rank: int, path: str, process: int, other_handle: int) -> int | None:
        """Map another process's words, unless it only seems to be on this machine.

        Return a handle of the process, or None if there is none.
        """
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            return None
        self._maps[rank] = _map_file(handle)
        os.close(handle)
        with suppress(OSError, AttributeError):  # other namespaces of processes; not Linux
            pidfd = os.pidfd_open(process)
            if os.readlink(f"/proc/{process}/fd/{other_handle}") == os.path.realpath(path):
                return pidfd
            os.close(pidfd)
        return None

    def exited_ranks(self) -> list[int]:
        """Return the processes of this machine that have ended."""
        poll = select.poll()
        ranks = {handle: rank for rank, handle in self._handles.items()}
        for handle in ranks:
            poll.register(handle, select.POLLIN)
        return sorted(ranks[handle] for handle, _ in poll.poll(0))

    def wait_for_exit(self) -> list[int]:
        """Return `exited_ranks` as soon as there is one; after a second, even if there is none.

        The connections of a process break before it ends.
        """
        timer = RunningTimer(_EXIT_SECONDS)
        while not (ranks := self.exited_ranks()) and not timer.is_over:
            time.sleep(0.01)
        return ranks

    def kill(self, rank: int) -> None:
        """Kill a process of this machine that does not answer, and may be stopped."""
        if rank in self._handles:
            with suppress(OSError):  # it has ended
                signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)

    def read(self, rank: int) -> Record | None:
        """Return the record of a process; None if it is on another machine."""
        words = self._maps.get(rank)
        if words is None:
            return None
        n_begun, n_ended, graph = words[:FIRST_TASK]
        tasks = [word - 1 for word in words[FIRST_TASK:] if word > 0]
        return Record(n_begun, n_ended, graph, tasks)


def _make_file() -> tuple[int, str]:
    """Make a file for the words; return its handle and its path."""
    try:
        handle, path = tempfile.mkstemp(prefix="pipeexec-")
    except OSError as error:
        raise ExecutionError(f"no temporary file can be made: {error}; set TMPDIR") from error
    try:
        os.write(handle, bytes(_N_BYTES))  # writing to a mapped file without room kills the process
    except OSError as error:
        os.close(handle)
        os.unlink(path)
        raise ExecutionError(
            f"{_N_BYTES} bytes cannot be written to {os.path.dirname(path)}: {error.strerror}; "
            "make room there, or set TMPDIR to another folder"
        ) from error
    return handle, path


def _close(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)


def _map_file(handle: int) -> memoryview:
    return memoryview(mmap.mmap(handle, _N_BYTES)).cast("q")
