"""Schedules that take costs: their orders are never worse than without, and short."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import as_python, compiled
from simulated_runs import UNIFORM, longest_span, run_schedule
from strategies import costs

import pipesim as ps
from pipesim.errors import CostsError, CostsWarning
from pipesim.scheduling.registry import schedule_info

#: Stages a device.
CHUNKS = {"zb_1p": 1, "zb_2p": 1, "v_half": 2, "v_min": 2, "zbv": 2}
STUDY = ps.Costs(10, input_grad=12, weight_grad=8, network=ps.Network(latency=1))


def all_pairs(p: int) -> ps.Network:
    """Return one link of a byte a second that all devices share."""
    pairs = [(a, b) for a in range(p) for b in range(p) if a != b]
    return ps.Network(links=(ps.Link(0, 1, tuple(pairs)),))


def check_no_worse(name: str, p: int, m: int, prices: ps.Costs) -> None:
    """Compare the order for costs with the order without, in makespan and in ZB's span.

    The makespan is that of a step with its optimizer steps, which the order for costs counts.
    """
    with warnings.catch_warnings(), compiled():
        warnings.simplefilter("ignore", CostsWarning)
        by_costs, without = (
            ps.simulate(ps.lower(ps.schedule(name, p, m, **options)), prices)
            for options in ({"costs": prices}, {})
        )
    assert by_costs.makespan <= without.makespan * (1 + 1e-9)
    if name.startswith("zb_"):
        assert longest_span(by_costs) <= longest_span(without) * (1 + 1e-9)


@pytest.mark.slow
@given(st.data())
def test_any_costs_make_no_order_worse(data: st.DataObject) -> None:
    """Uneven stages, messages, shared links and launches."""
    name = data.draw(st.sampled_from(sorted(CHUNKS)))
    p, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    check_no_worse(name, p, m, data.draw(costs(CHUNKS[name] * p, p)))


@pytest.mark.parametrize(
    ("name", "p", "m", "step", "f", "i", "w"),
    [
        ("v_half", 3, 1, (0, 0, 0, 0, 0, 2), 0, 1, 3),
        ("zb_1p", 4, 6, (1, 5, 3, 4), (1, 2, 1, 0), (3, 3, 3, 5), (3, 0, 4, 2)),
        ("zb_2p", 3, 5, (9, 0, 4), (1, 2, 1), (3, 3, 2), (3, 0, 4)),
    ],
)  # fmt: skip
def test_uneven_optimizer_steps_make_no_order_worse(
    name: str, p: int, m: int, step: Any, f: Any, i: Any, w: Any
) -> None:
    """The makespan counts the STEP behind each device's last W."""
    check_no_worse(name, p, m, ps.Costs(f, input_grad=i, weight_grad=w, optimizer_step=step))


@pytest.mark.parametrize(
    ("name", "p", "m", "f", "i", "w", "network"),
    [
        ("zb_2p", 3, 2, (5, 3, 0), (5, 1, 6), (0, 9, 1), ps.Network(latency=3)),
        ("zb_1p", 3, 8, (6, 0, 5), (7, 8, 7), (2, 1, 0), all_pairs(3)),
        ("zbv", 2, 6, (3, 6, 1, 6), (6, 2, 0, 4), (1, 2, 1, 2), all_pairs(2)),
        ("zbv", 3, 8, (3, 7, 5, 9, 1, 8), (6, 3, 7, 2, 4, 4), (8, 3, 1, 2, 9, 1),
         ps.Network(bandwidth=1)),
    ],
)  # fmt: skip
def test_best_variants_may_be_worse(
    name: str, p: int, m: int, f: Any, i: Any, w: Any, network: ps.Network
) -> None:
    """Here all orders that are made for the costs take longer, or in links that are not shared."""
    prices = ps.Costs(f, input_grad=i, weight_grad=w, output_bytes=3, network=network)
    check_no_worse(name, p, m, prices)


@pytest.mark.parametrize(
    ("name", "p", "m", "seconds"),
    [
        ("zb_1p", 4, 8, 294),
        ("zb_1p", 8, 32, 1086),
        ("zb_2p", 4, 8, 273),
        ("zb_2p", 8, 32, 1037),
        ("zbv", 4, 8, 527),
        ("zbv", 8, 32, 2033),
        ("v_half", 4, 8, 570),
        ("v_half", 8, 32, 2190),
        ("v_min", 4, 8, 700),
        ("v_min", 8, 32, 2526),
    ],
)
def test_short_makespans(name: str, p: int, m: int, seconds: float) -> None:
    """F of 10, I of 12, W of 8 and messages of 1 second, in the memory of the closed form."""
    with compiled():
        schedule = ps.schedule(name, p, m, costs=STUDY)
    ps.verify(schedule)
    assert run_schedule(schedule, STUDY).makespan <= seconds
    held = run_schedule(schedule, UNIFORM).memory.peak.max() / CHUNKS[name]
    assert held <= schedule_info(name).activations.of(p, m)


@pytest.mark.parametrize("name", ["zb_1p", "zbv", "v_half"])
def test_orders_do_not_depend_on_the_compiler(name: str) -> None:
    """Python and compiled kernels give the same order, and so does a second call."""
    prices = ps.Costs([2, 1] * CHUNKS[name], input_grad=3, weight_grad=1.5)
    orders = []
    for context in (as_python, compiled, compiled):
        with context():
            orders.append(ps.schedule(name, 2, 5, costs=prices))
    assert orders[0] == orders[1] == orders[2]


def test_zbv_is_reordered_only_for_costs() -> None:
    """Without costs, and with those it is made for, the order is that of the paper."""
    plain = ps.schedule("zbv", 3, 6)
    assert plain == ps.schedule("zbv", 3, 6, costs=ps.Costs(1, input_grad=1, weight_grad=1))
    uneven = ps.Costs([1, 1, 1, 1, 1, 4], input_grad=1, weight_grad=1)
    reordered = ps.schedule("zbv", 3, 6, costs=uneven)
    assert run_schedule(reordered, uneven).makespan < run_schedule(plain, uneven).makespan


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        (ps.Costs(1, 2), "input_grad is missing"),
        ({"forward": 1}, "costs must be a pipesim.Costs"),
        (ps.Costs((1, 1), input_grad=1, weight_grad=1), "2 values for 6 stages"),
    ],
)
def test_bad_costs_of_zbv(prices: Any, message: str) -> None:
    """Each mistake is named with what was got and what is allowed."""
    with pytest.raises(CostsError, match=message):
        ps.schedule("zbv", 3, 4, costs=prices)
