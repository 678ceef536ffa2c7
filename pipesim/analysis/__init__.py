"""Explain timelines: critical path, causes of idle time, comparison, replay, audit."""

from pipesim.analysis.audit import audit
from pipesim.analysis.autograd_orders import AutogradOrders, autograd_orders
from pipesim.analysis.compare import Comparison, compare
from pipesim.analysis.replay import replay

__all__ = ["AutogradOrders", "Comparison", "audit", "autograd_orders", "compare", "replay"]
