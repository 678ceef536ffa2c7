"""`order_by`: orders from priorities and limits; they run, and hold no more than they may."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st
from kernels import compiled
from simulated_runs import UNIFORM, run_schedule
from strategies import costs, placements

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError, CostsWarning, UnknownNameError
from pipesim.list_scheduling.order_by import PRIORITIES
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.memory import reserved_memory

counts = st.integers(1, 9)


def scrambled(seed: int) -> Any:
    """Return a priority without rhyme or reason, but always the same."""
    return lambda action, ready: hash((seed, action.stage, int(action.op), action.microbatch)) % 97


def bytes_of_one(placement: ps.Placement, prices: ps.Costs) -> list[float]:
    """Return the bytes of one micro-batch on each device, on the path that has most of them."""
    names = ("activation_bytes", "weight_grad_bytes")
    nbytes = np.maximum(*(prices.per_stage(name, placement.n_stages) for name in names))
    return [
        max(
            sum(nbytes[s] for s, home in enumerate(path) if home == device)
            for path in placement.paths
        )
        for device in range(placement.n_devices)
    ]


@pytest.mark.slow
def test_one_activation_a_device() -> None:
    """Drawn by hand: where one fits, F waits until W has freed the bytes of the last one."""
    schedule = ps.order_by(ps.Placement.linear(2), 2, UNIFORM, memory_limit=1)
    assert draw(run_schedule(schedule), transfers=False) == grid("""
        0 | F0 .. .. I0 W0 F1 .. .. I1 W1
        1 | .. F0 I0 W0 .. .. F1 I1 W1 ..
    """)


def test_two_chunks_leave_room_for_each_other() -> None:
    """Drawn by hand: F of the first stage must not take what the last stage's F will need."""
    schedule = ps.order_by(ps.Placement.v_shaped(2), 2, UNIFORM, memory_limit=2)
    assert draw(run_schedule(schedule), transfers=False) == grid("""
        0 | 0F0 ..  ..  3F0 3I0 3W0 0F1 0I0 0W0 ..  ..  3F1 3I1 3W1 ..  0I1 0W1
        1 | ..  1F0 2F0 ..  ..  2I0 1I0 2W0 1F1 1W0 2F1 ..  ..  2I1 1I1 2W1 1W1
    """)


def test_the_next_micro_batch_has_a_place_in_flight() -> None:
    """Device 1 has room for micro-batch 0 alone: were 1 in flight on device 0, both would wait."""
    costs = ps.Costs(1, 1, activation_bytes=1)
    last_first = lambda action, ready: -action.microbatch  # noqa: E731
    schedule = ps.order_by(
        ps.Placement.linear(2), 2, costs, memory_limit=[2, 1], in_flight=1, priority=last_first,
        split_backward=False,
    )  # fmt: skip
    assert schedule.grid() == "device 0 | 0F0 0B0 0F1 0B1\ndevice 1 | 1F0 1B0 1F1 1B1"


def test_patience_keeps_a_device_free() -> None:
    """Drawn by hand: I1 comes one second into W0, which lasts two and has nothing to hurry for."""
    slow = ps.Costs(forward=1, input_grad=(1, 2), weight_grad=2)
    eager, patient = (
        ps.order_by(ps.Placement.linear(2), 2, slow, patience=patience, priority="forward_first")
        for patience in (0, 1)
    )
    assert eager.grid().splitlines()[0] == "device 0 | 0F0 0F1 0I0 0W0 0I1 0W1"
    assert patient.grid().splitlines()[0] == "device 0 | 0F0 0F1 0I0 0I1 0W0 0W1"


@given(p=counts, m=counts, f=st.integers(1, 9))
def test_1f1b_is_a_limit_in_flight(p: int, m: int, f: int) -> None:
    """F first, with at most p - s micro-batches in flight on stage s."""
    schedule = ps.order_by(
        ps.Placement.linear(p),
        m,
        ps.Costs(forward=f, backward=2 * f),
        priority="forward_first",
        in_flight=[p - s for s in range(p)],
        split_backward=False,
    )
    assert schedule == ps.schedule("1f1b", p, m)


@given(p=counts, m=counts, f=st.integers(1, 9), b=st.integers(1, 9))
def test_gpipe_is_a_priority(p: int, m: int, f: int, b: int) -> None:
    """Every F, then the backwards of the last micro-batches first."""

    def gpipe(action: ps.Action, ready: float) -> tuple[int, int]:
        assert action.microbatch is not None
        is_forward = action.op == ps.Op.F
        return (0, action.microbatch) if is_forward else (1, -action.microbatch)

    schedule = ps.order_by(
        ps.Placement.linear(p),
        m,
        ps.Costs(forward=f, backward=b),
        priority=gpipe,
        split_backward=False,
    )
    assert schedule == ps.schedule("gpipe", p, m)


@pytest.mark.slow
@given(st.data())
def test_orders_run_within_their_limits(data: st.DataObject) -> None:
    """Any placement, costs, priority and limits: complete, free of deadlock, within memory."""
    placement = data.draw(placements())
    prices = data.draw(costs(placement.n_stages, placement.n_devices))
    one = bytes_of_one(placement, prices)
    spare = [data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.5])) for _ in one]
    limits = [nbytes * (1 + more) for nbytes, more in zip(one, spare, strict=True)]
    in_flight = [data.draw(st.integers(1, 3)) for _ in range(placement.n_stages)]
    priority = data.draw(st.one_of(st.sampled_from(sorted(PRIORITIES)), st.builds(scrambled)))
    split = data.draw(st.booleans())
    limit = data.draw(st.sampled_from([limits, None]))
    schedule = ps.order_by(
        placement,
        data.draw(st.integers(placement.n_paths, 5)),
        prices,
        priority=priority,
        activation_limit=None if placement.shares_stages else limit,
        in_flight=data.draw(st.sampled_from([in_flight, None])),
        split_backward=split,
        patience=data.draw(st.sampled_from([0, 0.5, 2])),
    )
    ps.verify(schedule)
    assert {int(op) for op in schedule.op} == ({0, 2, 3} if split else {0, 1})


@pytest.mark.slow
@given(st.data())
def test_memory_stays_within_the_limit(data: st.DataObject) -> None:
    """The peak of a simulation, whatever its own timing, since an order fixes what is held."""
    placement = data.draw(placements())
    prices = data.draw(costs(placement.n_stages, placement.n_devices))
    prices = ps.Costs.from_dict(
        {
            **prices.to_dict(),
            **{f"{name}_bytes": 0 for name in ("parameter", "gradient", "optimizer")},
            **{f"{name}_workspace_bytes": 0 for name in ("forward", "backward")},
        }
    )
    one = bytes_of_one(placement, prices)
    limits = [nbytes * data.draw(st.sampled_from([1.0, 1.5, 3.0])) for nbytes in one]
    schedule = ps.order_by(
        placement,
        data.draw(st.integers(placement.n_paths, 5)),
        prices,
        priority=data.draw(st.builds(scrambled)),
        activation_limit=limits,
    )
    assert (run_schedule(schedule, prices).memory.peak <= np.array(limits) * (1 + 1e-9)).all()


@given(st.data())
def test_orders_do_not_depend_on_the_unit(data: st.DataObject) -> None:
    """The same costs in units half as long give the same order."""
    placement = data.draw(placements())
    n_stages, m = placement.n_stages, data.draw(st.integers(placement.n_paths, 5))
    f, i, w = (data.draw(st.lists(st.integers(1, 5), min_size=n_stages, max_size=n_stages))
               for _ in range(3))  # fmt: skip
    schedules = [
        ps.order_by(
            placement,
            m,
            ps.Costs(
                forward=[unit * x for x in f],
                input_grad=[unit * x for x in i],
                weight_grad=[unit * x for x in w],
                network=ps.Network(latency=unit),
            ),
            priority="critical_path",
            patience=0.5,
        )
        for unit in (1, 2)
    ]
    assert schedules[0] == schedules[1]


@pytest.mark.slow
@given(st.data())
def test_compiled_orders_are_those_of_a_function(data: st.DataObject) -> None:
    """A priority with a name runs compiled, and as a function of the user as Python."""
    placement = data.draw(placements())
    prices = data.draw(costs(placement.n_stages, placement.n_devices))
    limits = [x * data.draw(st.sampled_from([1, 1.5, 3])) for x in bytes_of_one(placement, prices)]
    functions: dict[str, Any] = {
        "forward_first": lambda a, ready: ("FIW".index(a.op.name), turns[a.microbatch], -a.stage),
        "first_come": lambda a, ready: (
            ready, turns[a.microbatch], "FIW".index(a.op.name), -a.stage
        ),
    }  # fmt: skip
    name = data.draw(st.sampled_from(sorted(functions)))
    limit = data.draw(st.sampled_from([limits, None]))
    options: dict[str, Any] = {
        "activation_limit": None if placement.shares_stages else limit,
        "in_flight": data.draw(st.sampled_from([2, None])),
        "patience": data.draw(st.sampled_from([0, 0.5])),
    }
    m = data.draw(st.integers(placement.n_paths, 5))
    turns = list(range(m))
    if placement.shares_stages:  # paths take turns
        path = placement.path_of(m)
        place = np.arange(m) - np.searchsorted(path, path)
        turns = (place * placement.n_paths + path).tolist()
    with warnings.catch_warnings(), compiled():
        warnings.simplefilter("ignore", CostsWarning)
        by_name, by_function = (
            ps.order_by(placement, m, prices, priority=priority, **options)
            for priority in (name, functions[name])
        )
    assert by_name == by_function


def test_messages_count() -> None:
    """Drawn by hand: I0 is back when F1 has ended, or, with messages of four seconds, after F2."""
    rows = []
    for bandwidth in (math.inf, 2):
        prices = ps.Costs(
            forward=(2, 1),
            input_grad=1,
            weight_grad=1,
            output_bytes=8,
            network=ps.Network(bandwidth=bandwidth),
        )
        rows.append(ps.order_by(ps.Placement.linear(2), 3, prices).grid().splitlines()[0])
    assert rows == [
        "device 0 | 0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2",
        "device 0 | 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
    ]


def test_a_priority_sees_when_actions_are_ready() -> None:
    """Ranked by the moment they are ready, and called once for each action."""
    times: dict[str, float] = {}

    def first_come(action: ps.Action, ready: float) -> float:
        assert str(action) not in times
        times[str(action)] = ready
        return ready

    schedule = ps.order_by(ps.Placement.linear(2), 2, UNIFORM, priority=first_come)
    assert len(times) == len(schedule) == 12
    assert (times["0F1"], times["1F0"], times["1I0"], times["0I0"], times["0W0"]) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"placement": 3}, ArgumentError, "placement must be a pipesim.Placement, got 3"),
        ({"n_microbatches": 0}, ArgumentError, "n_microbatches must be at least 1"),
        (
            {"placement": ps.Placement.bidirectional(2), "n_microbatches": 1},
            ArgumentError,
            "at least 2, got",
        ),
        ({"costs": {"forward": 1}}, CostsError, "costs must be a pipesim.Costs"),
        ({"costs": ps.Costs(forward=1, backward=2)}, CostsError, "input_grad is missing"),
        (
            {"costs": ps.Costs(forward=1), "split_backward": False},
            CostsError,
            "backward is missing",
        ),
        ({"priority": "backwards_first"}, UnknownNameError, "did you mean 'backward_first'"),
        ({"priority": lambda action, ready: "soon"}, ArgumentError, "priority of 0F0, ready at 0"),
        ({"priority": lambda action, ready: math.nan}, ArgumentError, "must be a number or a"),
        ({"priority": lambda action, ready: ()}, ArgumentError, "tuple of numbers"),
        ({"memory_limit": 1}, ArgumentError, r"device 0 is 1 bytes.* takes 2 .*stages 0, 3.* 2"),
        ({"memory_limit": [2, 1]}, ArgumentError, r"device 1 is 1 bytes.*stages 1, 2"),
        ({"memory_limit": [2, 2, 2]}, ArgumentError, "3 values for 2 devices"),
        ({"memory_limit": -1}, ArgumentError, "memory_limit must be bytes >= 0, got -1"),
        ({"memory_limit": math.nan}, ArgumentError, "got nan"),
        ({"memory_limit": "12 Gi"}, ArgumentError, "got '12 Gi'"),
        ({"in_flight": 0}, ArgumentError, "in_flight must be at least 1"),
        ({"in_flight": [1, 1]}, ArgumentError, "2 values for 4 stages"),
        ({"in_flight": [1, 1, 1, 0.5]}, ArgumentError, "in_flight of stage 3 must be a whole"),
        ({"patience": -1}, ArgumentError, "patience must be finite and >= 0, got -1"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each mistake is named with what was got and what is allowed."""
    options = {
        "placement": ps.Placement.v_shaped(2),
        "n_microbatches": 2,
        "costs": UNIFORM,
        **change,
    }
    with pytest.raises(error, match=message):
        ps.order_by(**options)


@given(st.data())
def test_orders_keep_a_limit_of_all_bytes(data: st.DataObject) -> None:
    """A limit that has room for a micro-batch gives an order that `simulate` finds to fit."""
    placement = data.draw(
        st.sampled_from(
            [ps.Placement.linear(3), ps.Placement.v_shaped(2), ps.Placement.bidirectional(2)]
        )
    )
    n, whole = placement.n_stages, st.integers(0, 6)
    values = {
        name: data.draw(st.lists(whole, min_size=n, max_size=n))
        for name in (
            "activation_bytes", "weight_grad_bytes", "parameter_bytes", "optimizer_bytes",
            "forward_workspace_bytes", "backward_workspace_bytes",
        )
    }  # fmt: skip
    reserve = data.draw(st.sampled_from([0.0, 0.25]))
    costs = ps.Costs(1, 2, input_grad=1, weight_grad=1, memory_reserve=reserve, **values)
    limit = data.draw(st.integers(20, 80))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CostsWarning)
        try:
            order = ps.order_by(placement, 4, costs, memory_limit=limit)
        except ArgumentError as error:
            least = float(str(error).rpartition(" ")[2])
            assert least > limit
            return
    timeline = predict_timeline(ps.lower(order), costs)
    assert (reserved_memory(timeline) <= limit * (1 + 1e-9)).all()


def test_activations_alone_have_a_limit_of_their_own() -> None:
    costs = replace(UNIFORM, parameter_bytes=100.0)
    schedule = ps.order_by(ps.Placement.linear(2), 4, costs, activation_limit=2)
    assert schedule == ps.order_by(ps.Placement.linear(2), 4, UNIFORM, memory_limit=2)
    both = ps.order_by(ps.Placement.linear(2), 4, costs, activation_limit=3, memory_limit="202B")
    assert both == schedule
    with pytest.raises(ArgumentError, match=r"device 0 is 2 .*with parameters.* at least 201"):
        ps.order_by(ps.Placement.linear(2), 4, costs, memory_limit=2)
    with pytest.warns(CostsWarning, match="activation_limit limits nothing"):
        ps.order_by(ps.Placement.linear(2), 4, activation_limit=2)
