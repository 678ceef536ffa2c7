"""`ControlMessages`: values that processes exchange besides tensors, as JSON or plain bytes.

They travel through torch's key-value store, which answers even while a process group waits for a
peer that will never come.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pipeexec.devices.running_clock import RunningTimer
from pipeexec.distributed.watchdog import Failure, Watchdog
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    PeerError,
    check_numbers,
)

#: Least seconds that processes have to reach their first step.
_START = 120.0


class ControlMessages:
    """Exchanges values between all processes, through the store.

    ``store`` is shared by all processes, and used by nothing else. A process waits ``timeout``
    seconds for the others; ``watch`` ends the wait if something fails anywhere. ``has_stepped``
    tells whether a pipeline of these processes has run a step.
    """

    def __init__(
        self, store: Store, rank: int, n_ranks: int, timeout: float, watch: Watchdog
    ) -> None:
        self.store, self.rank, self.n_ranks = store, rank, n_ranks
        self.timeout, self.watch = timeout, watch
        self.has_stepped = False
        self._pid, self._is_closed = os.getpid(), False
        self._calling = threading.Lock()  # two calls at the same time would have no order
        self._n_gathers = self._n_published = 0
        self._published: dict[int, list[str]] = {}  # names, by number
        #: For threads other than the one that gathers.
        self._public = store.clone()  # type: ignore[attr-defined]  # left out of torch's stubs

    def check(self) -> None:
        """Raise unless this process can use these processes.

        Raises
        ------
        PeerError
            If something has failed anywhere.
        ExecutionError
            After `close`, and in a forked child.
        """
        self._check_process()
        if self._is_closed:
            raise ExecutionError("these processes were left by close(); join again")
        self.watch.check()

    def _check_process(self) -> None:
        """Raise in a forked child: its connections belong to its parent."""
        if os.getpid() != self._pid:
            raise ExecutionError(
                f"process {os.getpid()} was forked from process {self._pid}, which joined; its "
                "connections cannot be shared: use them in the process that joined"
            )

    def gather(self, value: bytes) -> list[bytes]:
        """Return the values of all processes; every process must call this, in the same order.

        Parameters
        ----------
        value
            Value of this process, of any length.

        Returns
        -------
        list of bytes
            One value a rank, in the order of ranks.

        Raises
        ------
        PeerError
            If a process does not call it within the timeout. Likewise in the other calls here.
        """
        if not isinstance(value, bytes):
            raise ArgumentTypeError(f"processes exchange bytes, got {type(value).__name__}")
        self.check()
        if not self._calling.acquire(blocking=False):
            raise ExecutionError(
                "another thread waits for the other processes; make such calls in one thread, in "
                "the same order in every process"
            )
        try:
            return self._gather(value)
        finally:
            self._calling.release()

    def _gather(self, value: bytes) -> list[bytes]:
        number = self._n_gathers
        self._n_gathers += 1
        names = [f"gather/{number}/{rank}" for rank in range(self.n_ranks)]
        try:
            self.store.set(names[self.rank], value)  # type: ignore[arg-type]
            # Before the first step some processes start, or load their libraries, late.
            timeout = self.timeout if self.has_stepped else max(self.timeout, _START)
            self._wait_for(names, timeout)
            values: list[bytes] = list(self.store.multi_get(names))
            if number >= 2:  # a process in this gather has read the one before the last
                self.store.delete_key(f"gather/{number - 2}/{self.rank}")
        except dist.DistError as error:
            raise self._without_store(error) from error
        return values

    def _wait_for(self, names: Sequence[str], timeout: float) -> None:
        """Block until the store has all names, each of which ends with its process's rank.

        While other processes are in a step, it waits as long as the watchdog lets them.
        """
        timer, pause = RunningTimer(timeout), 1e-4
        while not self.store.check(list(names)):
            if self.watch.board.others_in_step():
                timer.restart()
            if timer.is_over:
                late = [n.rpartition("/")[2] for n in names if not self.store.check([n])]
                text = (
                    f"rank {self.rank} waited {timeout:g} s for rank {', '.join(late)}, which did "
                    "not answer; every process must make the same calls"
                )
                self.watch.post(Failure("late", self.rank, text))
            self.watch.check()
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)

    def share(self, value: Any) -> list[Any]:
        """Return the values of all processes, which are sent as JSON.

        Parameters
        ----------
        value
            Value of this process, which JSON can hold.

        Returns
        -------
        list
            One value a rank, in the order of ranks; tuples are lists.
        """
        try:
            text = json.dumps(value).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(
                f"processes share what JSON can hold, got {type(value).__name__}: {error}"
            ) from error
        return [json.loads(text) for text in self.gather(text)]

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of each process's values, element by element, the same everywhere.

        Parameters
        ----------
        values
            Numbers, as many in every process.

        Returns
        -------
        list of float
            One sum a position.
        """
        row = np.array(check_numbers("values", values))
        rows = [np.frombuffer(x) for x in self.gather(row.tobytes())]
        if len(sizes := {len(x) for x in rows}) > 1:
            counts = ", ".join(f"{len(x)} in rank {rank}" for rank, x in enumerate(rows))
            raise ArgumentError(
                f"processes give {len(sizes)} different numbers of values: {counts}"
            )
        totals: list[float] = np.sum(rows, axis=0).tolist()
        return totals

    def next_number(self) -> int:
        """Return a number that names all values that processes publish in one step.

        Every process must call this, in the same order. It deletes the values that this process
        published two numbers ago, which every process has read by now.

        Returns
        -------
        int
            1 at the first call, then one more each time.
        """
        self._n_published += 1
        with suppress(dist.DistError):
            for name in self._published.pop(self._n_published - 2, ()):
                self._public.delete_key(name)
        return self._n_published

    def publish(self, name: str, value: float) -> None:
        """Publish a number for other processes, from any thread; `published` reads it.

        Parameters
        ----------
        name
            Name of the number, with that of `next_number` in it.
        value
            The number.
        """
        try:
            self._public.set(name, repr(value))
            self._published.setdefault(self._n_published, []).append(name)
        except dist.DistError as error:
            raise self._without_store(error) from error

    def published(self, name: str) -> float:
        """Block until a process has published a number; return it.

        Parameters
        ----------
        name
            Name of the number.

        Returns
        -------
        float
            The number.
        """
        pause = 1e-4
        try:
            while not self._public.check([name]):
                self.watch.check()
                time.sleep(pause)
                pause = min(2 * pause, 5e-3)
            return float(self._public.get(name))
        except dist.DistError as error:
            raise self._without_store(error) from error

    def _without_store(self, error: RuntimeError) -> PeerError:
        self.watch.report_lost_store(error)
        return PeerError(self.watch.explain())

    def barrier(self) -> None:
        """Block until every process calls this."""
        self.gather(b"")

    def agree(self, what: str, value: object) -> None:
        """Check that every process gives the same value.

        Parameters
        ----------
        what
            Name of the value, for the error.
        value
            Value of this process, which JSON can hold.
        """
        everyone = self.share(value)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise ArgumentError(
                    f"{what} of rank {rank} is {other!r}, that of rank 0 {everyone[0]!r}; give "
                    "every process the same"
                )
