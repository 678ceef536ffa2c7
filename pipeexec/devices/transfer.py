"""Messages between devices of one process."""

from __future__ import annotations

from pipeexec.devices.device import Device, Values
from pipeexec.devices.streams import Stream

__all__ = ["nbytes", "receive", "send"]


def send(values: Values, source: Device, stream: Stream, target: Device) -> Values:
    """Return ``values`` on the target's memory: the same tensors where that is the same memory.

    A copy is queued on ``stream``, the one of the source that runs this; it may be under way when
    nothing else holds ``values`` any longer.
    """
    for value in values:
        if value is not None:
            source.adopt(value, stream)
    return source.carry(values, target)


def receive(values: Values, target: Device, consumer: Stream) -> Values:
    """Make ``values``, which another stream made, safe to use on the stream ``consumer``."""
    target.await_link(values)
    for value in values:
        if value is not None:
            target.adopt(value, consumer)
    return values


def nbytes(values: Values) -> int:
    """Return the bytes of a message."""
    return sum(value.nbytes for value in values if value is not None)
