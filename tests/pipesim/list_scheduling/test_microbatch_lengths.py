"""`order_by` with micro-batches of different length: priorities, limits, critical paths."""

from __future__ import annotations

import re

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st
from strategies import placements

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError

THREE = ps.Costs([[3, 1, 2]], [[3, 1, 2]])
PRIORITIES = ("backward_first", "forward_first", "first_come", "critical_path", "longest_first",
              "shortest_first")  # fmt: skip


def simulated(priority: str) -> ps.Timeline:
    schedule = ps.order_by(
        ps.Placement.linear(2), 3, THREE, priority=priority, split_backward=False
    )
    return ps.simulate(ps.lower(schedule, step="none"), THREE)


def test_sorted_lengths_beat_unsorted_ones() -> None:
    """Drawn by hand: in their own order, device 1 waits 3 s for micro-batch 0."""
    assert draw(simulated("shortest_first"), transfers=False) == grid("""
        0 | F1 F2 F2 B1 F0 F0 F0 B2 B2 .. .. .. .. B0 B0 B0
        1 | .. F1 B1 F2 F2 B2 B2 F0 F0 F0 B0 B0 B0 .. .. ..
    """)
    assert draw(simulated("longest_first"), transfers=False) == grid("""
        0 | F0 F0 F0 F2 F2 F1 .. .. .. B0 B0 B0 .. B2 B2 B1
        1 | .. .. .. F0 F0 F0 B0 B0 B0 F2 F2 B2 B2 F1 B1 ..
    """)
    assert simulated("backward_first").makespan == 17


def test_critical_path_takes_the_chain_of_each_micro_batch() -> None:
    """Micro-batch 1 has the longest chain, though stage 0 is longest for micro-batch 0."""
    costs = ps.Costs([[4, 1], [1, 6]], input_grad=1, weight_grad=1)
    schedule = ps.order_by(ps.Placement.linear(2), 2, costs, priority="critical_path")
    assert str(schedule.orders[0][0]) == "0F1"


def test_one_place_in_flight_does_not_stop_sorted_micro_batches() -> None:
    """The place in flight is reserved for the first by length, not by number."""
    schedule = ps.order_by(ps.Placement.linear(2), 3, THREE, priority="longest_first", in_flight=1,
                           split_backward=False)  # fmt: skip
    assert schedule.grid().splitlines()[0] == "device 0 | 0F0 0B0 0F2 0B2 0F1 0B1"


def test_a_short_one_fits_beside_a_long_one() -> None:
    """Drawn by hand: 5 bytes hold micro-batches 0 and 2, or 1 and 2, but not 0 and 1."""
    costs = ps.Costs([[3, 2, 1]], [[3, 2, 1]], activation_bytes=[[3, 2.5, 1]])
    schedule = ps.order_by(ps.Placement.linear(2), 3, costs, memory_limit=5, split_backward=False)
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    assert draw(timeline, transfers=False) == grid("""
        0 | F0 F0 F0 F2 .. .. .. .. .. B0 B0 B0 B2 F1 F1 .. .. .. .. B1 B1
        1 | .. .. .. F0 F0 F0 B0 B0 B0 F2 B2 .. .. .. .. F1 F1 B1 B1 .. ..
    """)
    assert timeline.memory.peak.tolist() == [4, 3]


@given(st.data())
def test_orders_run_and_keep_the_limit_of_each_micro_batch(data: st.DataObject) -> None:
    """Any priority, limits and places in flight: no deadlock, and no more bytes than allowed."""
    placement = data.draw(placements())
    m = data.draw(st.integers(placement.n_paths, 8))
    draws = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    seconds, nbytes, held = draws.integers(1, 6, (3, placement.n_stages, m)).astype(float)
    costs = ps.Costs(seconds, input_grad=seconds, weight_grad=seconds, activation_bytes=nbytes,
                     weight_grad_bytes=held, output_bytes=nbytes,
                     network=ps.Network(0.5, 4))  # fmt: skip
    path_of, both = placement.path_of(m), np.maximum(nbytes, held)
    least = np.zeros(placement.n_devices)
    for k in range(m):
        on_device = np.bincount(placement.paths[path_of[k]], both[:, k], placement.n_devices)
        least = np.maximum(least, on_device)
    limits = least + draws.choice([0.0, 1.0, 4.0], placement.n_devices)
    in_flight = data.draw(st.sampled_from([None, 1, 3]))
    priority = data.draw(st.sampled_from([*PRIORITIES, lambda action, _: -action.microbatch]))
    if placement.shares_stages and in_flight:  # refused together
        limits[:] = np.inf
    limit = limits.tolist() if np.isfinite(limits).all() else None
    schedule = ps.order_by(placement, m, costs, priority=priority, activation_limit=limit,
                           in_flight=in_flight, patience=draws.choice([0, 1]))  # fmt: skip
    assert len(schedule) == 3 * placement.n_stages * m
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    assert (timeline.memory.peak <= limits + 1e-9).all()


@given(st.data())
def test_equal_values_are_one_value(data: st.DataObject) -> None:
    placement = data.draw(placements())
    m = data.draw(st.integers(placement.n_paths, 8))
    priority = data.draw(st.sampled_from(PRIORITIES))
    rows = np.ones((placement.n_stages, m))
    orders = [
        ps.order_by(
            placement, m, ps.Costs(x, input_grad=x, weight_grad=2 * x, activation_bytes=x,
                                   weight_grad_bytes=x),
            priority=priority, memory_limit=2 * placement.n_chunks * placement.n_paths,
        )
        for x in (1.0, rows)
    ]  # fmt: skip
    assert orders[0] == orders[1]
    by_length = {"longest_first", "shortest_first"}
    if priority in by_length:
        assert orders[0] == ps.order_by(
            placement, m, ps.Costs(1.0, input_grad=1, weight_grad=2, activation_bytes=1,
                                   weight_grad_bytes=1),
            memory_limit=2 * placement.n_chunks * placement.n_paths,
        )  # fmt: skip


def test_paths_sort_their_own_micro_batches() -> None:
    costs = ps.Costs([[1, 2, 4, 3]], [[1, 2, 4, 3]])
    schedule = ps.order_by(ps.Placement.bidirectional(2), 4, costs, priority="longest_first",
                           split_backward=False)  # fmt: skip
    first = [a.microbatch for a in schedule.orders[0] if str(a)[:2] == "0F"]
    assert first == [1, 0], "path 0 has micro-batches 0 and 1"


def test_errors_name_the_micro_batch() -> None:
    costs = ps.Costs([[1, 2]], 1, activation_bytes=[[1, 5]])
    message = "memory_limit of device 0 is 4 bytes, but micro-batch 1 takes 5 there (stage 0)"
    with pytest.raises(ArgumentError, match=re.escape(message)):
        ps.order_by(ps.Placement.linear(2), 2, costs, memory_limit=4, split_backward=False)
    with pytest.raises(CostsError, match=r"for 2 micro-batches, but 3 are to be ordered; give 3"):
        ps.order_by(ps.Placement.linear(2), 3, costs, split_backward=False)


@pytest.mark.parametrize("name", ["zb_1p", "zb_2p", "zbv", "v_min", "v_half"])
def test_named_schedules_take_averages(name: str) -> None:
    """Seconds count with their averages, and bytes with the largest ones."""
    seconds = np.array([[1.0, 2.0, 3.0, 6.0]])
    costs = ps.Costs(seconds, input_grad=1, weight_grad=2)
    averaged = ps.Costs(3.0, input_grad=1, weight_grad=2)
    assert ps.schedule(name, 2, 4, costs=costs) == ps.schedule(name, 2, 4, costs=averaged)
    with pytest.raises(CostsError, match=r"for 4 micro-batches, but the schedule has 6; give 6"):
        ps.schedule(name, 2, 6, costs=costs)


def test_named_schedules_keep_the_limit_for_the_largest_bytes() -> None:
    rows = np.array([[1.0, 1.0, 1.0, 4.0]])
    costs = ps.Costs(rows, input_grad=rows, weight_grad=rows, activation_bytes=rows,
                     weight_grad_bytes=rows)  # fmt: skip
    schedule = ps.schedule("zb_1p", 2, 4, costs=costs, memory_limit=8)
    for order in ([0, 1, 2, 3], [3, 1, 2, 0]):
        graph = ps.lower(schedule.with_microbatch_order(order), step="none")
        assert (ps.simulate(graph, costs).memory.peak <= 8).all()
