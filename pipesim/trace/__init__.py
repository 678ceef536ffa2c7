"""Chrome traces: write timelines, and read profiler traces back as timelines."""

from pipesim.trace.chrome_export import (
    NEVER,
    Event,
    lanes,
    names,
    nanoseconds,
    save,
    slice_event,
    write,
)

__all__ = ["NEVER", "Event", "lanes", "names", "nanoseconds", "save", "slice_event", "write"]
