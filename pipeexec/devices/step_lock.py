"""Refuse a second caller of a device: another thread, a stage, a forked process."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

from pipesim.errors import ExecutionError

__all__ = ["StepLock"]


class Stoppable(Protocol):
    """A step under way."""

    def stop(self, error: ExecutionError) -> None:
        """Fail with ``error``; tasks that do not end soon are left to themselves."""
        ...


class StepLock:
    """Lets one thread at a time use a device, also one that several pipelines share.

    A second caller gets an error, instead of waiting, or of spoiling the step of the first. A
    thread may enter again, but not while its own step runs tasks.

    Parameters
    ----------
    has_thread
        A method of the device: whether a thread runs its tasks. Held weakly, as the device holds
        this.

    Attributes
    ----------
    run
        The step under way, or None.
    """

    def __init__(self, has_thread: Callable[[threading.Thread], bool]) -> None:
        self._has_thread = weakref.WeakMethod(has_thread)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._owner: threading.Thread | None = None
        self._depth = 0
        self._closing = False
        self.run: Stoppable | None = None

    @property
    def is_forked(self) -> bool:
        """Whether the calling process was forked from the one that made the pipeline."""
        return os.getpid() != self._process

    @contextmanager
    def held(self, call: str) -> Iterator[None]:
        """Hold the device for a call, named in errors.

        Raises
        ------
        ExecutionError
            From a forked process, or while another thread holds the device.
        """
        if self.is_forked:
            raise ExecutionError(
                f"{call} was called in a process that was forked from the one that made the "
                f"pipeline (process {self._process}), whose threads it does not have; make the "
                "pipeline after the fork"
            )
        if not self._lock.acquire(blocking=False):
            owner = self._owner
            raise ExecutionError(
                f"{call} was called while thread {'' if owner is None else owner.name!r} uses this "
                "pipeline, or one with its devices; call one method at a time, or make a pipeline "
                "for each thread"
            )
        self._owner, self._depth = threading.current_thread(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._owner = None
            self._lock.release()

    @contextmanager
    def stepping(self, run: Stoppable) -> Iterator[None]:
        """Run the tasks of a step; `stop` ends them."""
        self.run = run
        if self._closing:
            run.stop(_closed())
        try:
            yield
        finally:
            self.run = None

    def stop(self, until: float) -> bool:
        """Stop the step under way, if any, and wait for its end; return whether it has ended.

        ``until`` is when the wait ends, on `time.perf_counter`'s clock.

        In the thread of the step itself, as in a handler of a signal, the step ends later.
        """
        self._closing = True
        if (run := self.run) is not None:
            run.stop(_closed())
        if self._owner is threading.current_thread():
            return self.run is None
        if not self._lock.acquire(timeout=max(0.0, until - perf_counter())):
            return False
        self._lock.release()
        return True

    def check_outside(self, call: str, *, may_interrupt: bool = False) -> None:
        """Raise if the caller is a task of the device.

        A handler of a signal runs in the thread of the step: it may only call what may interrupt.

        Raises
        ------
        ExecutionError
            From within a stage or the loss, which would wait for themselves.
        """
        thread = threading.current_thread()
        is_own = self._owner is thread and self.run is not None and not may_interrupt
        has_thread = self._has_thread()
        if is_own or (has_thread is not None and has_thread(thread)):
            raise ExecutionError(
                f"{call} was called from within a stage or the loss of the same pipeline, or from "
                "a handler of a signal during its step; call it after the step"
            )


def _closed() -> ExecutionError:
    return ExecutionError(
        "the pipeline was closed while a step was running, which is not complete; gradients and "
        "weights may hold a part of it"
    )
