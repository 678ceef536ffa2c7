"""Schedules: orders of actions on devices, placements of stages, the registry, and files."""

from pipesim.ops import Overlapped
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ClosedForm, Counts, register, schedule, schedules
from pipesim.scheduling.schedule import Schedule

__all__ = [
    "ClosedForm",
    "Counts",
    "Overlapped",
    "Placement",
    "Schedule",
    "register",
    "schedule",
    "schedules",
]
