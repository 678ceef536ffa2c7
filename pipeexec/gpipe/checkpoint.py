"""Whether this thread runs a forward that will be recomputed, or recomputes one."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from pipeexec.stages.recompute import NO_CONTEXT
from pipeexec.stages.restore import TemporaryAttribute


class _CheckpointState(threading.local):
    is_checkpointing = False
    is_recomputing = False


_STATE = _CheckpointState()


def is_checkpointing() -> bool:
    """Return whether the calling module runs a forward whose activations are not kept.

    ``checkpoint`` of a `pipeexec.GPipe` chooses the micro-batches of such forwards.

    Returns
    -------
    bool
        True in such a forward of a `pipeexec.GPipe` in this thread, else False.

    Examples
    --------
    The first of two micro-batches is recomputed, in a third call:

    >>> import torch
    >>> import pipeexec as px
    >>> class Layer(torch.nn.Linear):
    ...     def forward(self, x):
    ...         calls.append(px.is_checkpointing())
    ...         return super().forward(x)
    >>> calls, layers = [], torch.nn.Sequential(Layer(4, 4))
    >>> model = px.GPipe(layers, [1], devices=["cpu"], chunks=2, checkpoint="except_last")
    >>> model(torch.ones(8, 4)).sum().backward()
    >>> calls
    [True, False, False]
    """
    return _STATE.is_checkpointing


def is_recomputing() -> bool:
    """Return whether the calling module is run again for its backward.

    Modules use it for work that is done once a forward, such as counting.

    Returns
    -------
    bool
        True in the second forward of a micro-batch in this thread, else False.
    """
    return _STATE.is_recomputing


def checkpointing() -> AbstractContextManager[None]:
    """Return a context in which `is_checkpointing` is true in this thread."""
    return TemporaryAttribute(_STATE, "is_checkpointing", True)


def recomputing(again: bool = True) -> AbstractContextManager[None]:
    """Return a context in which `is_recomputing` is true in this thread; without ``again`` none."""
    return TemporaryAttribute(_STATE, "is_recomputing", True) if again else NO_CONTEXT
