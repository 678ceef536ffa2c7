"""Timelines: when each task ran, the memory over time, and their CSV files."""

from pipesim.timeline.timeline import Timeline

__all__ = ["Timeline"]
