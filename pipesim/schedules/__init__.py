"""The named schedules, one file a family; importing this package registers them."""

from pipesim.schedules import (
    chimera,
    dualpipe,
    dualpipev,
    eager,
    gpipe,
    hanayo,
    interleaved,
    looped_bfs,
    naive,
    one_f_one_b,
    pipedream,
    zbv,
    zero_bubble,
)

__all__ = [
    "chimera",
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
]
