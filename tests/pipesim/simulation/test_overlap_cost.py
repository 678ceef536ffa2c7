"""Compute beside collectives lasts longer: by hand, by pairs of tasks, in both engines."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import cases, noises

import pipesim as ps
from pipesim.errors import CostsError
from pipesim.ops import COLLECTIVES, COMPUTE, Op
from pipesim.plot.page.timeline_columns import simulation_inputs
from pipesim.simulation import Normal
from pipesim.simulation.engines import compiled
from pipesim.simulation.equal_replicas import run_equal_replicas_once
from pipesim.simulation.overlap_cost import run_twice

RATE = 210e9
#: A stage of two replicas that reduce gradients after each micro-batch.
GRAPH = ps.lower(ps.schedule("gpipe", 1, 2), n_replicas=2, grad_sync="every")


def costs(bandwidth: float = RATE, **changes: Any) -> ps.Costs:
    """Return costs of `GRAPH`; each of two members of an all-reduce sends all of its bytes."""
    network = ps.Network(bandwidth=bandwidth)
    return ps.Costs(1, 2, parameter_bytes=RATE, network=network, **{"overlap_cost": 0.43} | changes)


@pytest.mark.parametrize("engine", ["compiled", "simpy"])
@pytest.mark.parametrize(
    ("bandwidth", "last", "makespan"),
    [
        (RATE, 2 + 0.43, 6.43 + 1),
        (2 * RATE, 2 + 0.43 / 2, 6.215 + 0.5),  # no more than 0.43 is lost
        (RATE / 2, 2 + 0.43 / 2 * 2, 6.43 + 2),
        (RATE / 8, 2 + 0.43 / 8 * 2, 4 + 8 + 8),  # the last B is hidden behind the reduction
    ],
)
def test_by_hand(engine: str, bandwidth: float, last: float, makespan: float) -> None:
    """A reduction runs behind the second B.

    At 210 GB/s it takes 1 s, of which B loses 0.43 s::

        compute     F0 F1 B0 B0 B1 B1
        collective              RG    RG
    """
    timeline = ps.simulate(GRAPH, costs(bandwidth), engine=engine)
    assert timeline.duration[GRAPH.op == Op.B] == pytest.approx([2, 2, last, last])
    assert timeline.makespan == pytest.approx(makespan)
    alone = ps.lower(ps.schedule("gpipe", 1, 2), n_replicas=2, grad_sync="every", overlap=False)
    free = ps.simulate(alone, costs(bandwidth, overlap_cost=0.0))
    assert ps.simulate(alone, costs(bandwidth)).makespan == free.makespan


@pytest.mark.parametrize(
    ("op", "options"),
    [
        (Op.REDUCE_GRAD, {}),
        (Op.REDUCE_GRAD, {"shard_optimizer": True}),
        (Op.UNSHARD, {"shard_optimizer": True}),
        (Op.ALL_TO_ALL, {"expert_layers": 1}),
        (Op.REDUCE_TIED, {"tied": [(0, 3)]}),
    ],
)
def test_rates_of_collectives(op: Op, options: dict[str, Any]) -> None:
    """Each member of a ring, or of an all-to-all, sends at the bandwidth of its link."""
    graph = ps.lower(ps.schedule("gpipe", 4, 4), n_replicas=4, **options)
    sizes = {"dispatch_bytes": 8.0, "combine_bytes": 8.0, "tied_bytes": 8.0}
    table = costs(RATE / 2, expert_replicas=4, **sizes).of(graph).table
    assert table.overlap_cost is not None
    own = table.overlap_cost[graph.kinds.op == op]
    assert own == pytest.approx(np.full(len(own), 0.43 / 2))
    assert len(own) > 0
    assert (table.overlap_cost[~graph.kinds.is_op(COLLECTIVES)] == 0).all()


@pytest.mark.slow
@given(st.data())
def test_seconds_by_pairs_of_tasks(data: st.DataObject) -> None:
    """On random graphs, both engines add what all pairs of compute and a collective add up to."""
    graph, of_stages = data.draw(cases())
    tasks = of_stages.of(graph)
    if data.draw(st.booleans()):
        tasks = data.draw(noises(graph)).applied(graph, tasks)
    free = ps.simulate(graph, tasks)
    lost = np.array(data.draw(st.lists(st.sampled_from([0, 0.25, 1]), min_size=len(Op))))
    by_kind = np.where(graph.kinds.is_op(COLLECTIVES), lost[graph.kinds.op], 0.0)
    by_row = by_kind if tasks.row is graph.kind else by_kind[graph.kind]
    tasks = replace(tasks, table=tasks.table._replace(overlap_cost=by_row))

    timeline = ps.simulate(graph, tasks)
    simpy = ps.simulate(graph, tasks, engine="simpy")
    assert (timeline.start == simpy.start).all()
    assert (timeline.end == simpy.end).all()
    expected = np.zeros(len(graph))
    cost = by_kind[graph.kind]
    for task in np.flatnonzero(graph.is_op(COMPUTE)):
        for other in np.flatnonzero((cost > 0) & (graph.device == graph.device[task])):
            both = min(free.end[task], free.end[other]) - max(free.start[task], free.start[other])
            expected[task] += cost[other] * max(0.0, both)
    computes = graph.is_op(COMPUTE)
    added = timeline.duration - free.duration
    np.testing.assert_allclose(added[computes], expected[computes], atol=1e-9)
    moves = graph.is_op(COLLECTIVES)
    np.testing.assert_allclose(added[moves], 0, atol=1e-9)
    run = partial(run_twice, compiled.run)
    start, end = run_equal_replicas_once(run, graph, tasks)
    assert (start == timeline.start).all()
    assert (end == timeline.end).all()


def test_scenarios_and_costs_of_tasks() -> None:
    """They have the times of `simulate`; a replay adds no cost once more."""
    noise = ps.Noise(task=Normal(0.1), message=Normal(0.2), seed=0)
    many = ps.simulate_many(GRAPH, costs(), noise, 5, progress=False)
    steps = [ps.simulate(GRAPH, costs(), noise=noise, scenario=k) for k in range(5)]
    assert many.makespan.tolist() == [step.makespan for step in steps]
    bubbles = [step.bubble_fraction for step in steps]
    np.testing.assert_allclose(many.bubble_fraction, bubbles, atol=1e-12)
    again = ps.simulate(GRAPH, costs().of(GRAPH).per_task())
    timeline = ps.simulate(GRAPH, costs())
    assert again.makespan == timeline.makespan
    assert ps.replay(timeline).makespan == pytest.approx(timeline.makespan)


def test_bounds_and_pages_know_longer_tasks() -> None:
    """A bound is one of tasks that have no cost. A page replays times that it cannot compute."""
    timeline = ps.simulate(GRAPH, costs())
    free = ps.simulate(GRAPH, costs(overlap_cost=0.0))
    assert timeline.why.lower_bound == free.why.lower_bound == free.makespan
    assert simulation_inputs(timeline).is_replay
    assert not simulation_inputs(free).is_replay


def test_costs_of_a_framework() -> None:
    """FSDP overlaps gathers and reductions; the best case is free."""
    model = ps.Transformer.preset("llama3_8b", n_layers=4)
    built = {
        name: model.costs([2, 2], gpu="h100_sxm", microbatch_size=1, framework=name).overlap_cost
        for name in (None, "llm_foundry_2023", "megatron_2021")
    }
    assert built == {None: 0.0, "llm_foundry_2023": 0.43, "megatron_2021": 0.0}
    with pytest.raises(CostsError, match=r"overlap_cost must be 0 to 1.*got 1.5"):
        ps.Costs(1, 2, overlap_cost=1.5)
