"""Processes of a pipeline: how they meet, exchange messages, and watch each other."""

from pipeexec.distributed.join import join
from pipeexec.distributed.processes import Processes

__all__ = ["Processes", "join"]
