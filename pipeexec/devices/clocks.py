"""One clock for all devices of a process: events of different GPUs on one axis of time.

CUDA measures the time between two events of one GPU only. But a stream can wait for an event of
another GPU, so two GPUs can exchange empty messages and read their times:

    A records a,   B waits for it and records b      b was read d1 >= 0 after a
    B records b',  A waits for it and records a'     a' was read d2 >= 0 after b'

Both readings differ by the offset of the clocks and by the delay. Delays are never negative, so the
fastest message each way bounds the offset from one side. The estimate is the middle of the bounds.
Its error is at most half their distance, as long as the clocks do not drift apart within the few
hundred microseconds of the exchange and the step that follows it.

The exchange is queued at the beginning of each step and read after it; the host never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from pipeexec.devices.streams import CpuEvent, Event, Stream

#: Messages each way. The first wake an idle GPU; few are needed, since only the fastest counts.
ROUNDS = 8


class ClockedDevice(Protocol):
    """A device with a clock; see `pipeexec.devices.device.Device`."""

    torch_device: torch.device

    def mark(self) -> Event:
        """Return an event that is set now: the zero of this device's clock."""
        ...

    def stream(self, name: str) -> Stream:
        """Return the stream called ``name``."""
        ...


class RoundTrip(NamedTuple):
    """The events of a message from the first clock to another, and of one back."""

    departure: Event
    arrival: Event
    return_departure: Event
    return_arrival: Event


def estimate_offset(forth: Sequence[float], back: Sequence[float]) -> tuple[float, float]:
    """Return the offset to add to B's readings to get A's, and its largest error (s).

    Parameters
    ----------
    forth
        B's reading at the arrival of a message from A, less A's at its departure (s).
    back
        A's reading at the arrival of a message from B, less B's at its departure (s).

    Examples
    --------
    B's clock reads 2 s less, and messages take 0.5 s and more:

    >>> estimate_offset(forth=[-1.5, -1.2], back=[2.75, 2.5])
    (2.0, 0.5)
    """
    fastest, fastest_back = min(forth), min(back)
    return (fastest_back - fastest) / 2, abs(fastest_back + fastest) / 2


class Clocks:
    """Converts an event of any device to seconds since the beginning of the step.

    Each clock counts from its event in ``zeros``. ``starts`` has the event of each clock at which
    the step may begin, after the rounds of messages between the first clock and each other one.
    """

    def __init__(
        self,
        clock_of_device: Sequence[int],
        zeros: Sequence[Event],
        starts: Sequence[Event],
        rounds: Sequence[Sequence[RoundTrip]],
    ) -> None:
        self._clock_of_device, self._zeros = clock_of_device, zeros
        self._starts, self._rounds = starts, rounds

    @cached_property
    def _offsets(self) -> list[tuple[float, float]]:
        """The offset of each clock and its error."""
        offsets = [(0.0, 0.0)]
        first = self._zeros[0]
        for zero, rounds in zip(self._zeros[1:], self._rounds, strict=True):
            forth = [
                r.arrival.seconds_since(zero) - r.departure.seconds_since(first) for r in rounds
            ]
            back = [
                r.return_arrival.seconds_since(first) - r.return_departure.seconds_since(zero)
                for r in rounds
            ]
            offsets.append(estimate_offset(forth, back))
        return offsets

    @cached_property
    def _beginning(self) -> float:
        """The beginning of the step on the first clock: the earliest, so that no task is before."""
        if len(self._zeros) == 1:
            return 0.0
        return min(
            start.seconds_since(zero) + offset
            for start, zero, (offset, _) in zip(
                self._starts, self._zeros, self._offsets, strict=True
            )
        )

    @property
    def host_zero(self) -> float | None:
        """`time.perf_counter` at the zero of the first clock, if that is the host's; else None."""
        zero = self._zeros[0]
        return zero.time if isinstance(zero, CpuEvent) else None

    @property
    def error(self) -> float:
        """The largest error between times of two clocks (s); 0 for one clock.

        Each clock is aligned with the first, so the errors of two others add up.
        """
        return sum(sorted(error for _, error in self._offsets)[-2:])

    def seconds(self, device: int, event: Event) -> float:
        """Return when an event of a device was set (s); it and the exchange must be set."""
        clock = self._clock_of_device[device]
        offset, _ = self._offsets[clock]
        return event.seconds_since(self._zeros[clock]) + offset - self._beginning


def start(devices: Sequence[ClockedDevice]) -> Clocks:
    """Queue the beginning of a step on every device; devices of one GPU have one clock.

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
        clock_of_device=[numbers[device.torch_device] for device in devices],
        zeros=[marks[index] for index in heads.values()],
        starts=[stream.record() for stream in streams] if rounds else [],
        rounds=rounds,
    )


def _exchange(first: Stream, second: Stream) -> list[RoundTrip]:
    """Queue `ROUNDS` messages each way."""
    rounds = []
    for _ in range(ROUNDS):
        departure = first.record()
        second.wait_event(departure)
        arrival = second.record()
        return_departure = second.record()
        first.wait_event(return_departure)
        rounds.append(RoundTrip(departure, arrival, return_departure, first.record()))
    return rounds
