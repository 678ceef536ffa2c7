"""Lower a schedule to a task graph, in named passes."""

from pipesim.lowering.lower import lower

__all__ = ["lower"]
