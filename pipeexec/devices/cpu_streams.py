"""Streams and events of CPU workers."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from time import perf_counter

from pipeexec.devices.streams import Event, Work, wait_for

__all__ = ["CallerStream", "CpuEvent", "CpuStream", "InlineStream"]


class CpuEvent:
    """An event of a CPU stream; ``time`` is when it passed, on `time.perf_counter`'s clock."""

    __slots__ = ("_lock", "_waiting", "time")

    def __init__(self) -> None:
        self.time: float | None = None
        self._waiting: list[Work] = []
        self._lock = threading.Lock()

    @classmethod
    def now(cls) -> CpuEvent:
        """Return an event that passes now: nobody can wait for it, so that it needs no lock."""
        event = cls.__new__(cls)
        event.time = perf_counter()
        return event

    def fire(self) -> None:
        """Pass, and tell whoever waits."""
        with self._lock:
            self.time = perf_counter()
        for tell in self._waiting:
            tell()
        self._waiting.clear()  # streams, which may hold this event

    def call_when_passed(self, tell: Work) -> bool:
        """Call ``tell`` from the thread in which the event passes; False if it has passed."""
        if self.time is not None:
            return False
        with self._lock:
            if self.time is not None:
                return False
            self._waiting.append(tell)
            return True

    def passed(self) -> bool:
        """Return whether everything before this point has run."""
        return self.time is not None

    def wait(self, seconds: float = -1) -> bool:
        """Block the caller until this passes, for so long at most (-1: for ever)."""
        passed = threading.Lock()
        passed.acquire()
        if self.call_when_passed(passed.release):
            return passed.acquire(timeout=seconds)
        return True

    def seconds_since(self, base: Event) -> float:
        """Return seconds from ``base`` to this event."""
        assert isinstance(base, CpuEvent)
        assert base.time is not None
        assert self.time is not None
        return self.time - base.time


class CpuStream:
    """A worker thread that runs its queue in order; it ends when nobody holds the stream.

    Parameters
    ----------
    name
        Of the thread.
    prepare
        Run first, in the thread: pin it, set its number of threads.
    """

    def __init__(self, name: str, prepare: Work | None = None) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._passed = threading.Lock()
        self._passed.acquire()
        self._errors: list[BaseException] = []
        if prepare is not None:
            self._queue.put(prepare)
        self.thread = threading.Thread(
            target=_serve, args=(self._queue, self._errors), name=name, daemon=True
        )
        self.thread.start()
        weakref.finalize(self, self._queue.put, None)

    def _block(self, event: CpuEvent) -> None:
        if event.call_when_passed(self._passed.release):
            self._passed.acquire()

    def submit(self, work: Work) -> None:
        """Let ``work`` run after everything that was given before."""
        self._queue.put(work)

    def record(self) -> CpuEvent:
        """Return an event that passes when everything given before has run."""
        event = CpuEvent()
        self._queue.put(event.fire)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what is given from now on wait for ``event``."""
        assert isinstance(event, CpuEvent)
        if event.time is None:
            self._queue.put(partial(self._block, event))

    def milestone(self) -> tuple[CpuEvent, Work]:
        """Return an event within work, and what that work calls to let it pass."""
        event = CpuEvent()
        return event, event.fire

    def run(self, work: Work, after: Sequence[Event] = ()) -> tuple[CpuEvent, CpuEvent]:
        """Let ``work`` run behind what was given before and these events; as one piece of work."""
        for event in after:
            self.wait_event(event)
        began, ended = CpuEvent(), CpuEvent()
        self._queue.put(partial(_timed, began, work, ended))
        return began, ended

    def synchronize(self) -> None:
        """Block the caller until everything has run; raise the first exception of raw work."""
        self.record().wait()
        _raise_first(self._errors)

    def close(self) -> None:
        """Run what was given, then end the thread."""
        self._queue.put(None)
        self.thread.join()


def _serve(queue: SimpleQueue[Work | None], errors: list[BaseException]) -> None:
    """Run a queue in this thread, which holds no more of the stream than that."""
    while (work := queue.get()) is not None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        del work  # an idle worker keeps nothing alive


def _timed(began: CpuEvent, work: Work, ended: CpuEvent) -> None:
    """Run work between two events, which pass even if it fails."""
    began.fire()
    try:
        work()
    finally:
        ended.fire()


def _raise_first(errors: list[BaseException]) -> None:
    """Raise the first of the errors, if any, and forget them all."""
    if errors:
        first = errors[0]
        errors.clear()
        raise first


class InlineStream:
    """A stream without a thread: whoever makes its next piece of work ready, runs it.

    For work that takes no time, such as handing over a tensor within one memory: a thread of its
    own would cost a wake-up a message (25 us idle, 200 us on busy cores) and nothing else.
    """

    def __init__(self) -> None:
        self._queue: deque[Work | CpuEvent] = deque()
        self._lock = threading.Lock()
        self._signals = 0
        self._watched: CpuEvent | None = None  # will call `_advance`
        self._errors: list[BaseException] = []

    def _advance(self) -> None:
        """Run what is ready, unless another thread does: it then looks again for this signal."""
        with self._lock:
            self._signals += 1
            if self._signals > 1:
                return
        while True:
            seen = self._signals
            self._drain()
            with self._lock:
                self._signals -= seen
                if not self._signals:
                    return

    def _drain(self) -> None:
        while self._queue:
            work = self._queue[0]
            if isinstance(work, CpuEvent):
                if work.time is None and (work is self._watched or self._watch(work)):
                    return
                self._queue.popleft()
                continue
            self._queue.popleft()
            try:
                work()
            except BaseException as error:
                self._errors.append(error)

    def _watch(self, event: CpuEvent) -> bool:
        """Ask once, however often a blocked stream is given more; False if the event has passed."""
        self._watched = event
        return event.call_when_passed(self._advance)

    def submit(self, work: Work) -> None:
        """Let ``work`` run after everything that was given before."""
        self._queue.append(work)
        self._advance()

    def record(self) -> CpuEvent:
        """Return an event that passes when everything given before has run."""
        event = CpuEvent()
        self.submit(event.fire)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what is given from now on wait for ``event``."""
        assert isinstance(event, CpuEvent)
        if event.time is None:
            self._queue.append(event)
            self._advance()

    def milestone(self) -> tuple[CpuEvent, Work]:
        """Return an event within work, and what that work calls to let it pass."""
        event = CpuEvent()
        return event, event.fire

    def run(self, work: Work, after: Sequence[Event] = ()) -> tuple[CpuEvent, CpuEvent]:
        """Let ``work`` run behind what was given before and these events; as one piece of work."""
        for event in after:
            assert isinstance(event, CpuEvent)
            if event.time is None:
                self._queue.append(event)
        began, ended = CpuEvent(), CpuEvent()
        self.submit(partial(_timed, began, work, ended))
        return began, ended

    def synchronize(self) -> None:
        """Block the caller until everything has run; raise the first exception of raw work."""
        self.record().wait()
        _raise_first(self._errors)

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class CallerStream:
    """A stream that is its caller: work is done when it is given.

    For work so short that a thread would cost more than it gains. Whoever gives work waits for what
    it needs, and gets its exception.
    """

    def submit(self, work: Work) -> None:
        """Do ``work``."""
        work()

    def record(self) -> CpuEvent:
        """Return an event that passes now."""
        return CpuEvent.now()

    def wait_event(self, event: Event) -> None:
        """Wait for ``event``."""
        wait_for(event)

    def milestone(self) -> tuple[CpuEvent, Work]:
        """Return an event within work, and what that work calls to let it pass."""
        event = CpuEvent()
        return event, event.fire

    def run(self, work: Work, after: Sequence[Event] = ()) -> tuple[CpuEvent, CpuEvent]:
        """Do ``work`` once these events have passed; return those around it."""
        for event in after:
            if not event.passed():
                self.wait_event(event)
        began = CpuEvent.now()
        work()
        return began, CpuEvent.now()

    def synchronize(self) -> None:
        """Do nothing: all is done."""

    def close(self) -> None:
        """Do nothing: there is no thread to end."""
