"""Whether this thread runs a forward that will be recomputed, or recomputes one."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

from pipeexec.stages.restore import temporary_attribute

__all__ = ["checkpointing", "is_checkpointing", "is_recomputing", "recomputing"]


class _CheckpointState(threading.local):
    is_checkpointing = False
    is_recomputing = False


_STATE = _CheckpointState()


def is_checkpointing() -> bool:
    """Return whether the calling module runs a forward whose activations are not kept."""
    return _STATE.is_checkpointing


def is_recomputing() -> bool:
    """Return whether the calling module is run again for its backward.

    Modules use it for work that is done once a forward, such as counting.
    """
    return _STATE.is_recomputing


def checkpointing() -> AbstractContextManager[None]:
    """Return a context in which `is_checkpointing` is true in this thread."""
    return temporary_attribute(_STATE, "is_checkpointing", True)


def recomputing(again: bool = True) -> AbstractContextManager[None]:
    """Return a context in which `is_recomputing` is true in this thread; without ``again`` none."""
    return temporary_attribute(_STATE, "is_recomputing", True) if again else nullcontext()
