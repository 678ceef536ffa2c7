"""What each process of a machine is in, where others can read it even once it is dead.

Each process notes the task that each of its devices is in, in a few bytes of memory that all
processes of its machine have mapped. The file behind them has no name any more once all have: it
goes when the last of them does, however they end.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

__all__ = ["Recorder"]

_WORDS = 64
_BYTES = 8 * _WORDS


class Recorder:
    """Notes of this process, and those of the others on its machine.

    Parameters
    ----------
    rank
        Of this process.
    share
        Exchanges JSON between all processes.

    Attributes
    ----------
    own
        Words of this process: the step, then for each of its devices one more than the number of
        the task that it is in; 0 between tasks.
    """

    def __init__(self, rank: int, share: Callable[[Any], list[Any]]) -> None:
        handle, path = tempfile.mkstemp(prefix="pipeexec-")
        try:
            os.truncate(handle, _BYTES)
            self._maps: dict[int, memoryview] = {}
            host = socket.gethostname()
            for other, (its_host, its_path) in enumerate(share([host, path])):
                if other == rank:
                    self._maps[other] = _mapped(handle)
                elif its_host == host:
                    self._map(other, its_path)
            share(None)  # all have mapped it
        finally:
            os.close(handle)
            os.unlink(path)
        self.own = self._maps[rank]

    def _map(self, rank: int, path: str) -> None:
        """Map another process's words, unless it only seems to be on this machine."""
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            return
        self._maps[rank] = _mapped(handle)
        os.close(handle)

    def read(self, rank: int) -> tuple[int, list[int]] | None:
        """Return a process's step, and the tasks that its devices are in.

        None if it is on another machine.
        """
        words = self._maps.get(rank)
        if words is None:
            return None
        return words[0], [word - 1 for word in words[1:] if word > 0]


def _mapped(handle: int) -> memoryview:
    return memoryview(mmap.mmap(handle, _BYTES)).cast("q")
