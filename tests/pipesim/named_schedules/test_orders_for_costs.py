"""Schedules that take costs: their orders are never worse than without, and short."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_runs import UNIFORM, longest_span, run_schedule
from strategies import costs

import pipesim as ps
from pipesim.errors import CostsWarning
from pipesim.scheduling.registry import schedule_info

#: Stages a device.
CHUNKS = {"zb_1p": 1, "zb_2p": 1, "v_half": 2, "v_min": 2}
STUDY = ps.Costs(10, input_grad=12, weight_grad=8, network=ps.Network(latency=1))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_any_costs_make_no_order_worse(data: st.DataObject) -> None:
    """Uneven stages, messages, shared links and launches: neither makespan nor ZB's span grows."""
    name = data.draw(st.sampled_from(sorted(CHUNKS)))
    p, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    prices = data.draw(costs(CHUNKS[name] * p, p))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CostsWarning)
        by_costs, without = (
            run_schedule(ps.schedule(name, p, m, **options), prices)
            for options in ({"costs": prices}, {})
        )
    assert by_costs.makespan <= without.makespan
    if name.startswith("zb_"):
        assert longest_span(by_costs) <= longest_span(without)


@pytest.mark.parametrize(
    ("name", "p", "m", "seconds"),
    [
        ("zb_1p", 4, 8, 294),
        ("zb_1p", 8, 32, 1086),
        ("zb_2p", 4, 8, 273),
        ("zb_2p", 8, 32, 1037),
        ("v_half", 4, 8, 582),
        ("v_half", 8, 32, 2214),
        ("v_min", 4, 8, 728),
        ("v_min", 8, 32, 2550),
    ],
)
def test_short_makespans(name: str, p: int, m: int, seconds: float) -> None:
    """F of 10, I of 12, W of 8 and messages of 1 second, in the memory of the closed form."""
    schedule = ps.schedule(name, p, m, costs=STUDY)
    assert run_schedule(schedule, STUDY).makespan <= seconds
    held = run_schedule(schedule, UNIFORM).peak_memory.max() / CHUNKS[name]
    assert held <= schedule_info(name).activations.of(p, m)
