"""A list scheduler: what each device runs next, of what is ready and fits.

It keeps a clock, to see what is ready when. Those times stay here: what comes out is an order, and
when its actions run is for an engine to say.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipesim.list_scheduling.memory_admission import Admission
from pipesim.scheduling.placement import Placement

__all__ = ["BACKWARD", "FORWARD", "WEIGHT", "Choice", "Key", "Work", "list_orders"]

#: What an action of a stage and a micro-batch is: F; B or I; W.
FORWARD, BACKWARD, WEIGHT = range(3)

#: ``key(phase, stage, microbatch, ready)`` ranks an action that became ready at ``ready`` (s).
Key = Callable[[int, int, int, float], Any]


class Choice(NamedTuple):
    """An action: its rank, phase, stage and micro-batch, and its stage's copy."""

    key: Any
    phase: int
    stage: int
    microbatch: int
    copy: int


@dataclass(frozen=True)
class Work:
    """What is put in order, and what it takes.

    A *copy* of a stage is the stage on one path: number ``path * n_stages + stage``.

    Attributes
    ----------
    placement, n_microbatches
        What there is to do: F, B (or I and W) for each stage and micro-batch.
    seconds
        Of F; of B or I; and of W, where the backward is split. One a stage each.
    forward_delay, backward_delay
        Seconds from an end on a copy to the arrival of its message: at the next stage, at the
        previous one. One a copy; what leads out of the pipeline is not read.
    taken, kept
        Bytes that F takes, and those of them that are held from I to W; one a stage.
    limits
        Bytes that each device may hold.
    in_flight
        Most micro-batches between F and their B or I; one a stage.
    """

    placement: Placement
    n_microbatches: int
    seconds: Sequence[Sequence[float]]
    forward_delay: Sequence[float]
    backward_delay: Sequence[float]
    taken: Sequence[float]
    kept: Sequence[float]
    limits: Sequence[float]
    in_flight: Sequence[float]

    @property
    def is_split(self) -> bool:
        """Whether the backward is split into I and W."""
        return len(self.seconds) > WEIGHT


def list_orders(work: Work, key: Key, patience: float = 0.0) -> list[list[Choice]]:
    """Return what each device runs, in order.

    A free device starts the action of lowest key among those that are ready and fit. An F fits if
    `Admission` allows it, and if there are fewer than ``in_flight`` micro-batches. A W takes the
    rank of an F that needs its room, and is started at other times only if nothing that is known
    to come has to wait for more than ``1 - patience`` of it.

    No limit can make devices wait for each other: the oldest micro-batch that is not through
    always finds room, and a place in flight is kept for it (`_Run._in_flight_allows`).
    """
    run = _Run(work, key, patience)
    run.run()
    return [device.order for device in run.devices]


class _Device:
    """What one device has to run, and what it has run."""

    def __init__(self, copies: Sequence[int], admission: Admission) -> None:
        self.admission = admission
        self.free = 0.0
        self.order: list[Choice] = []
        #: Heaps of what is known to come, by the time it does; a heap a phase.
        self.coming: tuple[list[tuple[float, Choice]], ...] = ([], [], [])
        #: Heaps of what is ready: the F of each copy, the backwards, the W.
        self.forwards: dict[int, list[Choice]] = {copy: [] for copy in copies}
        self.backwards: list[Choice] = []
        self.weights: list[Choice] = []

    def receive(self, now: float) -> None:
        """Make ready what has come."""
        for coming in self.coming:
            while coming and coming[0][0] <= now:
                choice = heapq.heappop(coming)[1]
                heapq.heappush(self.ready(choice), choice)

    def ready(self, choice: Choice) -> list[Choice]:
        """Return the heap that a choice is in when it is ready."""
        if choice.phase == FORWARD:
            return self.forwards[choice.copy]
        return self.backwards if choice.phase == BACKWARD else self.weights


class _Run:
    """One pass over the work; `run` fills the devices' orders."""

    def __init__(self, work: Work, key: Key, patience: float) -> None:
        self.work, self.key, self.patience = work, key, patience
        placement = work.placement
        self.n_stages = placement.n_stages
        self.home = [device for path in placement.paths for device in path]
        self.path_of = [int(path) for path in placement.path_of(work.n_microbatches)]
        self.flying = [0] * len(self.home)
        self.started = [bytearray(work.n_microbatches) for _ in self.home]
        self.next_in_order = [
            self.path_of.index(path) if path in self.path_of else work.n_microbatches
            for path in range(placement.n_paths)
            for _ in range(self.n_stages)
        ]
        self.devices = [self._device(device) for device in range(placement.n_devices)]
        self.events: list[tuple[float, int]] = []

    def _device(self, device: int) -> _Device:
        paths = [
            [stage for stage, home in enumerate(path) if home == device]
            for path in self.work.placement.paths
        ]
        needed = [sum(self.work.taken[stage] for stage in stages) for stages in paths]
        admission = Admission(
            self.work.limits[device], needed, [len(stages) for stages in paths], self.path_of
        )
        return _Device([c for c, home in enumerate(self.home) if home == device], admission)

    def run(self) -> None:
        """Go from event to event: the moments at which a device is free, or something comes."""
        for microbatch in range(self.work.n_microbatches):
            self._announce(0.0, FORWARD, 0, microbatch)
        while self.events:
            now, number = heapq.heappop(self.events)
            device = self.devices[number]
            if device.free > now:
                continue
            device.receive(now)
            choice = self._choose(device, now)
            if choice is not None:
                heapq.heappush(self.events, (self._start(device, choice, now), number))

    def _announce(self, time: float, phase: int, stage: int, microbatch: int) -> None:
        """Note that an action will be ready at ``time``."""
        copy = self.path_of[microbatch] * self.n_stages + stage
        choice = Choice(self.key(phase, stage, microbatch, time), phase, stage, microbatch, copy)
        heapq.heappush(self.devices[self.home[copy]].coming[phase], (time, choice))
        heapq.heappush(self.events, (time, self.home[copy]))

    def _choose(self, device: _Device, now: float) -> Choice | None:
        """Return what a device starts now; None to wait for what comes."""
        best = device.backwards[0] if device.backwards else None
        wants_room = None
        for copy, heap in device.forwards.items():
            if not heap or not self.flying[copy] < self.work.in_flight[heap[0].stage]:
                continue
            taken = self.work.taken[heap[0].stage]
            if not device.admission.has_room(taken):
                if device.admission.could_have_room(taken):
                    wants_room = heap[0] if wants_room is None else min(wants_room, heap[0])
                continue
            choice = self._first_allowed(device, copy)
            if choice is not None and (best is None or choice.key < best.key):
                best = choice
        if not device.weights:
            return best
        weight = device.weights[0]
        if wants_room is not None and (best is None or wants_room.key < best.key):
            return weight
        if best is not None:
            return weight if weight.key < best.key else best
        return weight if self._may_start(device, weight, now) else None

    def _first_allowed(self, device: _Device, copy: int) -> Choice | None:
        """Return the F of lowest key that may start; there is room for each of them."""
        heap = device.forwards[copy]
        if self._allows(device, heap[0]):
            return heap[0]
        oldest = min(heap, key=lambda choice: choice.microbatch)
        if not self._allows(device, oldest):  # then no other one may
            return None
        return next(choice for choice in sorted(heap) if self._allows(device, choice))

    def _allows(self, device: _Device, choice: Choice) -> bool:
        taken = self.work.taken[choice.stage]
        return self._in_flight_allows(choice) and device.admission.is_safe(choice.microbatch, taken)

    def _in_flight_allows(self, choice: Choice) -> bool:
        """Keep the last place for the micro-batch that is next in order."""
        places = self.work.in_flight[choice.stage] - self.flying[choice.copy]
        return places >= 2 or choice.microbatch == self.next_in_order[choice.copy]

    def _may_start(self, device: _Device, weight: Choice, now: float) -> bool:
        """Whether W would not delay what comes by too much."""
        forwards, backwards, _ = device.coming
        soonest = backwards[0][0] if backwards else math.inf
        if forwards:
            of = forwards[0][1]
            room = device.admission.has_room(self.work.taken[of.stage])
            if room and self.flying[of.copy] < self.work.in_flight[of.stage]:
                soonest = min(soonest, forwards[0][0])
        return soonest - now >= self.patience * self.work.seconds[WEIGHT][weight.stage]

    def _start(self, device: _Device, choice: Choice, now: float) -> float:
        """Run an action, announce what it makes ready, and return its end."""
        heap = device.ready(choice)
        if heap[0] is choice:
            heapq.heappop(heap)
        else:
            heap.remove(choice)
            heapq.heapify(heap)
        device.order.append(choice)
        device.free = now + self.work.seconds[choice.phase][choice.stage]
        (self._forward, self._backward, self._weight)[choice.phase](device, choice)
        return device.free

    def _forward(self, device: _Device, choice: Choice) -> None:
        _, _, stage, microbatch, copy = choice
        device.admission.take(microbatch, self.work.taken[stage])
        self.flying[copy] += 1
        started = self.started[copy]
        started[microbatch] = True
        while self.next_in_order[copy] < len(started) and started[self.next_in_order[copy]]:
            self.next_in_order[copy] += 1
        if stage + 1 < self.n_stages:
            arrival = device.free + self.work.forward_delay[copy]
            self._announce(arrival, FORWARD, stage + 1, microbatch)
        else:
            self._announce(device.free, BACKWARD, stage, microbatch)

    def _backward(self, device: _Device, choice: Choice) -> None:
        _, _, stage, microbatch, copy = choice
        kept = self.work.kept[stage] if self.work.is_split else 0.0
        device.admission.give(microbatch, self.work.taken[stage], kept)
        self.flying[copy] -= 1
        if self.work.is_split:
            self._announce(device.free, WEIGHT, stage, microbatch)
        if stage > 0:
            arrival = device.free + self.work.backward_delay[copy]
            self._announce(arrival, BACKWARD, stage - 1, microbatch)

    def _weight(self, device: _Device, choice: Choice) -> None:
        device.admission.release(self.work.kept[choice.stage])
