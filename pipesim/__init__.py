"""Simulate pipeline-parallel training schedules; pipeexec runs the same task graphs for real."""

from pipesim.compare import Comparison, compare
from pipesim.costs import Costs, CostTable, TaskCosts
from pipesim.graph import TaskGraph
from pipesim.layers import Layers
from pipesim.lower import lower
from pipesim.network import Link, Network
from pipesim.ops import Action, Op
from pipesim.placement import Placement, linear, looped, v_shaped
from pipesim.schedule import ClosedForm, Schedule, register, schedule
from pipesim.shard import Shard
from pipesim.simulate import replay, simulate
from pipesim.split import balanced_split
from pipesim.tasks import Task, Tasks
from pipesim.timeline import Timeline
from pipesim.transformer import Transformer
from pipesim.verify import verify

import pipesim.schedules  # noqa: F401  # isort: skip  # registers them
from pipesim.schedule import schedules  # isort: skip  # the listing takes the package's name

__all__ = [
    "Action",
    "ClosedForm",
    "Comparison",
    "CostTable",
    "Costs",
    "Layers",
    "Link",
    "Network",
    "Op",
    "Placement",
    "Schedule",
    "Shard",
    "Task",
    "TaskCosts",
    "TaskGraph",
    "Tasks",
    "Timeline",
    "Transformer",
    "balanced_split",
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
