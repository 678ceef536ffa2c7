"""Chrome traces of timelines, and files of other programs: traces, reports, tables and logs."""

from pipesim.timeline.timeline import Timeline
from pipesim.trace import chakra, hta
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
from pipesim.utils.accessors import add_constructors, add_methods

__all__ = [
    "NEVER",
    "Event",
    "chakra",
    "hta",
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

add_methods(Timeline, to_chrome="pipesim.trace.chrome_export:timeline_to_chrome")
add_constructors(
    Timeline,
    from_chrome="pipesim.trace.chrome_import:timeline_from_chrome",
    from_table="pipesim.trace.measured_table:timeline_from_table",
)
