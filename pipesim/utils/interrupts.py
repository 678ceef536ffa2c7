"""`uninterrupted`: let Ctrl-C wait for the end of a block that must not end halfway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Handle SIGINT (Ctrl-C) at the end of a block, not within it.

    An import that is interrupted halfway leaves some of its modules behind, and may fail whenever
    it is tried again in the same process. The same holds for numba's first compilation.

    Raises
    ------
    KeyboardInterrupt
        At the end of the block, or what the handler of SIGINT raises. Other threads than the main
        one get no signals.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[0])
