"""The named schedules, one file a family; importing this package registers them."""

from pipesim.schedules import gpipe, one_f_one_b

__all__ = ["gpipe", "one_f_one_b"]
