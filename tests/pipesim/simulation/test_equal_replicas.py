"""Equal replicas are simulated once, with exactly the times of the full simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from kernels import compiled as all_compiled
from strategies import bandwidths, cases, host_links, networks, seconds

import pipesim as ps
from pipesim.costs import TaskCosts
from pipesim.lowering.lower import lower_replica
from pipesim.scheduling.placement import Layout
from pipesim.simulation import LogNormal
from pipesim.simulation.engines import compiled, simpy_engine
from pipesim.simulation.engines.plan import make_plan
from pipesim.simulation.equal_replicas import OneOfReplicas, SharedRoutes, run_equal_replicas_once

ENGINES = {"compiled": compiled.run, "simpy": simpy_engine.run}
#: Nodes of four devices, whose messages and reductions wait for ports and NICs.
NODES = ps.Nodes(4, port_bandwidth=2, nic_latency=0.5, nic_bandwidth=1)
COSTS = ps.Costs(
    1.0, 2.0, optimizer_step=0.5, output_bytes=3, parameter_bytes=5,
    network=ps.Network(nodes=NODES),
)  # fmt: skip


def simulated(engine: str, graph: ps.TaskGraph, tasks: TaskCosts) -> int:
    """Compare the reduction with the full simulation; return how many tasks it simulated."""
    sizes = []

    def run(graph: ps.TaskGraph, tasks: TaskCosts) -> Any:
        sizes.append(len(graph))
        return ENGINES[engine](graph, tasks)

    start, end = ENGINES[engine](graph, tasks)
    starts, ends = run_equal_replicas_once(run, graph, tasks)
    assert (starts == start).all()
    assert (ends == end).all()
    (size,) = sizes
    return size


@st.composite
def regular_networks(draw: st.DrawFn, per_copy: int, n_copies: int) -> ps.Network:
    """Networks that often look alike to all copies: nodes of a copy, or of parts or several."""
    kind = draw(st.sampled_from(["uniform", "nodes", "nodes", "any"]))
    if kind == "any":
        return draw(networks(per_copy * n_copies))
    if kind == "uniform":
        return ps.Network(draw(seconds), draw(bandwidths()))
    per_node = draw(st.sampled_from([per_copy, 1, 2, n_copies, 2 * per_copy]))
    n_nics = draw(st.sampled_from([k for k in range(1, per_node + 1) if per_node % k == 0]))
    latencies = {f"{end}_latency": draw(st.sampled_from([0.0, 1.0])) for end in ("port", "nic")}
    rates = st.sampled_from([1.0, 2.0, math.inf])
    nodes = ps.Nodes(
        per_node, n_nics=n_nics, port_bandwidth=draw(rates), nic_bandwidth=draw(rates), **latencies
    )
    return ps.Network(nodes=nodes)


@st.composite
def replicated_cases(draw: st.DrawFn) -> tuple[ps.TaskGraph, ps.Costs]:
    """Several replicas of any schedule, lowered in any way, with any costs."""
    n_replicas = draw(st.sampled_from([2, 3, 4]))
    graph, costs = draw(cases(n_replicas=n_replicas, step="flush"))
    network = draw(regular_networks(graph.n_devices // n_replicas, n_replicas))
    costs = replace(costs, network=replace(network, host=draw(host_links())))
    if draw(st.integers(0, 3)):
        costs = replace(costs, launch=0.0, launch_by_op=None)
    if draw(st.booleans()):  # everything competes
        costs = replace(costs, output_bytes=2.0, gradient_bytes=3.0, reduce_grad=None)
    return graph, costs


@pytest.mark.slow
@given(replicated_cases())
def test_times_are_those_of_the_full_simulation(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """On random schedules, modes, hosts and networks, whether or not replicas are equal."""
    graph, costs = case
    tasks = costs.of(graph)
    with all_compiled():
        size = simulated("compiled", graph, tasks)
        loops = compiled.run_in_one_pass(make_plan(graph, tasks)) is None
        event(f"reduced: {size < len(graph)}, requests for links out of order: {loops}")
        if len(graph) < 400:
            assert simulated("simpy", graph, tasks) == size


ALIKE: dict[str, dict[str, Any]] = {
    "reduced once": {},
    "reduced in buckets": {"grad_sync": "bucketed"},
    "reduced every time": {"grad_sync": "every"},
    "optimizer shared": {"shard_optimizer": True},
    "gathered late": {"shard_optimizer": True, "gather_parameters": "before_forward"},
    "parameters shared": {"shard_parameters": 1, "prefetch": 2},
    "recomputed": {"recompute": "except_last"},
    "blocking messages": {"overlap": False},
    "rendezvous": {"rendezvous": True},
    "a stream each micro-batch": {"streams": "per_microbatch"},
    "one copy stream": {"streams": "single"},
    "rows spread over replicas": {"sharded": [0]},
    "skips": {"skips": [(0, 3)]},
    "stages together": {"layout": "stage_major"},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", ALIKE.values(), ids=ALIKE)
def test_equal_replicas_run_once(options: dict[str, Any], engine: str) -> None:
    """One of four replicas is simulated, although all of them compete for links."""
    graph = ps.lower(ps.schedule("1f1b", 4, 4), n_replicas=4, hosts="per_device", **options)
    costs = replace(COSTS, launch=0.25, key_bytes=8, vector_bytes=8, skip_bytes=1)
    tasks = costs.of(graph)
    assert simulated(engine, graph, tasks) == len(graph) // 4
    free = replace(costs, network=costs.network.unlimited()).of(graph)
    assert ENGINES[engine](graph, tasks)[1].max() > ENGINES[engine](graph, free)[1].max()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bidirectional_pipeline_is_one_copy(engine: str) -> None:
    """The paths of a pipeline share its devices, and differ; the copies of both paths are equal."""
    graph = ps.lower(ps.schedule("chimera", 4, 4), n_replicas=3)
    assert graph.n_replicas == 6
    assert simulated(engine, graph, COSTS.of(graph)) == len(graph) // 3


@pytest.mark.parametrize("engine", ENGINES)
def test_reductions_compete_in_any_replica(engine: str) -> None:
    """The rings of two stages share a link of replica 1 alone, and wait for each other there.

    Device 2 and 3 have replica 1; their hops back to replica 0 share a link. Both backwards end at
    6 and at 8, and a reduction lasts 4 s.
    """
    link = ps.Link(0, 1, ((2, 0), (3, 1)))
    costs = ps.Costs(1, (2, 2), parameter_bytes=4, network=ps.Network(0, 1, (link,)))
    graph = ps.lower(ps.schedule("gpipe", 2, 2), n_replicas=2)
    assert simulated(engine, graph, costs.of(graph)) == len(graph) // 2
    timeline = ps.simulate(graph, costs, engine=engine)
    reductions = np.flatnonzero(timeline.graph.op == ps.Op.REDUCE_GRAD)
    times = sorted({(timeline.start[k], timeline.end[k]) for k in reductions.tolist()})
    assert times == [(7, 11), (11, 15)]


def lowered(**options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule("1f1b", 4, 4), n_replicas=4, **options)


def with_launch(**options: Any) -> tuple[ps.TaskGraph, TaskCosts]:
    graph = lowered(**options)
    return graph, replace(COSTS, launch=0.25).of(graph)


def over_network(network: ps.Network, **options: Any) -> tuple[ps.TaskGraph, TaskCosts]:
    graph = lowered(**options)
    return graph, replace(COSTS, network=network).of(graph)


def noisy(noise: ps.Noise) -> tuple[ps.TaskGraph, TaskCosts]:
    graph = lowered()
    return graph, noise.applied(graph, COSTS.of(graph))


def changed(**columns: Any) -> tuple[ps.TaskGraph, TaskCosts]:
    """One replica's stage has other costs."""
    graph = lowered()
    tasks = COSTS.of(graph)
    table = tasks.table._replace(**{k: getattr(tasks.table, k).copy() for k in columns})
    for name, value in columns.items():
        rows = (graph.kinds.replica == 2) & (graph.kinds.stage == 1)
        getattr(table, name)[rows & (graph.kinds.op == ps.Op.F)] = value
    return graph, replace(tasks, table=table)


def without_a_dependency() -> tuple[ps.TaskGraph, TaskCosts]:
    """A graph whose last STEP waits for one task less than the others."""
    graph = lowered()
    needs = graph.dependencies
    ptr = needs.ptr.copy()
    ptr[-1] -= 1
    graph = replace(graph, dependencies=type(needs)(ptr, needs.values[:-1]))
    return graph, COSTS.of(graph)


APART: dict[str, Callable[[], tuple[ps.TaskGraph, TaskCosts]]] = {
    "NIC of two replicas": lambda: over_network(
        ps.Network(nodes=ps.Nodes(4, port_bandwidth=2, nic_bandwidth=1, n_nics=1)),
        layout="stage_major",
    ),
    "link of two replicas": lambda: over_network(
        ps.Network(0, 2, (ps.Link(0, 1, ((0, 1), (4, 5))),))
    ),
    "slow link": lambda: over_network(ps.Network(0, 2, (ps.Link(0, 1, ((4, 5),)),))),
    "two messages of one replica on a link": lambda: over_network(
        ps.Network(0, 1, (ps.Link(0, 1, ((0, 1), (1, 2))),))
    ),
    "a message and a reduction on a link": lambda: over_network(
        ps.Network(0, 1, (ps.Link(0, 1, ((0, 1), (1, 5))),)), grad_sync="every"
    ),
    "one host": lambda: with_launch(),
    "host of two replicas": lambda: with_launch(hosts=[0] * 4 + [1] * 8 + [2] * 4),
    "other hosts in a replica": lambda: with_launch(hosts=[0, 0, 1, 1, *range(2, 14)]),
    "threads": lambda: with_launch(hosts="per_device", host_threads=True),
    "noise": lambda: noisy(ps.Noise(seed=1, task=LogNormal(0.1))),
    "a slow device": lambda: noisy(ps.Noise(seed=1, slow_devices={5: 1.5})),
    "other seconds": lambda: changed(duration=4.0),
    "other launches": lambda: changed(launch=4.0),
    "issue order": lambda: over_network(COSTS.network, issue_order="stage_major"),
    "dependency": without_a_dependency,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", APART.values(), ids=APART)
def test_different_replicas_all_run(
    make: Callable[[], tuple[ps.TaskGraph, TaskCosts]], engine: str
) -> None:
    """Anything that may tell replicas apart brings the full simulation."""
    graph, tasks = make()
    assert simulated(engine, graph, tasks) == len(graph)


def test_hosts_without_launches_tell_nothing_apart() -> None:
    """One host for all devices issues tasks at time 0 if launches take no time."""
    graph = lowered(hosts="one")
    assert simulated("compiled", graph, COSTS.of(graph)) == len(graph) // 4


@pytest.mark.parametrize("engine", ENGINES)
def test_simulate_runs_equal_replicas_once(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`simulate` gives the times of all replicas, with every other column of the timeline."""
    n_replicas, n_microbatches = (16, 64) if engine == "compiled" else (3, 4)
    graph = ps.lower(
        ps.schedule("eager_1f1b", 4, n_microbatches), n_replicas=n_replicas, hosts="per_device"
    )
    costs = replace(COSTS, launch=0.01)  # requests for links are out of order
    start, end = ENGINES[engine](graph, costs.of(graph))
    module = compiled if engine == "compiled" else simpy_engine
    run, sizes = module.run, []
    monkeypatch.setattr(module, "run", lambda g, c: (sizes.append(len(g)), run(g, c))[1])
    for _ in range(2):
        timeline = ps.simulate(graph, costs, engine=engine)
        assert (timeline.start == start).all()
        assert (timeline.end == end).all()
    assert sizes == [len(graph) // n_replicas] * 2
    assert len(timeline.frame) == len(graph)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev", "interleaved_1f1b"])
@pytest.mark.parametrize(
    "options",
    [
        {"shard_optimizer": False},
        {"shard_optimizer": True},
        {
            "shard_optimizer": True,
            "framework": ps.Framework(
                grad_sync="bucketed", gather_parameters="before_forward", messages="interleaved"
            ),
        },
        {"shard_optimizer": False, "shard_parameters": "every", "grad_sync": "every"},
        {"shard_optimizer": False, "shard_parameters": 1},
    ],
)
def test_replica_is_the_first_copy(name: str, options: dict[str, Any]) -> None:
    """A replica lowered alone has the tasks of the first of several, and their dependencies."""
    schedule = ps.schedule(name, 2, 6)
    alone = lower_replica(schedule, replicated=True, **options)
    copy = ps.lower(schedule, n_replicas=3, **options).first_copy
    assert copy is not None
    first = copy.graph
    assert alone.kinds == first.kinds
    assert alone.streams == first.streams
    for column in ("kind", "microbatch", "stream", "pair", "partial_dependency"):
        assert np.array_equal(getattr(alone, column), getattr(first, column)), column
    for rows in ("dependencies", "collectives", "precedence"):
        assert np.array_equal(getattr(alone, rows).ptr, getattr(first, rows).ptr), rows
        assert np.array_equal(getattr(alone, rows).values, getattr(first, rows).values), rows


@pytest.mark.parametrize("layout", ["stage_major", "replica_major"])
def test_one_replica_takes_the_times_of_all(layout: Layout) -> None:
    """One after the other: without and with gradients, of which only these hold links."""
    schedule = ps.schedule("1f1b", 2, 4)
    alone = lower_replica(schedule, replicated=True, shard_optimizer=False)
    graph = ps.lower(schedule, n_replicas=4, layout=layout)
    one = OneOfReplicas.make(alone, SharedRoutes(4, layout, COSTS.network), COSTS.all_reduce)
    assert one is not None
    first, n_compared = graph.replica == 0, 0
    for costs in (replace(COSTS, parameter_bytes=0), COSTS, replace(COSTS, output_bytes=0)):
        times, timeline = one.run(costs), ps.simulate(graph, costs)
        if times is not None:  # else nothing proves the replicas equal
            n_compared += 1
            assert sorted(times.start) == sorted(timeline.start[first])
            assert sorted(times.end) == sorted(timeline.end[first])
            assert times.busy * 4 == pytest.approx(timeline.busy.sum())
    assert n_compared >= 2
    assert one.run(replace(COSTS, launch=0.25)) is None, "the host issues those of others between"
