"""`Stream` and `Event`: the interface of streams and events, with CUDA's meaning.

A stream runs work in the order of submission, one piece at a time. ``record`` puts an event between
two pieces of work. ``wait_event`` makes the stream wait, not the caller. The host waits only in
``synchronize`` and in an event's ``wait``. As on CUDA, an event must be recorded before a stream
waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

#: A piece of work of a stream.
Work = Callable[[], object]


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

    def run(self, work: Work, events: Sequence[Event] = ()) -> tuple[Event, Event]:
        """Run ``work`` after everything submitted before, and after ``events``.

        Returns the events right before it, and right after it.
        """
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
