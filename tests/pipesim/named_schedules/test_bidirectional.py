"""Schedules of two directions, Chimera and DualPipe: orders, closed forms, published makespans."""

from __future__ import annotations

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.ops import Op, Overlapped
from pipesim.scheduling.registry import schedule_info

pytestmark = pytest.mark.usefixtures("each_engine")

NAMES = ["chimera", "dualpipe"]
EVEN = st.integers(1, 3).map(lambda k: 2 * k)
SECONDS = st.integers(1, 1000)


@st.composite
def counts(draw: st.DrawFn, name: str) -> tuple[int, int]:
    """Numbers of devices and micro-batches that the schedule takes."""
    p = draw(EVEN)
    least = 2 if name == "chimera" else 2 * p
    return p, least + 2 * draw(st.integers(0, 5))


def run(name: str, p: int, m: int, **costs: float) -> ps.Timeline:
    """Simulate without optimizer steps; by default, B is twice as long as F, I and W."""
    seconds = {"forward": 1, "backward": 2, "input_grad": 1, "weight_grad": 1, **costs}
    return ps.simulate(ps.lower(ps.schedule(name, p, m), step="none"), ps.Costs(**seconds))


def test_chimera_merges_two_pipelines() -> None:
    """Micro-batches 0 and 1 go down, 2 and 3 up; no two want a device at once."""
    assert draw(run("chimera", 4, 4, backward=1), transfers=False) == grid(
        """
        0 | F0 F1 .. F2 B2 F3 B3 B0 .. B1
        1 | .. F0 F2 F1 F3 B2 B0 B3 B1 ..
        2 | .. F2 F0 F3 F1 B0 B2 B1 B3 ..
        3 | F2 F3 .. F0 B0 F1 B1 B2 .. B3
        """
    )


def test_chimera_units_follow_each_other_directly() -> None:
    """The second unit's first forwards stand in bubbles of the first."""
    assert draw(run("chimera", 4, 8, backward=1), transfers=False) == grid(
        """
        0 | F0 F1 .. F4 B4 F5 B5 B0 F2 B1 F3 F6 B6 F7 B7 B2 .. B3
        1 | .. F0 F4 F1 F5 B4 B0 B5 B1 F2 F6 F3 F7 B6 B2 B7 B3 ..
        2 | .. F4 F0 F5 F1 B0 B4 B1 B5 F6 F2 F7 F3 B2 B6 B3 B7 ..
        3 | F4 F5 .. F0 B0 F1 B1 B4 F6 B5 F7 F2 B2 F3 B3 B6 .. B7
        """
    )


def test_chimera_with_fewer_microbatches_than_devices() -> None:
    """One a direction: each crosses the devices and comes back."""
    assert draw(run("chimera", 4, 2, backward=1), transfers=False) == grid(
        """
        0 | F0 .. .. F1 B1 .. .. B0
        1 | .. F0 F1 .. .. B1 B0 ..
        2 | .. F1 F0 .. .. B0 B1 ..
        3 | F1 .. .. F0 B0 .. .. B1
        """
    )


@pytest.mark.slow
@given(p=EVEN, units=st.integers(1, 3), f=SECONDS, extra=st.integers(0, 1000))
def test_chimera_makespan_of_whole_units(p: int, units: int, f: int, extra: int) -> None:
    """Exact for B no shorter than F, and the paper's bubble for B as long as F."""
    m, b = units * p, f + extra
    makespan = run("chimera", p, m, forward=f, backward=b).makespan
    assert makespan == m * (f + b) + (p - 2) * (units * b - (units - 1) * f)
    assert run("chimera", p, m, backward=1).bubble_fraction == (p - 2) / (2 * m + p - 2)


@pytest.mark.slow
@given(p=EVEN, data=st.data(), f=SECONDS, b=SECONDS)
def test_chimera_makespan_of_one_unit(p: int, data: st.DataObject, f: int, b: int) -> None:
    """Exact, full or not: p of the shorter and m + p - 2 of the longer."""
    m = 2 * data.draw(st.integers(1, p // 2))
    makespan = run("chimera", p, m, forward=f, backward=b).makespan
    assert makespan == p * min(f, b) + (m + p - 2) * max(f, b)


@pytest.mark.slow
@given(p=EVEN, m=st.integers(1, 8).map(lambda k: 2 * k))
def test_chimera_activations(p: int, m: int) -> None:
    """From p/2 + 1 at the ends to p in the middle, once there are p micro-batches."""
    peaks = run("chimera", p, m, activation_bytes=1).memory.peak
    assert peaks.max() == min(p, m)
    assert m < p or peaks.min() == p // 2 + 1


def test_dualpipe_order() -> None:
    """Written out for two devices: all but the first pair overlapped, the last W deferred."""
    rows = (
        "0F0 1F3 0F1 1B3 (1F4;0B0) (0F2;1B4) (1F5;0B1) 1B5 0I2 0W2",
        "0F3 1F0 0F4 1B0 (1F1;0B3) (0F5;1B1) (1F2;0B4) 1B2 0I5 0W5",
    )
    orders = [row.replace(")", ")OVERLAP_F_B").split() for row in rows]
    assert ps.schedule("dualpipe", 2, 6) == ps.Schedule.from_orders(
        orders, placement=ps.Placement.bidirectional(2)
    )


def test_dualpipe_runs_its_eight_steps() -> None:
    """Four devices, eight micro-batches, B of two seconds: the makespan is 26, of which 2 idle."""
    assert draw(run("dualpipe", 4, 8), transfers=False) == grid(
        """
        0 | F0 F1 F2 F4 I4 W4 F5 F3 B5 B5 .. F6 B0 B0 B6 B6 .. F7 B1 B1 B7 B7 I2 W2 I3 W3
        1 | .. F0 F4 F1 F5 F2 B4 B4 F6 B0 B0 F3 B5 B5 F7 B1 B1 B6 B6 B2 B2 .. I7 I3 W7 W3
        2 | .. F4 F0 F5 F1 F6 B0 B0 F2 B4 B4 F7 B1 B1 F3 B5 B5 B2 B2 B6 B6 .. I3 I7 W3 W7
        3 | F4 F5 F6 F0 I0 W0 F1 F7 B1 B1 .. F2 B4 B4 B2 B2 .. F3 B5 B5 B3 B3 I6 W6 I7 W7
        """
    )


@pytest.mark.parametrize(
    ("p", "m", "makespan", "busy", "idle"), [(8, 20, 66, 60, 6), (4, 10, 32, 30, 2)]
)
def test_published_dualpipe_makespans(p: int, m: int, makespan: int, busy: int, idle: int) -> None:
    """The columns of the figure in deepseek-ai/DualPipe's README, and a smaller case."""
    timeline = run("dualpipe", p, m, overlapped=3)
    assert timeline.makespan == makespan
    assert timeline.busy.tolist() == [busy] * p
    assert timeline.idle.tolist() == [idle] * p


@pytest.mark.slow
@given(size=counts("dualpipe"), f=SECONDS, data=st.data())
def test_dualpipe_makespan(size: tuple[int, int], f: int, data: st.DataObject) -> None:
    """The published bubble (p/2 - 1)(F&B + B - 3W) is that of the devices in the middle.

    Where I is as long as F, W no longer, and F&B no shorter than B.
    """
    p, m = size
    w = data.draw(st.integers(1, f))
    b = f + w
    both = data.draw(st.integers(b, f + b + 100))
    seconds = {"forward": f, "input_grad": f, "weight_grad": w, "backward": b}
    timeline = run("dualpipe", p, m, overlapped=both, **seconds)
    idle = (p // 2 - 1) * (both + b - 3 * w)
    assert timeline.idle[p // 2 - 1 : p // 2 + 1] == pytest.approx([idle] * 2, abs=1e-6)
    work = m * (f + b) - (m - p - 1) * (f + b - both)
    assert timeline.makespan == pytest.approx(work + idle, rel=1e-12)


@given(counts("dualpipe"))
def test_dualpipe_overlaps_and_splits(size: tuple[int, int]) -> None:
    """What the eight steps add up to, on the device k away from the nearer end."""
    p, m = size
    schedule = ps.schedule("dualpipe", p, m)
    for device, order in enumerate(schedule.orders):
        k = min(device, p - 1 - device)
        pairs = [action for action in order if isinstance(action, Overlapped)]
        assert len(pairs) == m - 3 * p // 2 + 1 + k - (k == p // 2 - 1)
        assert all(pair.forward.stage + pair.backward.stage == p - 1 for pair in pairs)
        split = (schedule.op == Op.W) & (schedule.device == device)
        assert split.sum() == p - 1 - k


@pytest.mark.slow
@given(counts("dualpipe"))
def test_dualpipe_activations(size: tuple[int, int]) -> None:
    """Of p + 1 micro-batches, on every device."""
    p, m = size
    assert run("dualpipe", p, m, activation_bytes=1).memory.peak.tolist() == [p + 1] * p


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_directions_mirror_each_other(name: str, data: st.DataObject) -> None:
    """What a device does in one direction, the one opposite to it does in the other."""
    p, m = data.draw(counts(name))
    schedule = ps.schedule(name, p, m)
    for device in range(p):
        down, up = (
            np.stack([schedule.op, schedule.stage, schedule.microbatch])[:, schedule.device == d]
            for d in (device, p - 1 - device)
        )
        up[2] = (up[2] + m // 2) % m
        assert np.array_equal(down, up)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_closed_forms_of_two_directions(name: str, data: st.DataObject) -> None:
    """Bubble and activations of the registry, for all counts that it allows, with ``==``."""
    p, m = data.draw(counts(name))
    info = schedule_info(name)
    assert info.allows(p, m)
    ps.verify(ps.schedule(name, p, m))
    timeline = run(name, p, m, overlapped=3, activation_bytes=1)
    assert timeline.bubble_fraction == info.bubble.value(p, m)
    assert timeline.memory.peak.max() == info.activations.value(p, m)


@pytest.mark.parametrize("name", NAMES)
def test_devices_hold_two_sets_of_weights(name: str) -> None:
    """One copy for each direction, with separate gradients."""
    both, one = (run(family, 4, 8, parameter_bytes=1).memory.peak for family in (name, "1f1b"))
    assert both.tolist() == (schedule_info(name).parameters.value(4, 8) * one).tolist()


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [
        ("chimera", 3, 4),
        ("chimera", 1, 2),
        ("chimera", 4, 3),
        ("chimera", 4, 1),
        ("dualpipe", 3, 8),
        ("dualpipe", 1, 2),
        ("dualpipe", 4, 9),
        ("dualpipe", 4, 6),
    ],
)
def test_counts_of_two_directions(name: str, p: int, m: int) -> None:
    """Refused by name, with what is allowed and what was got."""
    message = f"schedule '{name}' takes an even number of .*; got n_devices={p}, n_microbatches={m}"
    with pytest.raises(ArgumentError, match=message):
        ps.schedule(name, p, m)
    assert ps.schedules(p, m).loc[name, ["bubble", "activations"]].isna().all()
