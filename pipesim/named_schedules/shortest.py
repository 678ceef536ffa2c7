"""Compare orders by simulation with given costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pipesim.costs.costs import Costs
from pipesim.lowering.lower import lower
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.timeline import Timeline

__all__ = ["shortest", "simulate_order"]


def simulate_order(schedule: Schedule, costs: Costs) -> Timeline:
    """Return the timeline of an order, without skips, replicas or optimizer steps."""
    return predict_timeline(lower(schedule, step="none"), replace(costs, skip_bytes=None))


def shortest(schedules: Iterable[Schedule], costs: Costs) -> Schedule:
    """Return the schedule with the least makespan; the first one among equals."""
    different: list[Schedule] = []
    for schedule in schedules:
        if schedule not in different:
            different.append(schedule)
    if len(different) == 1:
        return different[0]
    return min(different, key=lambda schedule: simulate_order(schedule, costs).makespan)
