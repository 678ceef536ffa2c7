"""Timelines: when each task ran, the memory over time, and their CSV files."""

from pipesim.timeline.timeline import Timeline
from pipesim.utils.accessors import add_methods

__all__ = ["Timeline"]

add_methods(
    Timeline, memory="pipesim.timeline.memory:TimelineMemory", mfu="pipesim.timeline.rates:mfu"
)
