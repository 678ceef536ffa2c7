"""List scheduling: order the actions of devices, given costs and memory limits."""

from pipesim.list_scheduling.order_by import order_by

__all__ = ["order_by"]
