"""Ready-made priorities of the list scheduler: what a device runs first, of what is ready."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from pipesim.list_scheduling.scheduler import BACKWARD, FORWARD, WEIGHT, Key, Work

__all__ = ["PRIORITIES"]


def _by_phase(*phases: int) -> Callable[[Work], Key]:
    """Return a priority: phases in this order, then micro-batches, then deep stages first."""
    rank = {phase: position for position, phase in enumerate(phases)}

    def key_of(work: Work) -> Key:
        return lambda phase, stage, microbatch, ready: (rank[phase], microbatch, -stage)

    return key_of


def _first_come(work: Work) -> Key:
    return lambda phase, stage, microbatch, ready: (ready, microbatch, phase, -stage)


def _critical_path(work: Work) -> Key:
    """Rank by the seconds of the longest chain of actions that begins with this one."""
    weight = list(work.seconds[WEIGHT]) if work.is_split else [0.0] * work.placement.n_stages
    # Backwards go on to stage 0, and a W may follow any of them.
    left = [weight[0] + work.seconds[BACKWARD][0]]
    for stage in range(1, work.placement.n_stages):
        left.append(work.seconds[BACKWARD][stage] + max(weight[stage], left[-1]))
    down = list(itertools.accumulate(reversed(work.seconds[FORWARD])))[::-1]
    after = ([x + left[-1] for x in down], left, weight)
    return lambda phase, stage, microbatch, ready: (-after[phase][stage], microbatch, phase)


#: The ready-made priorities.
PRIORITIES: dict[str, Callable[[Work], Key]] = {
    "backward_first": _by_phase(BACKWARD, FORWARD, WEIGHT),
    "forward_first": _by_phase(FORWARD, BACKWARD, WEIGHT),
    "first_come": _first_come,
    "critical_path": _critical_path,
}
