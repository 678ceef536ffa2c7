"""Order the tasks of devices by simulation, under costs and memory limits."""

from pipesim.list_scheduling.order_by import order_by

__all__ = ["order_by"]
