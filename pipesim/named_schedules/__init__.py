"""Named schedules, one file a family; importing the package registers them in this order."""

# ruff: noqa: I001 - the order in which `schedules()` lists them: the simplest first
from pipesim.named_schedules import naive
from pipesim.named_schedules import gpipe
from pipesim.named_schedules import one_f_one_b
from pipesim.named_schedules import pipedream
from pipesim.named_schedules import sequence_slices
from pipesim.named_schedules import interleaved
from pipesim.named_schedules import zero_bubble
from pipesim.named_schedules import zero_bubble_auto
from pipesim.named_schedules import zbv
from pipesim.named_schedules import controllable_memory
from pipesim.named_schedules import dualpipe
from pipesim.named_schedules import chimera
from pipesim.named_schedules import hanayo
from pipesim.named_schedules import encoders

__all__ = [
    "chimera",
    "controllable_memory",
    "dualpipe",
    "encoders",
    "gpipe",
    "hanayo",
    "interleaved",
    "naive",
    "one_f_one_b",
    "pipedream",
    "sequence_slices",
    "zbv",
    "zero_bubble",
    "zero_bubble_auto",
]
