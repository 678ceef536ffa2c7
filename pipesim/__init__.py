"""Simulate pipeline-parallel training schedules; pipeexec runs the same task graphs for real."""

from pipesim.compare import Comparison, compare
from pipesim.costs import Costs, CostTable, TaskCosts
from pipesim.graph import TaskGraph
from pipesim.lower import lower
from pipesim.network import Link, Network
from pipesim.ops import Action, Op
from pipesim.placement import Placement, linear, looped, v_shaped
from pipesim.schedule import ClosedForm, Schedule, register, schedule
from pipesim.simulate import replay, simulate
from pipesim.tasks import Task, Tasks
from pipesim.timeline import Timeline
from pipesim.verify import verify

import pipesim.schedules  # noqa: F401  # isort: skip  # registers them
from pipesim.schedule import schedules  # isort: skip  # the listing takes the package's name

__all__ = [
    "Action",
    "ClosedForm",
    "Comparison",
    "CostTable",
    "Costs",
    "Link",
    "Network",
    "Op",
    "Placement",
    "Schedule",
    "Task",
    "TaskCosts",
    "TaskGraph",
    "Tasks",
    "Timeline",
    "compare",
    "linear",
    "looped",
    "lower",
    "register",
    "replay",
    "schedule",
    "schedules",
    "simulate",
    "v_shaped",
    "verify",
]
