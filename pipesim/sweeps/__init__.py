"""Simulate many configurations, one row of a table each."""

from pipesim.sweeps.sweep import sweep

__all__ = ["sweep"]
