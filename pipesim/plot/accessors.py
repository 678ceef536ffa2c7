"""`TimelinePlot`: `Timeline.plot`, the figures of one timeline."""

from __future__ import annotations

from pipesim.plot.charts import idle, memory
from pipesim.plot.timelines import timeline
from pipesim.timeline.timeline import Timeline
from pipesim.utils.accessors import OwnerMethod, Subject


class TimelinePlot(Subject[Timeline]):
    """Figures of a timeline, ``timeline.plot``; called, when each task ran, a row a device.

    `pipesim.plot` has the same functions, and those of several timelines.
    """

    __call__ = OwnerMethod(timeline)
    idle = OwnerMethod(idle)
    memory = OwnerMethod(memory)
