"""Costs: seconds and bytes of each operation of a stage, and of each task of a graph."""

from pipesim.costs.cost_fields import Workload
from pipesim.costs.costs import Costs
from pipesim.costs.keys import Keys
from pipesim.costs.layer_split import balanced_split, read_layout, write_layout
from pipesim.costs.task_costs import CostTable, TaskCosts

__all__ = [
    "CostTable",
    "Costs",
    "Keys",
    "TaskCosts",
    "Workload",
    "balanced_split",
    "read_layout",
    "write_layout",
]
