"""Times on a device's own clock; those of a GPU are read later, when it has reached them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

#: A time: seconds of the host's clock, or a CUDA event.
Moment = Any


def device_timer(device: torch.device) -> tuple[Callable[[], Moment], Callable[[Moment], float]]:
    """Return two functions: the current moment, and a moment in seconds since this call.

    A CPU's moment is the time of the call. A GPU's moment is the time at which its current stream
    reaches it; turning it into seconds blocks until then.
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
