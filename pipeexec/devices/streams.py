"""Streams and events, with CUDA's meaning: their interface, and those of CPU workers.

A stream runs work in the order of submission, one piece at a time. ``record`` puts an event between
two pieces of work. ``wait_event`` makes the stream wait, not the caller. The host waits only in
``synchronize`` and in an event's ``wait``. As on CUDA, an event must be recorded before a stream
waits for it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Protocol

from pipeexec.process_end import end_thread_with_process

#: A piece of work of a stream.
Work = Callable[[], object]
#: A function that takes the event before a piece of work.
Begin = Callable[["Event"], object]


class Event(Protocol):
    """A point on a stream; it is set once everything before it has run."""

    def seconds_since(self, base: Event) -> float:
        """Return seconds from ``base`` to this event; both are set and of one device."""
        ...

    def is_set(self) -> bool:
        """Return whether everything before this point has run."""
        ...

    def wait(self, seconds: float) -> bool:
        """Block the caller until the event is set, at most so long; return whether it is set."""
        ...


class Stream(Protocol):
    """A queue of work on a device."""

    def submit(self, work: Work) -> None:
        """Run ``work`` after everything submitted before."""
        ...

    def record(self) -> Event:
        """Return an event that is set when everything submitted before has run."""
        ...

    def wait_event(self, event: Event) -> None:
        """Let work submitted from now on wait for ``event``."""
        ...

    def event_inside(self) -> tuple[Event, Work]:
        """Return an event within work of this stream, and the function by which work sets it.

        The event is set once everything that the work has submitted to the stream by then has run.
        """
        ...

    def run(self, work: Work, events: Sequence[Event], begin: Begin) -> Event:
        """Run ``work`` after everything submitted before, and after ``events``.

        Returns the event right after it. ``begin`` gets the event right before it, and is called
        before the host starts the work.
        """
        ...

    def beside_current(self) -> AbstractContextManager[None]:
        """Make this the current stream of its GPU in a block; the current GPU stays the same."""
        ...

    def synchronize(self) -> None:
        """Block the caller until everything has run; raise the first exception of its work."""
        ...

    def close(self) -> None:
        """Run what was submitted, then end; the stream takes no more."""
        ...


def wait_for(event: Event) -> None:
    """Block the caller until an event is set; signals are handled meanwhile."""
    while not event.wait(0.1):
        pass


# CPU workers


class CpuEvent:
    """An event of a CPU stream; ``time`` is `time.perf_counter` when it was set, or None."""

    __slots__ = ("_callbacks", "_lock", "time")

    def __init__(self) -> None:
        self.time: float | None = None
        self._callbacks: list[Work] = []
        self._lock = threading.Lock()

    @classmethod
    def now(cls) -> CpuEvent:
        """Return an event that is set now; it has no waiters, so it needs no lock."""
        event = cls.__new__(cls)
        event.time = perf_counter()
        return event

    def set(self) -> None:
        """Set the event and run its callbacks."""
        with self._lock:
            self.time = perf_counter()
        for callback in self._callbacks:
            callback()
        self._callbacks.clear()  # they may be methods of streams that hold this event

    def add_callback(self, callback: Work) -> bool:
        """Call ``callback`` in the thread that sets the event; False if it is set already."""
        if self.time is not None:
            return False
        with self._lock:
            if self.time is not None:
                return False
            self._callbacks.append(callback)
            return True

    def is_set(self) -> bool:
        """Return whether everything before this point has run."""
        return self.time is not None

    def wait(self, seconds: float = -1) -> bool:
        """Block the caller until the event is set, at most so long (-1: without limit)."""
        lock = threading.Lock()
        lock.acquire()
        if self.add_callback(lock.release):
            return lock.acquire(timeout=seconds)
        return True

    def seconds_since(self, base: Event) -> float:
        """Return seconds from ``base`` to this event."""
        assert isinstance(base, CpuEvent)
        assert base.time is not None
        assert self.time is not None
        return self.time - base.time


class _CpuEvents(Stream, Protocol):
    """Events of a stream of the CPU."""

    def record(self) -> CpuEvent:
        """Return an event that is set when everything submitted before has run."""
        event = CpuEvent()
        self.submit(event.set)
        return event

    def event_inside(self) -> tuple[CpuEvent, Work]:
        """Return an event within work, and the function by which work sets it."""
        event = CpuEvent()
        return event, event.set

    def beside_current(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: CPUs have no current stream."""
        return nullcontext()


class CpuStream(_CpuEvents):
    """A worker thread that runs its queue in order; it ends when the stream is garbage.

    It first runs ``prepare``, which may pin it or set its number of threads.
    """

    def __init__(self, name: str, prepare: Work | None = None) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._gate = threading.Lock()  # the thread waits here for an event
        self._gate.acquire()
        self._errors: list[BaseException] = []
        if prepare is not None:
            self._queue.put(prepare)
        self.thread = threading.Thread(
            target=_run_queue, args=(self._queue, self._errors), name=name, daemon=True
        )
        end_thread_with_process(self.thread, partial(self._queue.put, None))
        self.thread.start()
        weakref.finalize(self, self._queue.put, None)

    def _block(self, event: CpuEvent) -> None:
        if event.add_callback(self._gate.release):
            self._gate.acquire()

    def submit(self, work: Work) -> None:
        """Run ``work`` after everything submitted before."""
        self._queue.put(work)

    def wait_event(self, event: Event) -> None:
        """Let work submitted from now on wait for ``event``."""
        assert isinstance(event, CpuEvent)
        if event.time is None:
            self._queue.put(partial(self._block, event))

    def run(self, work: Work, events: Sequence[Event], begin: Begin) -> CpuEvent:
        """Run ``work`` after everything submitted before and ``events``, as one piece of work."""
        for event in events:
            self.wait_event(event)
        start, end = CpuEvent(), CpuEvent()
        begin(start)
        self._queue.put(partial(_run_between, start, work, end))
        return end

    def synchronize(self) -> None:
        """Block the caller until everything has run; raise the first exception of its work."""
        self.record().wait()
        _raise_first(self._errors)

    def close(self) -> None:
        """Run what was submitted, then end the thread."""
        self._queue.put(None)
        self.thread.join()


def _run_queue(queue: SimpleQueue[Work | None], errors: list[BaseException]) -> None:
    """Run a queue in this thread, which holds no reference to the stream itself."""
    while (work := queue.get()) is not None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        del work  # an idle worker keeps nothing alive


def _run_between(start: CpuEvent, work: Work, end: CpuEvent) -> None:
    """Run work between two events, which are set even if it fails."""
    start.set()
    try:
        work()
    finally:
        end.set()


def _raise_first(errors: list[BaseException]) -> None:
    """Raise the first of the errors, if any, and forget them all."""
    if errors:
        first = errors[0]
        errors.clear()
        raise first


class InlineStream(_CpuEvents):
    """A stream without a thread: the thread that makes its next piece of work ready runs it.

    For work that takes no time, such as handing over a tensor within one memory. A separate thread
    would cost a wake-up for each message (25 us idle, 200 us on busy cores) and gain nothing.
    """

    def __init__(self) -> None:
        self._queue: deque[Work | CpuEvent] = deque()
        self._lock = threading.Lock()
        self._n_signals = 0
        self._awaited: CpuEvent | None = None  # will call `_advance`
        self._errors: list[BaseException] = []

    def _advance(self) -> None:
        """Run the ready work, unless another thread does: the signal makes it look again."""
        with self._lock:
            self._n_signals += 1
            if self._n_signals > 1:
                return
        while True:
            n_served = self._n_signals
            self._drain()
            with self._lock:
                self._n_signals -= n_served
                if not self._n_signals:
                    return

    def _drain(self) -> None:
        while self._queue:
            work = self._queue[0]
            if isinstance(work, CpuEvent):
                if work.time is None and (work is self._awaited or self._await(work)):
                    return
                self._queue.popleft()
                continue
            self._queue.popleft()
            try:
                work()
            except BaseException as error:
                self._errors.append(error)

    def _await(self, event: CpuEvent) -> bool:
        """Add one callback, however often the blocked stream gets work; False if event is set."""
        self._awaited = event
        return event.add_callback(self._advance)

    def submit(self, work: Work) -> None:
        """Run ``work`` after everything submitted before."""
        self._queue.append(work)
        self._advance()

    def wait_event(self, event: Event) -> None:
        """Let work submitted from now on wait for ``event``."""
        assert isinstance(event, CpuEvent)
        if event.time is None:
            self._queue.append(event)
            self._advance()

    def run(self, work: Work, events: Sequence[Event], begin: Begin) -> CpuEvent:
        """Run ``work`` after everything submitted before and ``events``, as one piece of work."""
        for event in events:
            assert isinstance(event, CpuEvent)
            if event.time is None:
                self._queue.append(event)
        start, end = CpuEvent(), CpuEvent()
        begin(start)
        self.submit(partial(_run_between, start, work, end))
        return end

    def synchronize(self) -> None:
        """Block the caller until everything has run; raise the first exception of its work."""
        self.record().wait()
        _raise_first(self._errors)

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class CallerStream(_CpuEvents):
    """A stream that runs work at once in the caller's thread.

    For work so short that a thread costs more than it gains. The caller waits for the events that
    the work depends on, and gets its exceptions.
    """

    def submit(self, work: Work) -> None:
        """Run ``work``."""
        work()

    def record(self) -> CpuEvent:
        """Return an event that is set now."""
        return CpuEvent.now()

    def wait_event(self, event: Event) -> None:
        """Wait for ``event``."""
        wait_for(event)

    def run(self, work: Work, events: Sequence[Event], begin: Begin) -> CpuEvent:
        """Run ``work`` once ``events`` are set; return the event after it."""
        for event in events:
            if not event.is_set():
                self.wait_event(event)
        begin(CpuEvent.now())
        work()
        return CpuEvent.now()

    def synchronize(self) -> None:
        """Do nothing: all work is done."""

    def close(self) -> None:
        """Do nothing: there is no thread to end."""
