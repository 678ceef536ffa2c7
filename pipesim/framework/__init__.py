"""What training frameworks do between a model and a machine, with sources."""

from pipesim.framework.framework import Framework, frameworks

__all__ = ["Framework", "frameworks"]
