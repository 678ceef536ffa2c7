"""Windows of tasks within a horizon, narrowed along arcs and by the orders of each device.

A horizon gives each task a window, from its head to the horizon minus its tail. Windows are
narrowed along arcs, and by counting the orders of each device alone
(`pipesim.analysis.lower_bounds.device_orders`), until nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipesim.analysis.lower_bounds.device_orders import (
    DeviceLanes,
    StateSpace,
    can_run,
    count_of,
    fill_earliest,
    fill_latest,
    held_bytes,
    new_states,
    set_ranges,
    state_index,
)
from pipesim.analysis.lower_bounds.lanes import Floats
from pipesim.analysis.lower_bounds.longest_paths import Places, heads_pass, tails_pass
from pipesim.analysis.lower_bounds.spans import NO_SPANS, Spans, limit_spans
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

__all__ = ["MOST_VISITS", "Windows"]

#: States of a device up to which its orders are counted, and visits of states and places after
#: which no further horizon is excluded: about half a second.
MOST_STATES, MOST_VISITS = 500_000, 20_000_000
#: States of a device from which a kernel that was compiled before is loaded at once.
_FEW_STATES = 20
#: Shares of the horizon: changes of windows that are rounding, and that are worth another round.
_ROUNDING, _CHANGE = 1e-10, 1e-6


@dataclass
class Windows:
    """Earliest starts and least times after ends of all places (s), and horizons to try on them.

    Attributes
    ----------
    places, lanes
        The places and their arcs, and the lanes of devices whose orders are counted.
    head, tail
        Heads and tails of each place; shape ``(n_places,)``.
    visits
        Visits that are left, in an array of one number.
    space
        Room for the states of a device, and the orders of devices that are left.
    spans
        Devices whose time from the first start to the last end is limited by the horizon; none if
        the horizon limits the makespan.
    """

    places: Places
    lanes: DeviceLanes
    head: Floats
    tail: Floats
    visits: Ints
    space: StateSpace
    spans: Spans = NO_SPANS

    @classmethod
    def of_places(
        cls,
        places: Places,
        lanes: DeviceLanes,
        head: Floats,
        tail: Floats,
        spans: Spans = NO_SPANS,
    ) -> Windows:
        """Return windows with all their visits left."""
        products = np.prod(lanes.n_tasks + 1.0, axis=1)
        n_states = int(min(products.max(initial=1.0), MOST_STATES))
        visits = np.array([MOST_VISITS], dtype=np.int64)
        return cls(places, lanes, head, tail, visits, new_states(lanes, n_states), spans)

    def allow(self, horizon: float) -> bool:
        """Return whether windows are left for all tasks, as far as the visits can tell."""
        return self.narrow(self.head.copy(), self.tail.copy(), horizon)

    def narrow(self, head: Floats, tail: Floats, horizon: float) -> bool:
        """Change heads and tails to those within a horizon; return whether windows are left."""
        if len(self.space.earliest) > _FEW_STATES and _windows_are_left.cached:
            _windows_are_left.compile()
        due = np.empty_like(head)
        return _windows_are_left(
            self.places, self.lanes, self.space, self.spans, head, tail, due, self.visits, horizon
        )

    @staticmethod
    def compile() -> None:
        """Compile the kernel, or load it, as a search calls it very often."""
        _windows_are_left.compile()


@kernel(
    heads_pass, tails_pass, limit_spans, set_ranges, state_index, can_run, count_of, held_bytes,
    fill_earliest, fill_latest, allocates=False,
)  # fmt: skip
def _windows_are_left(
    places: Places,
    lanes: DeviceLanes,
    space: StateSpace,
    spans: Spans,
    head: Floats,
    tail: Floats,
    due: Floats,
    visits: Ints,
    horizon: float,
) -> bool:
    """Narrow windows until nothing changes; return False if none is left for a task.

    ``head`` and ``tail`` are changed. ``due`` gets the latest end of each place.
    """
    slack = _ROUNDING * horizon
    while visits[0] > 0:
        visits[0] -= len(head)
        heads_pass(places.ptr, places.before, places.lag, places.seconds, head)
        tails_pass(places.ptr, places.before, places.lag, places.seconds, tail)
        limit_spans(places, spans, head, tail, horizon)
        for place in range(len(head)):
            due[place] = horizon - tail[place]
            if head[place] + places.seconds[place] > due[place] + slack:
                return False
        largest = 0.0
        for device in range(len(lanes.room)):
            n_states = set_ranges(lanes, space, device, head, due, slack)
            space.is_counted[device] = n_states <= len(space.earliest)
            if not space.is_counted[device]:
                for a in range(space.least.shape[1]):
                    space.fewest[device, a] = space.least[device, a]
                    space.greatest[device, a] = space.most[device, a]
                continue
            visits[0] -= n_states
            if space.low[1, 0] + space.low[2, 0] + space.low[3, 0] > 0:
                return False
            for k in range(n_states):
                space.earliest[k] = np.inf
            space.earliest[0] = 0.0
            fill_earliest(lanes, space, device, head, due, slack)
            fill_latest(lanes, space, device, head, due, slack)
            for lane in range(len(lanes.n_tasks[device])):
                first = lanes.first[device, lane]
                for k in range(first, first + lanes.n_tasks[device, lane]):
                    place = lanes.place[k]
                    if space.start[k] == np.inf:
                        return False
                    later = horizon - space.end[k]
                    largest = max(largest, space.start[k] - head[place], later - tail[place])
                    head[place] = max(head[place], space.start[k])
                    tail[place] = max(tail[place], later)
        if largest <= _CHANGE * horizon:
            break
    return True
