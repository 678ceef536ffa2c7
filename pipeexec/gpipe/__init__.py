"""`GPipe`: a drop-in for torchgpipe, on the executor of its own forward and backward."""

from pipeexec.gpipe.checkpoint import is_checkpointing, is_recomputing
from pipeexec.gpipe.gpipe import GPipe

__all__ = ["GPipe", "is_checkpointing", "is_recomputing"]
