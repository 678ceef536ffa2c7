"""1F1B without a flush: PipeDream and PipeDream-2BW."""

from __future__ import annotations

from typing import Any

import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.errors import ArgumentError, ScheduleError
from pipesim.scheduling.registry import schedule_info

pytestmark = pytest.mark.usefixtures("each_engine")

NAMES = ["pipedream", "pipedream_2bw"]
SECONDS = st.integers(1, 1000)


@st.composite
def counts(draw: st.DrawFn, name: str) -> tuple[int, int]:
    """Numbers of devices and micro-batches that the schedule takes."""
    p = draw(st.integers(1, 6))
    return p, draw(st.integers(p if name == "pipedream_2bw" else 1, 16))


def run(name: str, p: int, m: int, **costs: float) -> ps.Timeline:
    """Simulate; by default, B is twice as long as F, and steps take no time."""
    seconds = {"forward": 1, "backward": 2, **costs}
    return ps.simulate(ps.lower(ps.schedule(name, p, m)), ps.Costs(**seconds))


def versions(name: str, p: int, m: int) -> list[float]:
    """Return how many versions of its weights each device holds."""
    held, one = (run(family, p, m, parameter_bytes=1).memory.peak for family in (name, "1f1b"))
    return [float(version) for version in held - one + 1]


def test_pipedream_steps_after_each_microbatch() -> None:
    """The order of 1F1B, and weights change after each B."""
    assert draw(run("pipedream", 3, 4, backward=1, optimizer_step=1), transfers=False) == grid(
        """
        0 | F0 F1 F2 .. .. B0 ST F3 B1 ST .. B2 ST .. B3 ST
        1 | .. F0 F1 .. B0 ST F2 B1 ST F3 B2 ST .. B3 ST ..
        2 | .. .. F0 B0 ST F1 B1 ST F2 B2 ST F3 B3 ST .. ..
        """
    )


def test_2bw_steps_after_each_minibatch() -> None:
    """Two mini-batches of two: the forwards of the second wait for no step."""
    assert draw(run("pipedream_2bw", 2, 4, backward=1, optimizer_step=1), transfers=False) == grid(
        """
        0 | F0 F1 .. B0 F2 B1 ST F3 B2 .. B3 ST
        1 | .. F0 B0 F1 B1 ST F2 B2 F3 B3 ST ..
        """
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), f=SECONDS, b=SECONDS)
def test_closed_forms_without_a_flush(name: str, data: st.DataObject, f: int, b: int) -> None:
    """Makespan, bubble, activations and versions of weights, with ``==``."""
    p, m = data.draw(counts(name))
    info = schedule_info(name)
    assert info.allows(p, m)
    ps.verify(ps.schedule(name, p, m))
    timeline = run(name, p, m, forward=f, backward=b, activation_bytes=1)
    assert timeline.makespan == (m + p - 1) * (f + b)
    assert timeline.bubble_fraction == info.bubble.value(p, m)
    assert timeline.memory.peak.tolist() == [min(p - i, m) for i in range(p)]
    assert info.activations.value(p, m) == min(p, m)
    assert max(versions(name, p, m)) == info.parameters.value(p, m)


@pytest.mark.slow
@given(p=st.integers(1, 6), more=st.integers(0, 6))
def test_pipedream_keeps_a_version_for_each_microbatch_in_flight(p: int, more: int) -> None:
    """Device i holds p - i, once so many have begun with weights of their own."""
    assert versions("pipedream", p, max(1, 2 * p - 2) + more) == [p - i for i in range(p)]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_without_a_flush_the_order_is_1f1b(name: str, data: st.DataObject) -> None:
    """Over all micro-batches, whichever mini-batch they are of."""
    p, m = data.draw(counts(name))
    assert ps.schedule(name, p, m).orders == ps.schedule("1f1b", p, m).orders


@pytest.mark.parametrize(
    ("p", "m", "n_batches"),
    [(4, 8, 2), (3, 9, 3), (4, 9, 1), (4, 7, 1), (1, 1, 1), (2, 25, 5), (1, 11, 1)],
)
def test_2bw_chooses_the_number_of_minibatches(p: int, m: int, n_batches: int) -> None:
    """The first of a few that deals micro-batches evenly, at least one a device; or one."""
    schedule = ps.schedule("pipedream_2bw", p, m)
    assert schedule.n_batches == n_batches
    assert schedule == ps.schedule("pipedream_2bw", p, m, n_batches=n_batches)
    assert ps.schedule("pipedream", p, m).n_batches == m


@given(p=st.integers(1, 4), n_batches=st.integers(1, 5), more=st.integers(0, 3))
def test_2bw_has_the_weights_that_forwards_need(p: int, n_batches: int, more: int) -> None:
    """Any mini-batches of at least as many micro-batches as there are devices can run."""
    ps.verify(ps.schedule("pipedream_2bw", p, n_batches * (p + more), n_batches=n_batches))


def test_2bw_of_smaller_minibatches_lacks_weights() -> None:
    """With two micro-batches each, those of mini-batch 2 begin before 0 has updated the weights."""
    schedule = ps.schedule("1f1b", 4, 6).with_updates(3, "double_buffered")
    with pytest.raises(ScheduleError, match=r"0F4 needs the weights that mini-batch 0 leaves"):
        ps.verify(schedule)


@pytest.mark.parametrize(
    ("p", "m", "n_batches", "message"),
    [
        (4, 8, 4, "takes equal mini-batches .*; got n_devices=4, n_microbatches=8, n_batches=4"),
        (4, 9, 2, "takes equal mini-batches .*; got n_devices=4, n_microbatches=9, n_batches=2"),
        (4, 3, None, "takes equal mini-batches .*; got n_devices=4, n_microbatches=3"),
        (2, 4, 0, "n_batches must be at least 1, got 0"),
        (2, 4, 2.0, r"n_batches must be a whole number, got 2\.0"),
        (2, 4, True, "n_batches must be a whole number, got True"),
        (2, 4, "two", "n_batches must be a whole number, got 'two'"),
    ],
)
def test_bad_minibatches(p: int, m: int, n_batches: Any, message: str) -> None:
    """Refused with what is allowed and what was got."""
    options = {} if n_batches is None else {"n_batches": n_batches}
    with pytest.raises(ArgumentError, match=message):
        ps.schedule("pipedream_2bw", p, m, **options)
