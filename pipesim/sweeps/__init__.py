"""Many configurations, or timelines, as one table; each is a row."""

from pipesim.sweeps.compare import compare
from pipesim.sweeps.sweep import sweep

__all__ = ["compare", "sweep"]
