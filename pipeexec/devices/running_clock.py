"""`RunningClock` and `RunningTimer`: time in which this process ran, for all limits of waits.

A process may be frozen: by SIGSTOP, a debugger, or a machine that is paused. The clocks of the
system go on meanwhile. A limit that they measure is over when the process continues, although
nothing has waited.

A frozen process looks at no clock. So threads that poll measure their own time: they add the
seconds between two looks, and of a gap that is much longer than their period only a part.
"""

from __future__ import annotations

import threading
import time

#: Most seconds that count between two looks. Threads of a busy machine look this rarely, too.
_LONGEST_GAP = 0.5


class RunningClock:
    """Clock of the time in which its threads polled; they all look at it.

    ``longest_gap`` is the most seconds that count between two looks: several periods of a thread.
    """

    def __init__(self, longest_gap: float = _LONGEST_GAP) -> None:
        self.longest_gap = longest_gap
        self._look, self._seconds = time.monotonic(), 0.0
        self._lock = threading.Lock()

    def read(self) -> float:
        """Return the seconds of this clock, which begins at 0."""
        with self._lock:
            look = time.monotonic()
            self._seconds += min(look - self._look, self.longest_gap)
            self._look = look
            return self._seconds


class RunningTimer:
    """Limit of a wait (s), in the time in which the waiting threads polled.

    ``period`` is the seconds between two looks of a thread, about.
    """

    def __init__(self, limit: float, period: float = 0.1) -> None:
        self.limit = limit
        # A freeze counts as one gap: it may not be a large part of a short limit.
        self._clock = RunningClock(max(2 * period, min(_LONGEST_GAP, limit / 4)))
        self._start = 0.0

    def restart(self) -> None:
        """Begin the wait again."""
        self._start = self._clock.read()

    @property
    def is_over(self) -> bool:
        """Whether the wait has been as long as the limit."""
        return self._clock.read() - self._start > self.limit
