"""`Stream` and `Event`: streams and events with CUDA's meaning.

A stream runs what is given to it one after the other, in the order given. ``record`` puts an event
between two pieces of work; ``wait_event`` makes the stream wait, not the caller. The host waits
in ``synchronize`` and in an event's ``wait`` alone. As on CUDA, an event must be recorded before it
is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Event", "Stream", "Work", "wait_for"]

Work = Callable[[], object]


class Event(Protocol):
    """A point on a stream."""

    def seconds_since(self, base: Event) -> float:
        """Return seconds from ``base`` to this event; both have passed, on one device."""
        ...

    def passed(self) -> bool:
        """Return whether everything before this point has run."""
        ...

    def wait(self, seconds: float) -> bool:
        """Block the caller until this passes, for so long at most; return whether it has."""
        ...


class Stream(Protocol):
    """A queue of work on a device."""

    def submit(self, work: Work) -> None:
        """Let ``work`` run after everything that was given before."""
        ...

    def record(self) -> Event:
        """Return an event that passes when everything given before has run."""
        ...

    def wait_event(self, event: Event) -> None:
        """Let what is given from now on wait for ``event``."""
        ...

    def milestone(self) -> tuple[Event, Work]:
        """Return an event within work of this stream, and what that work calls to let it pass.

        It passes once all that the work has given to the stream until then has run.
        """
        ...

    def run(self, work: Work, after: Sequence[Event] = ()) -> tuple[Event, Event]:
        """Let ``work`` run behind what was given before and these events.

        Returns the events right before it, and right after it.
        """
        ...

    def synchronize(self) -> None:
        """Block the caller until everything has run; raise the first exception of raw work."""
        ...

    def close(self) -> None:
        """Run what was given, then end; the stream takes no more."""
        ...


def wait_for(event: Event) -> None:
    """Block the caller until an event has passed; signals are served meanwhile."""
    while not event.wait(0.1):
        pass
