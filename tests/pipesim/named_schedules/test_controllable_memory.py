"""V-Min and V-Half: published memory and bubbles, for all counts of devices and micro-batches."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st
from kernels import compiled
from places import PUBLISHED

import pipesim as ps
from pipesim.errors import CostsError
from pipesim.scheduling.registry import schedule_info

PUBLISHED = json.loads((PUBLISHED / "controllable_memory.json").read_text())
FORMULAS = PUBLISHED["expected"]["hf"]
NAMES = {"v_min": "V-Min", "v_half": "V-Half"}
#: Stages are half of what a device holds, and so are their activations.
UNIFORM = ps.Costs(
    forward=1, input_grad=1, weight_grad=1, activation_bytes=0.5, weight_grad_bytes=0.5
)


def run(schedule: ps.Schedule, costs: ps.Costs = UNIFORM) -> ps.Timeline:
    """Simulate the bare schedule."""
    return ps.simulate(ps.lower(schedule, step="none"), costs)


def most_microbatches(name: str, p: int) -> int:
    """Return the published memory, in micro-batches of two stages."""
    formula = FORMULAS["act_microbatches"][NAMES[name]]
    assert formula in ("(p+4)//3", "(p+2)//2")
    return (p + 4) // 3 if formula == "(p+4)//3" else (p + 2) // 2


def test_v_half_drawn_by_hand() -> None:
    """Two devices, two micro-batches; W where a device has nothing else."""
    assert draw(run(ps.schedule("v_half", 2, 2)), transfers=False) == grid("""
        0 | 0F0 0F1 ..  3F0 3I0 3F1 3I1 0I0 3W0 0I1 0W0 3W1 0W1
        1 | ..  1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """)


def test_v_min_with_one_microbatch() -> None:
    """Down, up, and back: nothing to overlap but W."""
    assert draw(run(ps.schedule("v_min", 2, 1)), transfers=False) == grid("""
        0 | 0F0 ..  ..  3F0 3I0 3W0 ..  0I0 0W0
        1 | ..  1F0 2F0 ..  ..  2I0 1I0 2W0 1W0
    """)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(p=st.integers(1, 14), m=st.integers(1, 30))
def test_closed_forms_are_exact(name: str, p: int, m: int) -> None:
    """For F, I and W of equal length: bubble as registered, memory as published."""
    schedule = ps.schedule(name, p, m)
    ps.verify(schedule)
    assert set(schedule.op.tolist()) == {0, 2, 3}
    timeline = run(schedule)
    assert timeline.bubble_fraction == schedule_info(name).bubble.of(p, m)
    assert timeline.memory.peak.max() == min(m, most_microbatches(name, p))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [15, 16, 17, 24, 31, 32])
def test_many_devices(name: str, p: int) -> None:
    """The same with as many devices as the paper has, and fewer and more micro-batches."""
    for m in (1, p // 2, p + 1):
        timeline = run(ps.schedule(name, p, m))
        assert timeline.bubble_fraction == schedule_info(name).bubble.of(p, m)
        assert timeline.memory.peak.max() == min(m, most_microbatches(name, p))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(p=st.integers(1, 14), more=st.integers(0, 30))
def test_bubbles_are_no_larger_than_published(name: str, p: int, more: int) -> None:
    """About 2p/3m and p/2m of the work; from half a micro-batch a device on, at most that."""
    m = (p + 1) // 2 + more
    idle = run(ps.schedule(name, p, m)).makespan / (6 * m) - 1
    formula = FORMULAS["bubble"][NAMES[name]]
    assert idle <= {"~2p/3m": 2 * p / (3 * m), "~p/2m": p / (2 * m)}[formula]


@pytest.mark.parametrize("name", NAMES)
@given(p=st.integers(2, 6))
def test_the_steady_state_repeats_every_six(name: str, p: int) -> None:
    """Each device begins a micro-batch every six units, without idling."""
    m = 6 * p
    timeline = run(ps.schedule(name, p, m))
    graph = timeline.graph
    for device in range(p):
        own = (graph.device == device) & (graph.op == ps.Op.F) & (graph.stage == device)
        starts = np.sort(timeline.start[own])
        steady = np.diff(starts[2 * p : 4 * p])
        assert steady.mean() == pytest.approx(6, abs=6 / len(steady))


@pytest.mark.slow
@given(st.data())
def test_any_costs(data: st.DataObject) -> None:
    """Stages that differ, and messages: the order runs, and the memory is the same."""
    name, p = data.draw(st.sampled_from(sorted(NAMES))), data.draw(st.integers(1, 5))
    m = data.draw(st.integers(1, 9))
    f, i, w = (
        tuple(data.draw(st.lists(st.integers(0, 9), min_size=2 * p, max_size=2 * p)))
        for _ in range(3)
    )
    costs = ps.Costs(
        forward=f,
        input_grad=i,
        weight_grad=w,
        network=ps.Network(latency=data.draw(st.sampled_from([0, 0.5, 3]))),
    )
    with compiled():
        schedule = ps.schedule(name, p, m, costs=costs)
        again = ps.schedule(name, p, m, costs=costs)
    ps.verify(schedule)
    assert run(schedule).memory.peak.max() <= min(m, most_microbatches(name, p))
    assert schedule == again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": ps.Costs(forward=1, backward=2)}, "input_grad is missing"),
        ({"costs": {"forward": 1}}, "costs must be a pipesim.Costs"),
        ({"costs": ps.Costs(forward=(1, 1), input_grad=1, weight_grad=1)}, "2 values for 6 stages"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_bad_input(name: str, options: dict[str, Any], message: str) -> None:
    """Each mistake is named with what was got and what is allowed."""
    with pytest.raises(CostsError, match=message):
        ps.schedule(name, 3, 4, **options)
