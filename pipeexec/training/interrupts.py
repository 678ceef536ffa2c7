"""`Interrupts`: let the running step end when the user, or the system, ends the training."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds in which further signals are copies of the first: torchrun passes Ctrl-C on to processes
#: that have it from the terminal already.
_COPIES = 2.0


class Interrupts:
    """Takes SIGINT (Ctrl-C) and SIGTERM in a block.

    The first signal is only noted. A later one, after two seconds, has its usual effect: Ctrl-C
    raises `KeyboardInterrupt`, SIGTERM ends the process. In another thread than the main one,
    signals keep their usual effect.

    Parameters
    ----------
    notice
        Called with a line of text after the first signal.
    enabled
        Whether to take signals at all.

    Attributes
    ----------
    signal
        The first signal; None before it.
    """

    def __init__(self, notice: Callable[[str], None], *, enabled: bool = True) -> None:
        self.signal: signal.Signals | None = None
        self._notice, self._enabled, self._time = notice, enabled, 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if self._enabled and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # A process in the background of a shell ignores Ctrl-C, and goes on to.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._time = signal.Signals(number), time.monotonic()
            self._notice(
                f"{self.signal.name}: the training ends after this step; a second one ends it now"
            )
        elif time.monotonic() > self._time + _COPIES:
            self.__exit__()
            signal.raise_signal(number)
