"""Measure costs: operations, links, collectives, and host time."""

from pipeexec.profiling.profile import Profile, measure, profile

__all__ = ["Profile", "measure", "profile"]
