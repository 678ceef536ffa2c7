"""ZB-1p and ZB-2p: the published bubble rates, within the memory that they are named for."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import longest_span, published, run_schedule

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError, CostsWarning
from pipesim.scheduling.registry import schedule_info

TABLE_5 = published("zb_table5_bubble_rates")
ROWS = list(zip(TABLE_5["inputs"]["rows"], TABLE_5["expected"], strict=True))
FACTORS = {"zb_1p": 1, "zb_2p": 2}


def published_costs(row: dict[str, Any]) -> ps.Costs:
    """Return the costs of a row: seconds, bytes a layer and token of F, those held for W (Table 2).

    Sums of these seconds are rounded, as those of measured costs are.
    """
    model = TABLE_5["inputs"]["models"][row["model"]]
    hidden, heads, length = model["hidden"], model["heads"], model["seq"]
    return ps.Costs(
        forward=row["TF_us"] * 1e-6,
        input_grad=row["TB_us"] * 1e-6,
        weight_grad=row["TW_us"] * 1e-6,
        activation_bytes=34 * hidden + 5 * heads * length,
        weight_grad_bytes=32 * hidden,
        network=ps.Network(latency=row["Tcomm_us"] * 1e-6),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize(
    ("row", "expected"), ROWS, ids=[f"{row['model']}-m{row['m']}" for row, _ in ROWS]
)
def test_published_bubble_rates(name: str, row: dict[str, Any], expected: dict[str, float]) -> None:
    """Table 5 of arXiv 2401.10241: no more bubble, within 0.0006, in no more memory."""
    costs, p, m = published_costs(row), row["p"], row["m"]
    timeline = run_schedule(ps.schedule(name, p, m, costs=costs), costs)
    span = longest_span(timeline)
    rate = (span - m * (row["TF_us"] + row["TB_us"] + row["TW_us"]) * 1e-6) / span
    assert rate <= expected[name.upper().replace("_", "-").replace("P", "p")] + 0.0006
    one = costs.per_stage("activation_bytes", p)[0]
    assert timeline.memory.peak.max() <= FACTORS[name] * p * one * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORS)
@given(p=st.integers(1, 9), m=st.integers(1, 30))
def test_closed_forms_are_exact(name: str, p: int, m: int) -> None:
    """For F, I and W of equal length: bubble and memory as registered, and the spans they mean."""
    schedule = ps.schedule(name, p, m)
    ps.verify(schedule)
    timeline = run_schedule(schedule)
    assert timeline.makespan == max(3 * m + p - 1, 2 * m + 2 * p - 1)
    assert timeline.bubble_fraction == schedule_info(name).bubble.of(p, m)
    assert timeline.memory.peak.max() == min(FACTORS[name] * p, m)
    enough, idle = {"zb_1p": (p, p - 1), "zb_2p": (2 * p - 1, 0)}[name]
    if m >= enough:
        assert longest_span(timeline) == 3 * m + idle


@pytest.mark.slow
@given(st.data())
def test_any_costs_and_limits(data: st.DataObject) -> None:
    """Stages that differ, messages and limits: the order runs, and keeps within its memory."""
    p, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    f, i, w, held = (
        data.draw(st.lists(st.integers(low, 9), min_size=p, max_size=p)) for low in (0, 0, 0, 1)
    )
    costs = ps.Costs(
        forward=f,
        input_grad=i,
        weight_grad=w,
        activation_bytes=held,
        weight_grad_bytes=[x * data.draw(st.sampled_from([0, 0.4, 1])) for x in held],
        network=ps.Network(latency=data.draw(st.sampled_from([0, 0.5]))),
    )
    limits = [x * data.draw(st.sampled_from([1.0, 1.7, 4.0])) for x in held]
    schedule = ps.schedule("zb_2p", p, m, costs=costs, activation_limit=limits)
    ps.verify(schedule)
    assert (run_schedule(schedule, costs).memory.peak <= np.array(limits) * (1 + 1e-9)).all()
    assert schedule == ps.schedule("zb_2p", p, m, costs=costs, activation_limit=limits)


def test_limits_without_bytes_count_microbatches() -> None:
    """Costs that hold nothing are given one micro-batch's worth, from F to W."""
    timed = ps.Costs(forward=1, input_grad=1, weight_grad=1)
    schedule = ps.schedule("zb_1p", 4, 8, costs=timed, activation_limit=[4, 3, 2, 1])
    with pytest.warns(FutureWarning, match="give activation_limit, which means the same") as caught:
        assert schedule == ps.schedule("zb_1p", 4, 8, costs=timed, memory_limit=[4, 3, 2, 1])
    assert caught[0].filename == __file__
    assert run_schedule(schedule).memory.peak.tolist() == [4, 3, 2, 1]
    assert ps.schedule("zb_1p", 4, 8, costs=timed) == ps.schedule("zb_1p", 4, 8)


@pytest.mark.slow
def test_more_memory_makes_fewer_bubbles() -> None:
    """From half of 1F1B's memory to twice: each step on the way pays, for these costs."""
    costs = published_costs(ROWS[1][0])
    one = costs.per_stage("activation_bytes", 8)[0]
    spans = [
        longest_span(
            run_schedule(ps.schedule("zb_1p", 8, 24, costs=costs, memory_limit=limit * one), costs)
        )
        for limit in (4, 6, 8, 12, 16)
    ]
    assert spans == sorted(spans, reverse=True)
    assert len(set(spans)) == len(spans)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"activation_limit": 0.5},
            ArgumentError,
            "activation_limit of device 0 is 0.5 .*t 1",
        ),
        ({"activation_limit": [1, 1]}, ArgumentError, "2 values for 3 devices"),
        ({"activation_limit": "much"}, ArgumentError, "activation_limit must be .*got 'much'"),
        ({"costs": ps.Costs(forward=1, backward=2)}, CostsError, "input_grad is missing"),
        ({"costs": {"forward": 1}}, CostsError, "costs must be a pipesim.Costs"),
        ({"costs": ps.Costs(forward=(1, 1), input_grad=1, weight_grad=1)}, CostsError, "2 values"),
        ({"limit": 3}, ArgumentError, "takes no option 'limit'.*memory_limit"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each mistake is named with what was got and what is allowed."""
    with pytest.raises(error, match=message):
        ps.schedule("zb_1p", 3, 4, **options)


def test_weight_gradients_that_need_more_than_activations() -> None:
    """The limit is of what a micro-batch holds at most, whichever that is."""
    costs = ps.Costs(
        forward=1, input_grad=1, weight_grad=1, activation_bytes=1, weight_grad_bytes=3
    )
    for name, factor in (("zb_1p", 1), ("zb_2p", 2)):
        timeline = ps.simulate(ps.lower(ps.schedule(name, 2, 4, costs=costs)), costs)
        assert timeline.memory.peak.max() <= factor * 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zb_1p", "zb_2p", "v_min", "v_half"])
@pytest.mark.parametrize(("p", "m"), [(3, 5), (4, 8), (8, 32)])
@pytest.mark.parametrize(
    "costs",
    [
        ps.Costs(10, input_grad=12, weight_grad=8, network=ps.Network(latency=1)),
        ps.Costs(3, input_grad=1, weight_grad=5.3, activation_bytes=3, weight_grad_bytes=1),
        ps.Costs(2, input_grad=2, weight_grad=1, network=ps.Network(latency=0.3)),
    ],
)
def test_costs_never_make_an_order_worse(name: str, p: int, m: int, costs: ps.Costs) -> None:
    """Than that for F, I and W of equal length; V-Min's was, by 6 %."""
    by_costs, equal = (
        ps.simulate(ps.lower(ps.schedule(name, p, m, **options)), costs).makespan
        for options in ({"costs": costs}, {})
    )
    assert by_costs <= equal * (1 + 1e-12)


def test_costs_without_what_w_holds() -> None:
    """Orders under a limit of memory would take W to be free of it, or not be limited at all."""
    costs = ps.Costs(1, input_grad=1, weight_grad=1, activation_bytes=4)
    with pytest.warns(CostsWarning, match="no weight_grad_bytes.*give weight_grad_bytes") as caught:
        ps.schedule("zb_1p", 2, 4, costs=costs)
    assert len(caught) == 1
    with pytest.warns(CostsWarning, match="no weight_grad_bytes") as caught:
        ps.order_by(ps.Placement.linear(2), 4, costs, memory_limit=8)
    assert caught[0].filename == __file__
    with pytest.warns(CostsWarning, match="memory_limit limits nothing: .*no activation_bytes"):
        ps.order_by(ps.Placement.linear(2), 4, replace(costs, activation_bytes=0), memory_limit=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = replace(costs, weight_grad_bytes=1)
        ps.schedule("zb_1p", 2, 4, costs=whole)
        ps.schedule("zb_1p", 2, 4, costs=replace(costs, activation_bytes=0))
        ps.order_by(ps.Placement.linear(2), 4, whole, memory_limit=8)
        ps.order_by(ps.Placement.linear(2), 4, costs)
        ps.order_by(ps.Placement.linear(2), 4, ps.Costs(1, 2, activation_bytes=4), memory_limit=8,
                    split_backward=False)  # fmt: skip


@pytest.mark.parametrize("name", ["zb_1p", "zb_2p"])
def test_memory_limits_are_of_all_bytes(name: str) -> None:
    """Parameters, workspaces and reserve are counted, as in `pipesim.simulate`."""
    costs = ps.Costs(
        1, input_grad=1, weight_grad=1, activation_bytes=2, weight_grad_bytes=1, memory_reserve=0.1,
        parameter_bytes=[8, 1, 1, 8], backward_workspace_bytes=1,
    )  # fmt: skip
    limits = [26, 12, 12, 26]
    order = ps.schedule(name, 4, 8, costs=costs, memory_limit=limits)
    assert ps.simulate(ps.lower(order), costs, memory_limit=limits).memory.fits
    with pytest.raises(ArgumentError, match=r"memory_limit of device 0 is 20 .* at least 20.9"):
        ps.schedule(name, 4, 8, costs=costs, memory_limit=20)
    wide = ps.schedule(name, 4, 8, costs=costs, activation_limit="8B")
    peaks = run_schedule(wide, replace(costs, parameter_bytes=0, backward_workspace_bytes=0))
    assert peaks.memory.peak.max() == 8
    parameters = replace(costs, activation_bytes=0, weight_grad_bytes=0)
    with pytest.warns(CostsWarning, match="memory_limit limits no activations"):
        ps.schedule(name, 4, 8, costs=parameters, memory_limit=30)
