"""A list scheduler: each free device starts the first of the actions that are ready and fit.

The scheduler keeps a clock, to know when actions are ready. It returns orders without times:
engines compute when actions run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipesim.list_scheduling.memory_admission import Admission
from pipesim.list_scheduling.problem import BACKWARD, FORWARD, WEIGHT, Problem

__all__ = ["Choice", "PriorityKey", "list_orders"]

#: ``key(phase, stage, microbatch, ready)`` ranks an action that became ready at ``ready`` (s).
PriorityKey = Callable[[int, int, int, float], Any]


class Choice(NamedTuple):
    """An action, as a device may choose it; ``copy`` is the copy of its stage (`Problem`)."""

    key: Any
    phase: int
    stage: int
    microbatch: int
    copy: int


def list_orders(problem: Problem, key: PriorityKey, patience: float = 0.0) -> list[list[Choice]]:
    """Return the order of each device.

    A free device starts the action of lowest key among those that are ready and fit.

    - An F fits if `Admission` allows its bytes, and if fewer than ``in_flight`` micro-batches are
      in flight on its stage.
    - A W takes the rank of an F that needs its room. Otherwise it starts only if no F or I that is
      known to come has to wait for more than ``1 - patience`` of its seconds.

    No limit can make devices wait for each other forever: the oldest micro-batch that has not
    passed the whole pipeline always finds room, and a place in flight is reserved for it
    (`_ListScheduler._in_flight_allows`).
    """
    scheduler = _ListScheduler(problem, key, patience)
    scheduler.run()
    return [device.order for device in scheduler.devices]


class _DeviceState:
    """One device: its future and ready actions, and its order so far."""

    def __init__(self, copies: Sequence[int], admission: Admission) -> None:
        self.admission = admission
        self.free = 0.0
        self.order: list[Choice] = []
        #: Heaps of actions that are known to become ready, by the time (s); one heap a phase.
        self.future: tuple[list[tuple[float, Choice]], ...] = ([], [], [])
        #: Heaps of ready actions: the F of each copy, the B or I, the W.
        self.forwards: dict[int, list[Choice]] = {copy: [] for copy in copies}
        self.backwards: list[Choice] = []
        self.weights: list[Choice] = []

    def make_ready(self, now: float) -> None:
        """Move the actions whose time has come to the heaps of ready actions."""
        for heap in self.future:
            while heap and heap[0][0] <= now:
                choice = heapq.heappop(heap)[1]
                heapq.heappush(self.ready_heap(choice), choice)

    def ready_heap(self, choice: Choice) -> list[Choice]:
        """Return the heap that holds an action while it is ready."""
        if choice.phase == FORWARD:
            return self.forwards[choice.copy]
        return self.backwards if choice.phase == BACKWARD else self.weights


class _ListScheduler:
    """One simulation of all actions; `run` fills the devices' orders."""

    def __init__(self, problem: Problem, key: PriorityKey, patience: float) -> None:
        self.problem, self.key, self.patience = problem, key, patience
        placement = problem.placement
        self.n_stages = placement.n_stages
        self.home = [device for path in placement.paths for device in path]
        self.path_of = [int(path) for path in placement.path_of(problem.n_microbatches)]
        self.n_in_flight = [0] * len(self.home)
        self.started = [bytearray(problem.n_microbatches) for _ in self.home]
        self.next_in_order = [
            self.path_of.index(path) if path in self.path_of else problem.n_microbatches
            for path in range(placement.n_paths)
            for _ in range(self.n_stages)
        ]
        self.devices = [self._device(device) for device in range(placement.n_devices)]
        self.events: list[tuple[float, int]] = []

    def _device(self, device: int) -> _DeviceState:
        paths = [
            [stage for stage, home in enumerate(path) if home == device]
            for path in self.problem.placement.paths
        ]
        needed = [sum(self.problem.f_bytes[stage] for stage in stages) for stages in paths]
        admission = Admission(
            self.problem.limits[device], needed, [len(stages) for stages in paths], self.path_of
        )
        return _DeviceState([c for c, home in enumerate(self.home) if home == device], admission)

    def run(self) -> None:
        """Process events in order of time: a device is free, or an action becomes ready."""
        for microbatch in range(self.problem.n_microbatches):
            self._add_future(0.0, FORWARD, 0, microbatch)
        while self.events:
            now, number = heapq.heappop(self.events)
            device = self.devices[number]
            if device.free > now:
                continue
            device.make_ready(now)
            choice = self._choose(device, now)
            if choice is not None:
                heapq.heappush(self.events, (self._start(device, choice, now), number))

    def _add_future(self, time: float, phase: int, stage: int, microbatch: int) -> None:
        """Add an action that will be ready at ``time`` (s)."""
        copy = self.path_of[microbatch] * self.n_stages + stage
        choice = Choice(self.key(phase, stage, microbatch, time), phase, stage, microbatch, copy)
        heapq.heappush(self.devices[self.home[copy]].future[phase], (time, choice))
        heapq.heappush(self.events, (time, self.home[copy]))

    def _choose(self, device: _DeviceState, now: float) -> Choice | None:
        """Return the action that a device starts now; None: wait for the next event."""
        best = device.backwards[0] if device.backwards else None
        blocked = None  # the first F that waits for the room of a W
        for copy, heap in device.forwards.items():
            if not heap or not self.n_in_flight[copy] < self.problem.in_flight[heap[0].stage]:
                continue
            nbytes = self.problem.f_bytes[heap[0].stage]
            if not device.admission.has_room(nbytes):
                if device.admission.could_have_room(nbytes):
                    blocked = heap[0] if blocked is None else min(blocked, heap[0])
                continue
            choice = self._first_allowed(device, copy)
            if choice is not None and (best is None or choice.key < best.key):
                best = choice
        if not device.weights:
            return best
        weight = device.weights[0]
        if blocked is not None and (best is None or blocked.key < best.key):
            return weight
        if best is not None:
            return weight if weight.key < best.key else best
        return weight if self._weight_may_start(device, weight, now) else None

    def _first_allowed(self, device: _DeviceState, copy: int) -> Choice | None:
        """Return the F of lowest key that may start; there is room for each of them."""
        heap = device.forwards[copy]
        if self._allows(device, heap[0]):
            return heap[0]
        oldest = min(heap, key=lambda choice: choice.microbatch)
        if not self._allows(device, oldest):  # then no other one is allowed either
            return None
        return next(choice for choice in sorted(heap) if self._allows(device, choice))

    def _allows(self, device: _DeviceState, choice: Choice) -> bool:
        nbytes = self.problem.f_bytes[choice.stage]
        return self._in_flight_allows(choice) and device.admission.is_safe(
            choice.microbatch, nbytes
        )

    def _in_flight_allows(self, choice: Choice) -> bool:
        """Reserve the last place in flight for the micro-batch that is next in order."""
        places = self.problem.in_flight[choice.stage] - self.n_in_flight[choice.copy]
        return places >= 2 or choice.microbatch == self.next_in_order[choice.copy]

    def _weight_may_start(self, device: _DeviceState, weight: Choice, now: float) -> bool:
        """Return whether W would not delay the next F or backward too much."""
        forwards, backwards, _ = device.future
        soonest = backwards[0][0] if backwards else math.inf
        if forwards:
            ready, forward = forwards[0]
            room = device.admission.has_room(self.problem.f_bytes[forward.stage])
            if room and self.n_in_flight[forward.copy] < self.problem.in_flight[forward.stage]:
                soonest = min(soonest, ready)
        return soonest - now >= self.patience * self.problem.seconds[WEIGHT][weight.stage]

    def _start(self, device: _DeviceState, choice: Choice, now: float) -> float:
        """Run an action, add the actions that it makes ready, and return its end (s)."""
        heap = device.ready_heap(choice)
        if heap[0] is choice:
            heapq.heappop(heap)
        else:
            heap.remove(choice)
            heapq.heapify(heap)
        device.order.append(choice)
        device.free = now + self.problem.seconds[choice.phase][choice.stage]
        (self._forward, self._backward, self._weight)[choice.phase](device, choice)
        return device.free

    def _forward(self, device: _DeviceState, choice: Choice) -> None:
        _, _, stage, microbatch, copy = choice
        device.admission.count_forward(microbatch, self.problem.f_bytes[stage])
        self.n_in_flight[copy] += 1
        started = self.started[copy]
        started[microbatch] = True
        while self.next_in_order[copy] < len(started) and started[self.next_in_order[copy]]:
            self.next_in_order[copy] += 1
        if stage + 1 < self.n_stages:
            arrival = device.free + self.problem.forward_delay[copy]
            self._add_future(arrival, FORWARD, stage + 1, microbatch)
        else:
            self._add_future(device.free, BACKWARD, stage, microbatch)

    def _backward(self, device: _DeviceState, choice: Choice) -> None:
        _, _, stage, microbatch, copy = choice
        w_bytes = self.problem.w_bytes[stage] if self.problem.is_split else 0.0
        device.admission.count_backward(microbatch, self.problem.f_bytes[stage], w_bytes)
        self.n_in_flight[copy] -= 1
        if self.problem.is_split:
            self._add_future(device.free, WEIGHT, stage, microbatch)
        if stage > 0:
            arrival = device.free + self.problem.backward_delay[copy]
            self._add_future(arrival, BACKWARD, stage - 1, microbatch)

    def _weight(self, device: _DeviceState, choice: Choice) -> None:
        device.admission.count_weight(self.problem.w_bytes[choice.stage])
