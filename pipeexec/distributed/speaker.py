"""`Speaker`: the election of the one process that reports a failure to the user."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from pipeexec.distributed.status import StoreConnection

__all__ = ["Speaker"]

_PAUSE = 0.02  # s, between two looks into the store


class Speaker:
    """Elects one process to print the error; the others wait until it has, and exit silently.

    The process that holds the store exits last: without the store the others could not learn who
    was elected.

    Parameters
    ----------
    connection
        To the shared store.
    rank, n_ranks
        Number of this process, and how many there are.
    holder
        The rank whose process holds the store; None if it is the launcher.
    exited_ranks
        Returns the ranks of processes that have surely ended.
    """

    def __init__(
        self,
        connection: StoreConnection,
        rank: int,
        n_ranks: int,
        holder: int | None,
        exited_ranks: Callable[[], list[int]],
    ) -> None:
        self._connection, self._exited_ranks = connection, exited_ranks
        self.rank, self.n_ranks, self.holder = rank, n_ranks, holder
        self._elected = -1  # as far as this process knows

    def elect(self) -> bool:
        """Return whether this process is elected; the first process that calls this is.

        Without a store the elected process is the one that this process knows of, or else the
        lowest rank that does not hold the store.
        """
        connection = self._connection
        try:
            with connection.lock:
                elected = connection.store.compare_set("speaker", "", str(self.rank))
            return int(elected) == self.rank
        except RuntimeError:
            if self._elected >= 0:
                return self._elected == self.rank
            return self.rank == (0 if self.holder is None else min({0, 1} - {self.holder}))

    def follow_election(self, closed: threading.Event) -> None:
        """Block until a process is elected, and confirm it; until ``closed`` or without a store.

        The elected process may end, and take the store with it.
        """
        connection = self._connection
        with contextlib.suppress(RuntimeError):
            while not closed.wait(0.05):
                with connection.lock:
                    if connection.store.check(["speaker"]):
                        self._elected = int(connection.store.get("speaker"))
                        connection.store.set(f"heard/{self.rank}", "")
                        return

    def wait_until_confirmed(self, seconds: float) -> None:
        """Block until all others know who is elected, if this process holds the store.

        Parameters
        ----------
        seconds
            How long at most.
        """
        connection = self._connection
        end = time.monotonic() + (seconds if self.holder == self.rank else 0.0)
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end:
                others = set(range(self.n_ranks)) - {self.rank, *self._exited_ranks()}
                with connection.lock:
                    if not others or connection.store.check([f"heard/{rank}" for rank in others]):
                        return
                time.sleep(_PAUSE)

    def release_others(self) -> None:
        """Let the other processes exit: the error is printed."""
        with contextlib.suppress(RuntimeError), self._connection.lock:
            self._connection.store.set("spoken", "")

    def wait_for_release(self, seconds: float) -> None:
        """Block until the elected process has printed the error, for ``seconds`` at most."""
        connection = self._connection
        end = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end:
                with connection.lock:
                    if connection.store.check(["spoken"]):
                        return
                time.sleep(_PAUSE)
