"""Bounds against every order of tiny placements: none is faster than its bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from case_choice import EVERY_CASE

import pipesim as ps
from pipesim.errors import DeadlockError, ScheduleError
from pipesim.ops import SCHEDULED, Action, Op


@cache
def every_graph(
    placement: ps.Placement, n_microbatches: int, split: bool, by_number: bool
) -> tuple[ps.TaskGraph, ...]:
    """Return the graph of each order that runs; ``by_number``: only in order of micro-batches."""
    graphs = []
    for orders in itertools.product(
        *(device_orders(placement, d, n_microbatches, split, by_number)
          for d in range(placement.n_devices))
    ):  # fmt: skip
        schedule = ps.Schedule.from_orders(
            orders, placement=placement, n_microbatches=n_microbatches
        )
        try:
            graphs.append(ps.lower(schedule))
        except (DeadlockError, ScheduleError):
            continue
    return tuple(graphs)


def device_orders(
    placement: ps.Placement, device: int, n_microbatches: int, split: bool, by_number: bool
) -> list[tuple[Action, ...]]:
    """Return all orders of a device that keep the dependencies inside it, and W after I."""
    paths = placement.path_of(n_microbatches)
    steps = (Op.F, Op.I, Op.W) if split else (Op.F, Op.B)
    chains = []
    for microbatch in range(n_microbatches):
        path = placement.paths[paths[microbatch]]
        stages = [s for s, home in enumerate(path) if home == device]
        for own in [[s] for s in stages] if placement.edges else [stages]:
            forwards = [Action(s, Op.F, microbatch) for s in own]
            rest = [Action(s, op, microbatch) for s in reversed(own) for op in steps[1:]]
            chains.append([*forwards, *rest])
    orders: list[tuple[Action, ...]] = []
    for order in interleaved(tuple(map(tuple, chains))):
        numbers: dict[tuple[int, Op, int], list[int]] = {}
        for stage, op, microbatch, *_ in order:
            assert microbatch is not None
            numbers.setdefault((stage, op, int(paths[microbatch])), []).append(microbatch)
        if by_number and any(x != sorted(x) for x in numbers.values()):
            continue
        rank = {(stage, op, microbatch): k for k, (stage, op, microbatch, *_) in enumerate(order)}
        if all(
            rank[a, Op.F, m] < rank[b, Op.F, m] and rank[b, steps[1], m] < rank[a, steps[1], m]
            for a, b in placement.edges or ()
            for m in range(n_microbatches)
            if (a, Op.F, m) in rank and (b, Op.F, m) in rank
        ):
            orders.append(order)
    return orders


def interleaved(chains: tuple[tuple[Action, ...], ...]) -> Iterator[tuple[Action, ...]]:
    """Yield each order of all actions that keeps the order of each chain."""
    if not any(chains):
        yield ()
        return
    for k, chain in enumerate(chains):
        if chain:
            rest = (*chains[:k], chain[1:], *chains[k + 1 :])
            yield from ((chain[0], *tail) for tail in interleaved(rest))


def random_costs(rng: np.random.Generator, n_stages: int, split: bool) -> ps.Costs:
    """Return whole seconds and bytes of each stage, and messages of latency or bytes."""

    def some(low: int, high: int) -> list[float]:
        return [float(x) for x in rng.integers(low, high, n_stages)]

    activation = some(1, 4)
    weight = [float(rng.integers(0, 2 + a)) for a in activation]
    backward = {"input_grad": some(0, 9), "weight_grad": some(0, 9)} if split else {
        "backward": some(1, 12)}  # fmt: skip
    return ps.Costs(
        forward=some(1, 9),
        **backward,
        activation_bytes=activation,
        weight_grad_bytes=weight,
        parameter_bytes=some(0, 3),
        forward_workspace_bytes=float(rng.integers(0, 2)),
        backward_workspace_bytes=float(rng.integers(0, 2)),
        memory_reserve=float(rng.choice([0.0, 0.1])),
        optimizer_step=float(rng.integers(0, 3)),
        output_seconds=float(rng.choice([0, 0, 2, 4])),
        network=ps.Network(latency=float(rng.choice([0, 0, 1, 3]))),
    )  # fmt: skip


CASES = {
    "linear, any order": (ps.Placement.linear(2), 2, False, False),
    "linear": (ps.Placement.linear(2), 3, False, True),
    "linear split": (ps.Placement.linear(2), 2, True, True),
    "three devices": (ps.Placement.linear(3), 3, False, True),
    "v-shaped": (ps.Placement.v_shaped(2), 2, False, True),
    "looped": (ps.Placement.looped(2, 2), 2, False, True),
    "both directions": (ps.Placement.bidirectional(2), 2, False, False),
    "two pipelines": (ps.Placement([0, 0, 1, 1], edges=[(0, 2), (1, 3)]), 1, False, True),
    "two encoders": (ps.Placement([0, 0, 1], edges=[(0, 2), (1, 2)]), 1, True, True),
    "encoder beside": (ps.Placement([0, 1, 0, 1], edges=[(0, 2), (1, 2), (2, 3)]), 1, True, True),
    "replicas": (ps.Placement([0, 2, 2], [1, 2, 2], edges=[(0, 2), (1, 2)]), 2, False, True),
}


def spans(timeline: ps.Timeline) -> float:
    """Return the longest time of a device from its first start to its last end, without STEP."""
    graph, own = timeline.graph, timeline.graph.is_op(SCHEDULED)
    return max(
        float(timeline.end[own & (graph.device == d)].max())
        - float(timeline.start[own & (graph.device == d)].min())
        for d in range(graph.n_devices)
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_order_is_faster(case: str) -> None:
    """Makespan and span of every order, without a limit and with those that orders need.

    With one stage a device, the bound is the optimum in most of them.
    """
    placement, m, split, by_number = CASES[case]
    rng = np.random.default_rng(len(case))
    graphs = every_graph(placement, m, split, by_number)
    ratios: dict[str, list[float]] = {"makespan": [], "span": []}
    for _ in range(2 if EVERY_CASE else 1):
        costs = random_costs(rng, placement.n_stages, split)
        timelines = [ps.simulate(graph, costs) for graph in graphs]
        needed = np.array([(1 + costs.memory_reserve) * t.memory.peak.max() for t in timelines])
        makespans = np.array([t.makespan for t in timelines])
        lengths = np.array([spans(t) for t in timelines])
        for limit in (None, *rng.choice(np.unique(needed), 2)):
            fit = needed <= (np.inf if limit is None else limit)
            for best, objective in (
                (makespans[fit].min(), "makespan"),
                (lengths[fit].min(), "span"),
            ):
                bound = ps.lower_bound(
                    placement, m, costs, limit, split_backward=split, objective=objective
                )
                assert bound <= best
                ratios[objective].append(bound / best)
    if placement == ps.Placement.linear(placement.n_devices):
        for values in ratios.values():
            assert np.mean(values) >= 0.99
            assert np.mean(np.array(values) > 1 - 1e-9) >= 0.6
