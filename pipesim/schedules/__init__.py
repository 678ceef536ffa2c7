"""The named schedules, one file a family; importing this package registers them, in this order."""

# ruff: noqa: I001 - the order in which the schedules are listed: from the simplest on
from pipesim.schedules import naive
from pipesim.schedules import gpipe
from pipesim.schedules import one_f_one_b
from pipesim.schedules import eager
from pipesim.schedules import pipedream
from pipesim.schedules import interleaved
from pipesim.schedules import looped_bfs
from pipesim.schedules import zero_bubble
from pipesim.schedules import zero_bubble_auto
from pipesim.schedules import zbv
from pipesim.schedules import controllable_memory
from pipesim.schedules import dualpipe
from pipesim.schedules import dualpipev
from pipesim.schedules import chimera
from pipesim.schedules import hanayo

__all__ = [
    "chimera",
    "controllable_memory",
    "dualpipe",
    "dualpipev",
    "eager",
    "gpipe",
    "hanayo",
    "interleaved",
    "looped_bfs",
    "naive",
    "one_f_one_b",
    "pipedream",
    "zbv",
    "zero_bubble",
    "zero_bubble_auto",
]
