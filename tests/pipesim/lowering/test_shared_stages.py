"""Paths that share stages on one device: micro-batches routed around failed or slow workers."""

from __future__ import annotations

from typing import Any

import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, MemoryLimitWarning, ScheduleError
from pipesim.ops import Op

#: Stage 1 of replica 1 has failed: device 1 takes its micro-batches 2 and 3.
GRID = """
device 0 | 0F0 0F1 0B0 0B1
device 1 | 1F0 1B0 1F2 1B2 1F1 1B1 1F3 1B3
device 2 | 0F2 0F3 0B2 0B3
"""
COSTS = ps.Costs(
    forward=1, backward=1, input_grad=1, weight_grad=1, reduce_grad=0.5, optimizer_step=1,
    parameter_bytes=[10, 100], gradient_bytes=[10, 100], optimizer_bytes=[20, 200],
)  # fmt: skip


def rerouted() -> ps.Schedule:
    """Return the order of ``GRID``."""
    placement = ps.Placement.rerouted(2, 2, 4, {(1, 1): 0})
    orders = [line.split("|")[1].split() for line in GRID.strip().splitlines()]
    return ps.Schedule.from_orders(orders, placement=placement)


@pytest.mark.parametrize("engine", ["simpy", "compiled"])
def test_a_step_around_a_failed_worker(engine: Any) -> None:
    """Drawn by hand.

              0   1   2   3   4   5   6   7   8   9   10  11
    device 0 | F0  F1  .   B0  .   .   .   B1  .   .   r ST
    device 1 | .   F0  B0  F2  B2  F1  B1  F3  B3  ST
    device 2 | F2  F3  .   .   .   B2  .   .   .   B3  r ST
    """
    graph = ps.lower(rerouted())
    timeline = ps.simulate(graph, COSTS, engine=engine)
    starts = {
        (str(graph.task(k)), int(graph.device[k])): float(timeline.start[k])
        for k in range(len(graph)) if graph.op[k] in (Op.F, Op.B, Op.REDUCE_GRAD, Op.STEP)
    }  # fmt: skip
    assert starts == {
        ("0F0", 0): 0, ("0F1", 0): 1, ("0B0", 0): 3, ("0B1", 0): 7,
        ("1F0", 1): 1, ("1B0", 1): 2, ("1F2", 1): 3, ("1B2", 1): 4,
        ("1F1", 1): 5, ("1B1", 1): 6, ("1F3", 1): 7, ("1B3", 1): 8, ("1STEP", 1): 9,
        ("0F2", 2): 0, ("0F3", 2): 1, ("0B2", 2): 5, ("0B3", 2): 9,
        ("0REDUCE_GRAD", 0): 10, ("0REDUCE_GRAD", 2): 10, ("0STEP", 0): 10.5, ("0STEP", 2): 10.5,
    }  # fmt: skip
    assert timeline.makespan == 11.5
    assert (timeline.why.idle_by_cause().sum(axis=1) == timeline.idle).all()


def test_shared_weights_count_once_and_wait_for_all_gradients() -> None:
    """Device 1 holds stage 1 once, for both paths; its step needs their four backwards."""
    graph = ps.lower(rerouted())
    assert ps.simulate(graph, COSTS).memory.peak.tolist() == [40, 400, 40]
    step = next(k for k in range(len(graph)) if str(graph.task(k)) == "1STEP")
    needed = [str(graph.task(k)) for k in graph.dependencies[step].tolist()]
    assert sorted(needed) == ["1B0", "1B1", "1B2", "1B3"]
    twice = ps.lower(rerouted(), n_replicas=2)  # a copy of both on other devices
    assert sorted(twice.replica[(twice.op == Op.REDUCE_GRAD) & (twice.stage == 1)]) == [0, 2]


@pytest.mark.parametrize("n_replicas", [1, 2])
def test_copies_of_a_stage_share_its_optimizer(n_replicas: int) -> None:
    """Stage 0 has two copies a replica, stage 1 one."""
    graph = ps.lower(rerouted(), n_replicas=n_replicas, shard_optimizer=True)
    assert graph.optimizer_shares.tolist() == [2 * n_replicas, n_replicas]
    compiled, simpy = (ps.simulate(graph, COSTS, engine=x) for x in ("compiled", "simpy"))
    assert (compiled.end == simpy.end).all()
    own = [20 + 20 / (2 * n_replicas), 200 + 200 / n_replicas]
    assert compiled.memory.peak.tolist() == [own[0], own[1], own[0]] * n_replicas


def test_other_schedules_are_no_change_that_fits() -> None:
    """A named schedule on as many devices would have more stages, not replicas."""
    placement = ps.Placement.rerouted(3, 3, 12, {(1, 1): 0})
    costs = ps.Costs(forward=1, backward=2, activation_bytes=40)
    graph = ps.lower(ps.order_by(placement, 12, costs, split_backward=False))
    with pytest.warns(MemoryLimitWarning):
        timeline = ps.simulate(graph, costs, memory_limit=150)
    assert timeline.memory.changes_that_fit()["change"].tolist() == ["lower(recompute='always')"]


def test_orders_of_paths_that_share_a_stage() -> None:
    """Paths take turns, and places in flight are those of the device: here two in all."""
    placement = ps.Placement([0, 1], [2, 1])
    order = ps.order_by(placement, 6, priority="forward_first", in_flight=[3, 2])
    assert order.grid().splitlines()[1].split()[3:7] == ["1F0", "1F3", "1I0", "1F1"]


def test_alternatives_to_a_rerouted_stage() -> None:
    """Three workers share the work of four: 11 F, I and W each, and 2 F before the first."""
    placement = ps.Placement.rerouted(4, 4, 32, {(1, 2): 0})
    uniform = ps.Costs(forward=1, backward=2, input_grad=1, weight_grad=1)
    makespans = [
        ps.simulate(ps.lower(ps.order_by(where, 32 // n, uniform), n_replicas=n), uniform).makespan
        for where, n in ((placement, 1), (ps.Placement.linear(4), 4))
    ]
    assert makespans == [35, 27]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tied": [(0, 1)]}, "share stages on one device"),
        ({"offload": "all", "offload_to": "peer"}, "no one peer"),
        ({"expert_layers": 1}, "exchange no tokens"),
        ({"grad_sync": "every"}, "2 paths"),
        ({"n_replicas": 2, "shard_parameters": "every"}, "2 paths"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ps.lower(rerouted(), **options)


def test_refused_limits_and_files(tmp_path: Any) -> None:
    costs = ps.Costs(forward=1, backward=1, activation_bytes=1)
    with pytest.raises(ArgumentError, match="give one of the two limits"):
        ps.order_by(rerouted().placement, 4, costs, in_flight=2, activation_limit=4,
                    split_backward=False)  # fmt: skip
    with pytest.raises(ScheduleError, match="paths that share stages"):
        rerouted().save(tmp_path / "orders.csv")
