"""One clock for all devices of a process: events of different GPUs on one axis of time.

CUDA tells the time between two events of one GPU only. But a stream can wait for an event of
another GPU, so that two GPUs can pass messages that carry nothing but the time:

    A records a,   B waits for it and records b      b was read d1 >= 0 after a
    B records b',  A waits for it and records a'     a' was read d2 >= 0 after b'

Both readings differ by the offset of the clocks and by the delay. Delays are never negative, so the
fastest message of each way bounds the offset from one side. The middle is the estimate, and half of
what is left between the bounds is the most that it can be wrong, as long as the clocks do not
drift apart within the few hundred microseconds of the exchange and the step that follows it.

The exchange is queued at the beginning of each step and read after it: the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from pipeexec.devices.streams import Event, Stream

__all__ = ["Clocks", "Marked", "offset", "start"]

#: Messages each way. The first wake an idle GPU; a few more do, since only the fastest counts.
ROUNDS = 8


class Marked(Protocol):
    """What is needed of a device; see `pipeexec.devices.Device`."""

    torch_device: torch.device

    def mark(self) -> Event:
        """Return an event that passes now: the zero of this device's clock."""
        ...

    def stream(self, name: str) -> Stream:
        """Return the stream called ``name``."""
        ...


class Round(NamedTuple):
    """The events of a message from the first clock to another, and of one back."""

    sent: Event
    arrived: Event
    sent_back: Event
    back: Event


def offset(out: Sequence[float], back: Sequence[float]) -> tuple[float, float]:
    """Return what to add to B's readings to have A's, and the most that it can be wrong (s).

    Parameters
    ----------
    out
        B's reading at the arrival of a message from A, less A's at its departure (s).
    back
        A's reading at the arrival of a message from B, less B's at its departure (s).

    Examples
    --------
    B's clock reads 2 s less, and messages take 0.5 s and more:

    >>> offset(out=[-1.5, -1.2], back=[2.75, 2.5])
    (2.0, 0.5)
    """
    fastest, fastest_back = min(out), min(back)
    return (fastest_back - fastest) / 2, abs(fastest_back + fastest) / 2


class Clocks:
    """Tells when an event of any device passed, in seconds since the beginning of the step.

    Parameters
    ----------
    of
        The clock that each device counts by.
    zeros
        The event from which each clock counts.
    began
        The event of each clock at which the step may begin, after the rounds.
    rounds
        Messages between the first clock and each other one.
    """

    def __init__(
        self,
        of: Sequence[int],
        zeros: Sequence[Event],
        began: Sequence[Event],
        rounds: Sequence[Sequence[Round]],
    ) -> None:
        self._of, self._zeros, self._began, self._rounds = of, zeros, began, rounds

    @cached_property
    def _offsets(self) -> list[tuple[float, float]]:
        """The offset of each clock and its error."""
        found = [(0.0, 0.0)]
        first = self._zeros[0]
        for zero, rounds in zip(self._zeros[1:], self._rounds, strict=True):
            out = [r.arrived.seconds_since(zero) - r.sent.seconds_since(first) for r in rounds]
            back = [r.back.seconds_since(first) - r.sent_back.seconds_since(zero) for r in rounds]
            found.append(offset(out, back))
        return found

    @cached_property
    def _beginning(self) -> float:
        """The beginning of the step on the first clock: the earliest, so that no task is before."""
        if len(self._zeros) == 1:
            return 0.0
        return min(
            began.seconds_since(zero) + ahead
            for began, zero, (ahead, _) in zip(self._began, self._zeros, self._offsets, strict=True)
        )

    @property
    def error(self) -> float:
        """The most that times of two clocks can be wrong against each other (s); 0 of one clock.

        Each is aligned with the first one, so two of the others are off by both errors.
        """
        return sum(sorted(error for _, error in self._offsets)[-2:])

    def seconds(self, device: int, event: Event) -> float:
        """Return when an event of a device passed; it and the exchange must have."""
        clock = self._of[device]
        ahead, _ = self._offsets[clock]
        return event.seconds_since(self._zeros[clock]) + ahead - self._beginning


def start(devices: Sequence[Marked]) -> Clocks:
    """Queue the beginning of a step on every device; those of one GPU have one clock.

    With several clocks, all compute streams first exchange messages with the first device's.
    """
    marks = [device.mark() for device in devices]
    # The first device of each clock; dictionaries keep the order.
    heads: dict[torch.device, int] = {}
    for index, device in enumerate(devices):
        heads.setdefault(device.torch_device, index)
    numbers = {torch_device: number for number, torch_device in enumerate(heads)}
    streams = [devices[index].stream("compute") for index in heads.values()]
    rounds = [_exchange(streams[0], stream) for stream in streams[1:]]
    return Clocks(
        of=[numbers[device.torch_device] for device in devices],
        zeros=[marks[index] for index in heads.values()],
        began=[stream.record() for stream in streams] if rounds else [],
        rounds=rounds,
    )


def _exchange(first: Stream, second: Stream) -> list[Round]:
    """Queue messages to and fro."""
    rounds = []
    for _ in range(ROUNDS):
        sent = first.record()
        second.wait_event(sent)
        arrived = second.record()
        sent_back = second.record()
        first.wait_event(sent_back)
        rounds.append(Round(sent, arrived, sent_back, first.record()))
    return rounds
