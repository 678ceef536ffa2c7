"""Chrome traces of timelines, and files of other programs: traces, reports, tables and logs."""

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
from pipesim.trace.foreign_files import nsys_to_chrome, read_primus, read_timers
from pipesim.trace.run_files import load

__all__ = [
    "NEVER",
    "Event",
    "lanes",
    "load",
    "names",
    "nanoseconds",
    "nsys_to_chrome",
    "read_primus",
    "read_timers",
    "save",
    "slice_event",
    "write",
]
