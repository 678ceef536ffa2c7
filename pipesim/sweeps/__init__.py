"""Simulate many configurations; each is one row of a table."""

from pipesim.sweeps.sweep import sweep

__all__ = ["sweep"]
