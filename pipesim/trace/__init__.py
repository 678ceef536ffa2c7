"""Chrome traces: write timelines as traces, and read the traces of profilers as timelines."""

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
from pipesim.trace.nsys import nsys_to_chrome
from pipesim.trace.primus import read_primus
from pipesim.trace.saved_timelines import load

__all__ = [
    "NEVER",
    "Event",
    "lanes",
    "load",
    "names",
    "nanoseconds",
    "nsys_to_chrome",
    "read_primus",
    "save",
    "slice_event",
    "write",
]
