"""Schedules: orders of actions on devices, placements of stages, the registry, and files."""

from pipesim.scheduling.placement import Placement, bidirectional, linear, looped, v_shaped, waves
from pipesim.scheduling.registry import ClosedForm, Counts, register, schedule, schedules
from pipesim.scheduling.schedule import Schedule

__all__ = [
    "ClosedForm",
    "Counts",
    "Placement",
    "Schedule",
    "bidirectional",
    "linear",
    "looped",
    "register",
    "schedule",
    "schedules",
    "v_shaped",
    "waves",
]
