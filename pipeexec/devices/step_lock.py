"""`StepLock`: refuse a second caller of a device: another thread, a stage, a forked process."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from pipeexec.devices.running_clock import RunningTimer
from pipesim.errors import ExecutionError

#: Seconds between two looks of a wait at its limit.
_PAUSE = 0.05


class Stoppable(Protocol):
    """A step that runs."""

    def stop(self, error: ExecutionError) -> None:
        """Fail with ``error``, without waiting for tasks that do not end soon."""
        ...


class StepLock:
    """Lets one thread at a time use a device, also one that several pipelines share.

    A second caller gets an error: it neither waits nor disturbs the step of the first. A thread may
    enter again, but not while its own step runs tasks.

    Parameters
    ----------
    has_thread
        A method of the device that returns whether a thread runs its tasks. It is held weakly, as
        the device holds this lock.

    Attributes
    ----------
    step
        The step that runs, or None.
    """

    def __init__(self, has_thread: Callable[[threading.Thread], bool]) -> None:
        self._has_thread = weakref.WeakMethod(has_thread)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._owner: threading.Thread | None = None
        self._depth = 0
        self._closing = False
        self.step: Stoppable | None = None

    @property
    def is_forked(self) -> bool:
        """Whether the calling process was forked from the one that made the pipeline."""
        return os.getpid() != self._process

    @contextmanager
    def hold(self, call: str) -> Iterator[None]:
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
    def run_step(self, step: Stoppable) -> Iterator[None]:
        """Run the tasks of a step in a block; `stop` ends them."""
        self.step = step
        if self._closing:
            step.stop(_closed_error())
        try:
            yield
        finally:
            self.step = None

    def stop(self, timer: RunningTimer) -> bool:
        """Stop the step that runs, if any, and wait for its end; return whether it has ended.

        ``timer`` limits the wait. In the thread of the step itself, such as in a signal handler,
        the step ends later.
        """
        self._closing = True
        if (step := self.step) is not None:
            step.stop(_closed_error())
        if self._owner is threading.current_thread():
            return self.step is None
        while not self._lock.acquire(timeout=_PAUSE):
            if timer.is_over:
                return False
        self._lock.release()
        return True

    def check_outside(self, call: str, *, may_interrupt: bool = False) -> None:
        """Raise if the caller is a task of the device.

        A signal handler runs in the thread of the step. It may make only those calls that
        ``may_interrupt`` the step.

        Raises
        ------
        ExecutionError
            If a stage or the loss calls, which would wait for itself.
        """
        thread = threading.current_thread()
        is_own = self._owner is thread and self.step is not None and not may_interrupt
        has_thread = self._has_thread()
        if is_own or (has_thread is not None and has_thread(thread)):
            raise ExecutionError(
                f"{call} was called from within a stage or the loss of the same pipeline, or from "
                "a handler of a signal during its step; call it after the step"
            )


def _closed_error() -> ExecutionError:
    return ExecutionError(
        "the pipeline was closed while a step was running, which is not complete; gradients and "
        "weights may hold a part of it"
    )
