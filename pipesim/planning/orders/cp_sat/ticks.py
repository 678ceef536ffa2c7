"""`TickProblem`: a problem of orders in whole numbers, as CP-SAT needs it.

Whole numbers are chosen such that a bound in ticks holds in seconds:

- If all seconds are multiples of one unit, a tick is that unit and nothing is rounded.
- Otherwise all seconds are rounded down. An order then takes at most its real time.

Bytes are treated alike: bytes of tasks are rounded down, and limits are rounded up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.order_search import OrderProblem
from pipesim.utils.csr import Ints

Floats = NDArray[np.float64]

#: Parts of the smallest number that are tried as the unit of all numbers.
_MOST_PARTS = 1000
#: Relative distance from a multiple of the unit that counts as rounding of floats.
_FLOAT_NOISE = 1e-12
#: Ticks of the objective, if seconds have no common unit: a rounded task loses up to 2e-13 of it.
FINE_TICKS = 2**42
#: The same for spans between devices whose first starts vary. There, all times can shift together,
#: and CP-SAT may raise them tick by tick before it sees a contradiction.
COARSE_TICKS = 2**12
#: Largest whole number of bytes, in units of bytes.
_MOST_BYTES = 2**40


class TickProblem(NamedTuple):
    """Whole numbers of an `OrderProblem`; arrays have its shapes.

    Attributes
    ----------
    tick
        Seconds of one tick.
    exact
        Whether no time was rounded.
    noise
        Relative error of a sum of exact times, as floats add it; 0 if all are whole numbers.
    seconds, latency, hold, tail
        Times in ticks.
    held
        Units of bytes that a task of a lane leaves on its device: allocated less released.
    peak
        Units of bytes that a task takes while it runs: allocated and workspace.
    limit
        Units of bytes of each device; -1 for no limit.
    """

    tick: float
    exact: bool
    noise: float
    seconds: Ints
    latency: Ints
    hold: Ints
    tail: Ints
    held: Ints
    peak: Ints
    limit: Ints

    def whole(self, seconds: float) -> int:
        """Return a time in ticks, rounded down."""
        ticks = seconds / self.tick
        return round(ticks) if self.exact else math.floor(ticks)


def tick_problem(problem: OrderProblem, objective: float, most: int = FINE_TICKS) -> TickProblem:
    """Return a problem in whole numbers, with at most ``most`` ticks in the objective (s)."""
    times = [problem.seconds, problem.latency, problem.hold, problem.tail]
    unit = common_unit(np.concatenate([[objective], *(x.ravel() for x in times)]), most)
    tick = unit or max(objective / most, float(np.finfo(np.float64).smallest_subnormal))
    change = np.rint if unit else np.floor
    seconds, latency, hold, tail = (change(x / tick).astype(np.int64) for x in times)
    held, peak, limit = _whole_bytes(problem)
    exact, whole_numbers = unit is not None, float(tick).is_integer()
    noise = 0.0 if whole_numbers else _FLOAT_NOISE
    return TickProblem(tick, exact, noise, seconds, latency, hold, tail, held, peak, limit)


def common_unit(numbers: Floats, most: float) -> float | None:
    """Return a unit of which all numbers are multiples, up to rounding of floats; else None.

    The unit is a whole part of the smallest number, and the largest has at most ``most`` units.

    >>> common_unit(np.array([0.2, 0.3, 0.0]), 1e9)
    0.1
    """
    positive = np.unique(numbers[numbers > 0.0])
    if not len(positive):
        return 1.0
    for parts in range(1, _MOST_PARTS + 1):
        multiples = positive * (parts / positive[0])
        noise = np.abs(multiples - np.rint(multiples))
        if (noise <= _FLOAT_NOISE * multiples).all() and multiples[-1] <= most:
            return float(positive[0] / parts)
    return None


def _whole_bytes(problem: OrderProblem) -> tuple[Ints, Ints, Ints]:
    """Return held and peak units of each lane, and the limit of each device.

    A micro-batch of a stage holds less and less: bytes after its F, after its I, none after its
    last operation. Each of these sums is rounded, so that rounding never adds up.
    """
    keys = np.stack([problem.path, problem.stage])
    stage_start = np.flatnonzero(np.r_[True, (np.diff(keys) != 0).any(axis=0)])
    net = problem.allocated - problem.released
    total = np.cumsum(net)
    size = np.diff(np.r_[stage_start, len(net)])
    held = np.maximum(total - np.repeat(total[stage_start] - net[stage_start], size), 0.0)
    held[np.r_[stage_start[1:], len(net)] - 1] = 0.0
    peak = problem.allocated + problem.workspace
    unit = common_unit(np.concatenate([held, peak]), _MOST_BYTES)
    whole = np.rint if unit else np.floor
    unit = unit or float(max(peak.max(), held.max())) / _MOST_BYTES
    held_units = whole(held / unit).astype(np.int64)
    net_units = np.diff(held_units, prepend=0)
    net_units[stage_start] = held_units[stage_start]
    limited = np.isfinite(problem.limit)
    # The margin keeps a sum of floats that rounding puts just above its limit.
    units = np.floor(np.where(limited, problem.limit, 0.0) / unit * (1.0 + _FLOAT_NOISE))
    limit = np.where(limited, np.maximum(units + (whole is np.floor), 0.0), -1.0)
    return net_units, whole(peak / unit).astype(np.int64), limit.astype(np.int64)
