"""`GPipe`: a drop-in replacement for torchgpipe, on the streams of pipeexec."""

from pipeexec.gpipe.checkpoint import is_checkpointing, is_recomputing
from pipeexec.gpipe.gpipe import GPipe

__all__ = ["GPipe", "is_checkpointing", "is_recomputing"]
