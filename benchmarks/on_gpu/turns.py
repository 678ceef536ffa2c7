"""Steps that take turns: seconds of each, and ratios of their times."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

from _interval import interval

from on_gpu.bench import Bench

#: Runs a step. Returns the host's seconds to issue it where the call waits for the GPU, else None.
Step = Callable[[], float | None]


class Times(NamedTuple):
    """Seconds of each step: by the wall until the GPU is idle, and until the host has issued it."""

    wall: list[float]
    host: list[float]


class Ratio(NamedTuple):
    """Median of ratios, and the ends of its 95 % confidence interval by order statistics."""

    median: float
    low: float
    high: float


def in_turn(
    bench: Bench, steps: Mapping[str, Step], n_rounds: int, warm_up: int
) -> dict[str, Times]:
    """Time steps in turn, every second round in reverse order.

    The garbage collector is off during a round and runs after it.
    """
    times = {name: Times([], []) for name in steps}
    names = list(steps)
    gc.collect()
    gc.freeze()  # so that collections look at the objects of a round alone
    gc.disable()
    try:
        for number in range(-warm_up, n_rounds):
            for name in names if number % 2 else reversed(names):
                wall, host = _timed(bench, steps[name])
                if number >= 0:
                    times[name].wall.append(wall)
                    times[name].host.append(host)
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return times


def ratio(own: Sequence[float], peer: Sequence[float]) -> Ratio:
    """Return the ratios of neighbouring steps, ours over theirs."""
    ratios = sorted(a / b for a, b in zip(own, peer, strict=True))
    low, high = interval(len(ratios))
    return Ratio(statistics.median(ratios), ratios[low], ratios[high])


def _timed(bench: Bench, step: Step) -> tuple[float, float]:
    bench.wait()
    start = perf_counter()
    issued = step()
    returned = perf_counter() - start
    bench.wait()
    return perf_counter() - start, returned if issued is None else issued
