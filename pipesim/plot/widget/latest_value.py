"""Limit how often values are sent, without losing the last one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class LatestValue(Generic[T]):
    """Send the latest of the values that are put, at most once in a period.

    A value that comes early waits for a timer, and a later one takes its place. So the last value
    is always sent. `put` returns at once while another thread sends.

    Parameters
    ----------
    send
        Function of a value. It is called by `put`, or in the timer's thread: one call at a time.
    period
        Least time from the end of a call to the next one (s).
    share
        Most share of the time that the calls may take, 0 to 1: after a slow call, the next one
        waits for longer.
    """

    def __init__(self, send: Callable[[T], None], *, period: float, share: float) -> None:
        self._send = send
        self._period = period
        self._share = share
        self._lock = threading.Lock()
        self._waiting: list[T] = []  # the latest value, or none
        self._is_busy = False  # a call runs, or a timer is set
        self._next = time.monotonic()

    def put(self, value: T) -> None:
        """Send a value now or later, unless another one follows before."""
        with self._lock:
            self._waiting = [value]
            if self._is_busy:
                return
            self._is_busy = True
            wait = self._next - time.monotonic()
            if wait > 0:
                self._set_timer(wait)
                return
        self._send_waiting()

    def _set_timer(self, wait: float) -> None:
        timer = threading.Timer(wait, self._send_waiting)
        timer.name, timer.daemon = "pipesim widget", True
        timer.start()

    def _send_waiting(self) -> None:
        """Send the value that waits; set a timer if another one came meanwhile."""
        with self._lock:
            value = self._waiting.pop()
        began = time.monotonic()
        try:
            self._send(value)
        finally:
            with self._lock:
                ended = time.monotonic()
                wait = max(self._period, (ended - began) * (1 / self._share - 1))
                self._next = ended + wait
                self._is_busy = bool(self._waiting)
                if self._is_busy:
                    self._set_timer(wait)
