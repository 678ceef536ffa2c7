"""The clocks of several devices on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_pipelines import cut, data, dense, mse, pipeline

import pipesim as ps
from pipeexec.devices import clocks
from pipeexec.devices.streams import Event


class World:
    """True time, which no device knows; every piece of work takes some of it."""

    def __init__(self, delays: Sequence[float]) -> None:
        self.now = 0.0
        self._delays = iter(delays)

    def pass_by(self) -> None:
        self.now += next(self._delays, 1.0)


class FakeEvent:
    """Knows when it passed; can be compared with events of the same clock only."""

    def __init__(self, clock: float, time: float) -> None:
        self.clock, self.time = clock, time

    def seconds_since(self, base: Event) -> float:
        assert isinstance(base, FakeEvent)
        assert base.clock == self.clock, "events of two clocks"
        return self.time - base.time


class FakeStream:
    """Runs what it is given at once, in true time."""

    def __init__(self, world: World, clock: float) -> None:
        self.world, self.clock, self.ready = world, clock, 0.0

    def record(self) -> FakeEvent:
        self.world.pass_by()
        return FakeEvent(self.clock, max(self.world.now, self.ready))

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self.ready = max(self.ready, event.time)


class FakeDevice:
    """A GPU whose clock is its number; ``at`` of its events is true time."""

    def __init__(self, world: World, number: int) -> None:
        self.torch_device = torch.device("cuda", number)
        self.compute = FakeStream(world, float(number))

    def mark(self) -> FakeEvent:
        return self.compute.record()

    def stream(self, name: str) -> FakeStream:
        assert name == "compute"
        return self.compute


def test_the_middle_of_both_bounds() -> None:
    """B's clock is 2 behind; the fastest messages take 0.5 one way and 1.5 the other."""
    ahead, error = clocks.estimate_offset(forth=[-1.5, 7.0], back=[3.5, 4.0])
    assert ahead == 2.5
    assert error == 1.0


@given(
    st.floats(-10, 10),
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=9),
)
def test_the_error_bounds_the_offset(true: float, delays: list[tuple[float, float]]) -> None:
    """Whatever the delays, as long as none is negative."""
    ahead, error = clocks.estimate_offset(
        [d - true for d, _ in delays], [d + true for _, d in delays]
    )
    assert abs(ahead - true) <= error + 1e-9
    assert error <= min(d for d, _ in delays) + min(d for _, d in delays)


@given(st.lists(st.floats(1e-3, 1.0), max_size=200), st.integers(2, 4))
def test_events_of_several_devices_are_on_one_axis(delays: list[float], n: int) -> None:
    """Their distance is the true one, within the error that is reported."""
    world = World(delays)
    devices = [FakeDevice(world, number) for number in range(n)]
    joined = clocks.start(devices)
    events = [device.compute.record() for device in devices]
    seconds = [joined.seconds(number, event) for number, event in enumerate(events)]
    assert joined.error > 0
    for a in range(n):
        assert seconds[a] >= 0
        for b in range(n):
            true = events[b].time - events[a].time
            assert abs(seconds[b] - seconds[a] - true) <= joined.error + 1e-9


def test_the_exchange_is_not_part_of_the_step() -> None:
    """Time zero is after it."""
    world = World([])
    devices = [FakeDevice(world, 0), FakeDevice(world, 1)]
    joined = clocks.start(devices)
    assert joined.seconds(0, devices[0].compute.record()) < 5.0  # of some 30 s since the marks


def test_devices_of_one_gpu_have_one_clock() -> None:
    """Nothing is exchanged, and nothing is uncertain."""
    world = World([])
    devices = [FakeDevice(world, 0) for _ in range(3)]
    joined = clocks.start(devices)
    assert world.now == 3.0  # a mark each
    assert joined.error == 0.0
    assert joined.seconds(2, FakeEvent(0.0, 4.0)) == 3.0  # since the first mark, at 1


def test_a_step_on_cpu_has_no_clock_error() -> None:
    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4))
    with pipeline(cut(dense(2), [1, 1]), graph, mse) as subject:
        assert subject.step(*data(8)).clock_error == 0.0


def test_events_are_exchanged_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many messages as there are rounds, each way."""
    monkeypatch.setattr(clocks, "ROUNDS", 2)
    world = World([])
    clocks.start([FakeDevice(world, 0), FakeDevice(world, 1)])
    assert world.now == 2 + 2 * 4 + 2  # marks, four events a round, beginnings
