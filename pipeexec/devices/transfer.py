"""Messages between devices of one process."""

from __future__ import annotations

from pipeexec.devices.device import Device, Values
from pipeexec.devices.streams import Stream


def send(
    values: Values, source: Device, stream: Stream, target: Device, receiver: Stream | None = None
) -> Values:
    """Return ``values`` in the target's memory: the same tensors if it is the same memory.

    A copy is queued on ``stream``, the stream of the source that runs this. It may still run when
    nothing else holds ``values``. A copy between GPUs waits for the current stream of the target
    too, and this one for the copy: ``receiver``, if given, else the caller's.
    """
    for value in values:
        if value is not None:
            source.adopt(value, stream)
    if receiver is None:
        return source.carry(values, target)
    with receiver.beside_current():
        return source.carry(values, target)


def receive(values: Values, target: Device, consumer: Stream) -> Values:
    """Make ``values`` of another stream safe to use on the stream ``consumer``."""
    target.await_link(values)
    for value in values:
        if value is not None:
            target.adopt(value, consumer)
    return values


def nbytes(values: Values) -> int:
    """Return the bytes of a message."""
    return sum(value.nbytes for value in values if value is not None)
