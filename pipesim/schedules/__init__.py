"""The named schedules, one file a family; importing this package registers them."""

from pipesim.schedules import chimera, dualpipe, gpipe, one_f_one_b, pipedream

__all__ = ["chimera", "dualpipe", "gpipe", "one_f_one_b", "pipedream"]
