"""What each process of a machine is in, where others can read it even once it is dead.

Each process notes the task that each of its devices is in, in a few bytes of memory that all
processes of its machine have mapped. The file behind them has no name any more once all have: it
goes when the last of them does, however they end. Beside it each holds a handle of each other
process, which tells whether that has ended.
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

from pipesim.errors import ExecutionError

__all__ = ["BEGUN", "ENDED", "GRAPH", "ROOM", "TASKS", "Notes", "Recorder"]

#: Seconds in which a process whose connection broke ends.
_GONE = 1.0
_WORDS = 512
_BYTES = 8 * _WORDS
#: Places of words: steps that have begun, steps that have ended, the graph, and the first task.
BEGUN, ENDED, GRAPH, TASKS = range(4)
#: Streams whose tasks have a place; tasks of further ones are not noted.
ROOM = _WORDS - TASKS


class Notes(NamedTuple):
    """What a process noted: steps that have begun and ended, the graph, and tasks under way."""

    begun: int
    ended: int
    graph: int
    tasks: list[int]


class Recorder:
    """Notes of this process, and those of the others on its machine.

    Parameters
    ----------
    rank
        Of this process.
    share
        Exchanges JSON between all processes.

    Raises
    ------
    ExecutionError
        If there is no room for the notes in the folder of temporary files.

    Attributes
    ----------
    own
        Words of this process: how many steps have begun, how many have ended, the number of the
        graph, then for each of its devices' streams one more than the number of the task that it is
        in; 0 between tasks.
    """

    def __init__(self, rank: int, share: Callable[[Any], list[Any]]) -> None:
        self._maps: dict[int, memoryview] = {}
        self._handles: dict[int, int] = {}  # of the other processes of this machine
        handle, path = _room()
        try:
            host = socket.gethostname()
            everyone = share([host, path, os.getpid(), handle])
            for other, (its_host, *its_file) in enumerate(everyone):
                if other == rank:
                    self._maps[other] = _mapped(handle)
                elif its_host == host:
                    self._map(other, *its_file)
            share(None)  # all have mapped it
            weakref.finalize(self, _close, list(self._handles.values()))
        finally:
            os.close(handle)
            os.unlink(path)
        self.own = self._maps[rank]

    def _map(self, rank: int, path: str, process: int, its_handle: int) -> None:
        """Map another process's words, unless it only seems to be on this machine."""
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            return
        self._maps[rank] = _mapped(handle)
        os.close(handle)
        with suppress(OSError, AttributeError):  # other namespaces of processes; not Linux
            found = os.pidfd_open(process)
            if os.readlink(f"/proc/{process}/fd/{its_handle}") == os.path.realpath(path):
                self._handles[rank] = found
            else:
                os.close(found)

    def gone(self) -> list[int]:
        """Return the processes of this machine that have ended."""
        poll = select.poll()
        ranks = {handle: rank for rank, handle in self._handles.items()}
        for handle in ranks:
            poll.register(handle, select.POLLIN)
        return sorted(ranks[handle] for handle, _ in poll.poll(0))

    def gone_soon(self) -> list[int]:
        """Return what `gone` does, once there is one; a connection breaks before its process ends.

        Waits no longer than that takes.
        """
        end = time.monotonic() + _GONE
        while not (gone := self.gone()) and time.monotonic() < end:
            time.sleep(0.01)
        return gone

    def kill(self, rank: int) -> None:
        """End a process of this machine that does not answer, and may be stopped."""
        if rank in self._handles:
            with suppress(OSError):  # it has ended
                signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)

    def read(self, rank: int) -> Notes | None:
        """Return what a process noted; None if it is on another machine."""
        words = self._maps.get(rank)
        if words is None:
            return None
        begun, ended, graph = words[:TASKS]
        return Notes(begun, ended, graph, [word - 1 for word in words[TASKS:] if word > 0])


def _room() -> tuple[int, str]:
    """Return a new file of the words: its handle and its path."""
    try:
        handle, path = tempfile.mkstemp(prefix="pipeexec-")
    except OSError as error:
        raise ExecutionError(f"no temporary file can be made: {error}; set TMPDIR") from error
    try:
        os.write(handle, bytes(_BYTES))  # a mapped file without room ends its process
    except OSError as error:
        os.close(handle)
        os.unlink(path)
        raise ExecutionError(
            f"{_BYTES} bytes cannot be written to {os.path.dirname(path)}: {error.strerror}; make "
            "room there, or set TMPDIR to another folder"
        ) from error
    return handle, path


def _close(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)


def _mapped(handle: int) -> memoryview:
    return memoryview(mmap.mmap(handle, _BYTES)).cast("q")
