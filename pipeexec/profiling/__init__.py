"""Measure costs: operations, links, collectives, and host time."""

from pipeexec.profiling.calibration import measure, profile
from pipeexec.profiling.profile import Profile

__all__ = ["Profile", "measure", "profile"]
