"""Moments on a device's own clock, compared only once they are over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Moment", "moments"]

#: Seconds, or a CUDA event that will be reached.
Moment = Any


def moments(device: torch.device) -> tuple[Callable[[], Moment], Callable[[Moment], float]]:
    """Return what makes a moment now, and what turns one into seconds since this call.

    Of a CPU now is when the call is made; of a GPU when its current stream comes by. Seconds of a
    GPU's moment block until then.
    """
    if device.type != "cuda":
        origin = time.perf_counter()
        return time.perf_counter, lambda moment: float(moment) - origin

    def now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    first = now()

    def seconds(moment: torch.cuda.Event) -> float:
        moment.synchronize()
        return float(first.elapsed_time(moment)) / 1e3

    return now, seconds
