"""Explain timelines: critical path, causes of idle time, comparison, replay, audit."""

from pipesim.analysis.audit import audit
from pipesim.analysis.autograd_orders import AutogradOrders, autograd_orders
from pipesim.analysis.compare import Comparison
from pipesim.analysis.replay import replay
from pipesim.costs.costs import Costs
from pipesim.timeline.memory import TimelineMemory
from pipesim.timeline.timeline import Timeline
from pipesim.utils.accessors import add_constructors, add_methods

__all__ = ["AutogradOrders", "Comparison", "audit", "autograd_orders", "replay"]

add_methods(
    Timeline,
    interval="pipesim.analysis.prediction_interval:prediction_interval",
    why="pipesim.analysis.why:TimelineWhy",
)
add_methods(TimelineMemory, changes_that_fit="pipesim.analysis.configurations:changes_that_fit")
add_constructors(Costs, from_timeline="pipesim.analysis.measured_costs:costs_from_timeline")
