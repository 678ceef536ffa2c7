"""Join the processes of a pipeline, exchange messages between them, and detect failures."""

from pipeexec.distributed.join import join
from pipeexec.distributed.processes import Processes

__all__ = ["Processes", "join"]
