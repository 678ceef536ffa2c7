"""The compiled engine: it agrees with SimPy's, exactly, on every graph.

``make fuzz`` runs this file with more graphs: FUZZ_EXAMPLES says how many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawing import draw, grid, times
from hypothesis import event, given, settings
from hypothesis import strategies as st
from kernels import as_python, compiled, every_kernel
from rules import all_reduced, assert_rules_hold
from strategies import Lowering, cases, costs, lowerings, noises, unequal_cases

import pipesim as ps
from pipesim.costs import CostTable, TaskCosts
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import StreamKind, Tasks
from pipesim.ops import COLLECTIVES, SENDS, Op
from pipesim.simulation import LogNormal
from pipesim.simulation.engines import compiled as engine
from pipesim.simulation.engines import simpy_engine
from pipesim.simulation.engines.plan import make_plan, shared_links

#: Graphs of each of the three largest comparisons.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))
ENGINES = ("compiled", "simpy")


def assert_engines_agree(graph: ps.TaskGraph, costs: TaskCosts) -> ps.Timeline:
    """Compare every start and end with ``==``: both loops, compiled and as Python, and SimPy's."""
    start, end = simpy_engine.run(graph, costs)
    plan = make_plan(graph, costs)
    for mode in (compiled, as_python):
        with mode():
            loop, one_pass = engine.run_event_loop(graph, plan), engine.run_in_one_pass(plan)
        event(f"one pass suffices: {one_pass is not None}")
        for starts, ends in (loop, one_pass or loop):
            assert (starts == start).all()
            assert (ends == end).all()
    return ps.Timeline(graph, start, end)


def describe(graph: ps.TaskGraph, costs: TaskCosts) -> None:
    """Note what an example has, for the statistics."""
    shared = shared_links(graph, costs)
    most = int((shared >= 0).sum(axis=1).max())
    event(f"transfers wait for at most {most} links")
    event(f"replicas: {graph.n_replicas}")
    event(f"rendezvous: {graph.rendezvous}")
    event(f"launch: {bool(costs.launch.any())}")


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(st.one_of(cases(), unequal_cases()))
def test_engines_agree(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """On random schedules, replicas, costs, networks, streams, rendezvous and hosts."""
    graph, of_stages = case
    tasks = of_stages.of(graph)
    describe(graph, tasks)
    assert_rules_hold(assert_engines_agree(graph, tasks), tasks)


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)  # the test above has as many graphs again
@given(st.data())
def test_engines_agree_on_noise(data: st.DataObject) -> None:
    """Each task lasts what it draws, sometimes nothing at all."""
    graph, of_stages = data.draw(cases())
    noise = data.draw(noises(graph))
    tasks = noise.applied(graph, of_stages.of(graph), data.draw(st.integers(0, 9)))
    describe(graph, tasks)
    assert_rules_hold(assert_engines_agree(graph, tasks), tasks)


@pytest.mark.slow
@given(st.data())
def test_engines_agree_on_costs_of_tasks(data: st.DataObject) -> None:
    """A row of costs a task, as `replay` makes them: duration, latency, launch and links."""
    graph, of_stages = data.draw(cases())
    tasks = of_stages.of(graph)
    few = st.integers(0, 3).map(float)

    def values(marked: Any) -> np.ndarray:
        drawn = data.draw(st.lists(few, min_size=len(graph), max_size=len(graph)))
        return np.where(marked, drawn, 0.0)

    everything = np.ones(len(graph), dtype=bool)
    table = CostTable(
        duration=values(~graph.is_op(COLLECTIVES)),
        latency=values(graph.pair >= 0),
        launch=values(everything) if data.draw(st.booleans()) else np.zeros(len(graph)),
        nbytes=tasks.nbytes,
        links=tasks.links,
    )
    # Both ends of a message have one latency.
    table.latency[:] = np.maximum(
        table.latency, np.where(graph.pair >= 0, table.latency[graph.pair], 0)
    )
    assert_rules_hold(
        assert_engines_agree(graph, TaskCosts.of_tasks(table)), TaskCosts.of_tasks(table)
    )


@pytest.mark.slow
@given(
    waits=st.integers(0, 4),
    options=st.fixed_dictionaries(
        {"hosts": st.sampled_from(["one", "per_device"]), "rendezvous": st.booleans()}
    ),
    data=st.data(),
)
def test_engines_agree_on_a_collective_of_two_stages(
    waits: int, options: dict[str, Any], data: st.DataObject
) -> None:
    """A graph built by hand, whose collective is not that of one stage's replicas."""
    graph = all_reduced(**options)
    tasks = replace(data.draw(costs(2, 2)), forward=(1.0, float(waits))).of(graph)
    assert_rules_hold(assert_engines_agree(graph, tasks), tasks)


@pytest.mark.slow
@given(case=lowerings(), data=st.data())
def test_kernels_say_the_same_as_python(case: Lowering, data: st.DataObject) -> None:
    """Lowering, verifying, simulating and counting memory: compiled, and not."""
    schedule, options = case
    of_stages = data.draw(costs(schedule.n_stages, schedule.n_devices * options["n_replicas"]))
    answers = []
    for mode in (compiled, as_python):
        with mode():
            graph = replace(ps.lower(schedule, **options))
            timeline = ps.simulate(graph, of_stages)
            columns = [graph.kind, graph.microbatch, graph.pair, graph.levels, graph.group]
            columns += [
                x for csr in (graph.dependencies, graph.queues) for x in (csr.ptr, csr.values)
            ]
            columns += [timeline.start, timeline.end, timeline.busy, timeline.memory.peak]
            answers.append(columns)
    for one, other in zip(*answers, strict=True):
        assert one.dtype == other.dtype
        assert (one == other).all()


def test_every_kernel_is_found() -> None:
    """So that "every kernel" above means it."""
    names = {kernel.__name__ for kernel in every_kernel()}
    assert {
        "_group",
        "_fill_levels",
        "_wire",
        "_index_tasks",
        "issue_tasks",
        "_lists_all",
    } <= names
    assert {"one_pass", "one_pass_batched", "prune", "event_loop", "fill_issue_times"} <= names
    assert "_balances" in names


@pytest.mark.slow
def test_engines_agree_on_a_large_graph() -> None:
    """Some 20,000 tasks, with and without contention."""
    engine.one_pass.compile()
    engine.event_loop.compile()
    schedule = ps.schedule("1f1b", 8, 300)
    assert len(schedule) == 4800
    shared = ps.Network(nodes=ps.Nodes(4, port_bandwidth=8, nic_bandwidth=4, n_nics=1))
    noise = ps.Noise(seed=1, task=LogNormal(0.1), message=LogNormal(0.3))
    for network in (ps.Network(latency=0.1, bandwidth=4), shared):
        graph = ps.lower(schedule, recompute="always", hosts="per_device")
        of_stages = ps.Costs(
            1.0, 2.0, launch=0.01, output_bytes=2, activation_bytes=5, network=network
        )
        assert len(graph) == 4800 + 2400 + 4 * 7 * 300 + 8
        fast, slow = (ps.simulate(graph, of_stages, engine=name, noise=noise) for name in ENGINES)
        assert (fast.start == slow.start).all()
        assert (fast.end == slow.end).all()
        assert (fast.memory.peak == slow.memory.peak).all()
        held = fast.memory().groupby("device")["nbytes"].max()
        assert fast.memory.peak.tolist() == held.tolist()


# Contention, drawn by hand


def messages(
    routes: Sequence[tuple[int, int, int, int]], network: ps.Network
) -> tuple[ps.TaskGraph, TaskCosts]:
    """Return a graph of single messages, ``(sender, receiver, asked at, seconds)`` each.

    Every message is a pipeline: an F that lasts until the message is ready, and
    an F at the other end that takes no time. Ids follow the order of ``routes``.
    """
    columns = []
    for replica, (sender, receiver, _, _) in enumerate(routes):
        columns += [
            (Op.F, sender, 0, StreamKind.COMPUTE, replica),
            (Op.SEND_F, sender, 0, StreamKind.send(np.int64(receiver)), replica),
            (Op.RECV_F, receiver, 1, StreamKind.recv(np.int64(sender)), replica),
            (Op.F, receiver, 1, StreamKind.COMPUTE, replica),
        ]
    op, device, stage, stream, replica = np.array(columns, dtype=np.int64).T
    graph = TaskGraph.build(Tasks(op, device, stage, np.zeros_like(op), stream, replica))
    drawn = np.zeros(len(graph))
    for number, (_, _, start, seconds) in enumerate(routes):
        drawn[4 * number : 4 * number + 2] = start, seconds
    of_graph = ps.Costs(1, 1, output_bytes=1, network=network).of(graph)
    return graph, replace(of_graph, drawn=drawn)


#: Nodes of four devices behind one NIC each way: device 0 to 3, 4 to 7, and so on.
NICS = ps.Network(nodes=ps.Nodes(4, nic_bandwidth=1, n_nics=1))


@pytest.mark.parametrize("name", ENGINES)
def test_transfer_waits_for_both_nics(name: str) -> None:
    """Rule 8: 1 to 13 needs the NIC out of node 0, busy until 4, and that into 3, until 6.

    While it waits, the NIC out of node 0 stands idle from 4 to 6, although 2 to 5, which asked at
    3, could have it: nobody overtakes in any queue. 9 to 6 asked before 2 to 5 and has other NICs
    than 1 to 13, but for the one out of node 2, which is busy until 6.
    """
    graph, tasks = messages(
        [(0, 4, 1, 3), (8, 12, 1, 5), (1, 13, 2, 2), (9, 6, 2, 1), (2, 5, 3, 1)], NICS
    )
    timeline = ps.simulate(graph, tasks, engine=name)
    assert draw(timeline, rows="send") == grid("""
        0 send:4  | .. F0 F0 F0 .. .. .. .. ..
        1 send:13 | .. .. .. .. .. .. F0 F0 ..
        2 send:5  | .. .. .. .. .. .. .. .. F0
        8 send:12 | .. F0 F0 F0 F0 F0 .. .. ..
        9 send:6  | .. .. .. .. .. .. F0 .. ..
    """)


@pytest.mark.parametrize("name", ENGINES)
def test_transfers_of_one_moment_by_id(name: str) -> None:
    """Rule 8: 3 to 7 and 2 to 5 ask at 3 for the same NICs; 3 to 7 has the smaller id."""
    graph, tasks = messages([(0, 4, 1, 3), (3, 7, 3, 1), (2, 5, 3, 1), (1, 6, 2, 1)], NICS)
    timeline = ps.simulate(graph, tasks, engine=name)
    assert draw(timeline, rows="send") == grid("""
        0 send:4 | .. F0 F0 F0 .. .. ..
        1 send:6 | .. .. .. .. F0 .. ..
        2 send:5 | .. .. .. .. .. .. F0
        3 send:7 | .. .. .. .. .. F0 ..
    """)


@pytest.mark.parametrize("name", ENGINES)
def test_transfers_of_one_moment_in_different_queues(name: str) -> None:
    """Rule 8: the tie of three at 1, of which the first and the last have no NIC in common.

    0 to 4 and 9 to 12 go at once. 1 to 13 waits for both, and 8 to 5, whose NICs are free only
    when 0 to 4 and 9 to 12 have left them, does not wait for it.
    """
    graph, tasks = messages([(0, 4, 1, 2), (1, 13, 1, 1), (9, 14, 1, 4), (8, 5, 1, 1)], NICS)
    timeline = ps.simulate(graph, tasks, engine=name)
    assert draw(timeline, rows="send") == grid("""
        0 send:4  | .. F0 F0 .. .. .. .. .. ..
        1 send:13 | .. .. .. F0 .. .. .. .. ..
        8 send:5  | .. .. .. .. .. .. .. .. F0
        9 send:14 | .. .. .. .. F0 F0 F0 F0 ..
    """)


@pytest.mark.parametrize("name", ENGINES)
def test_ports_inside_a_node_wait_for_nics(name: str) -> None:
    """A message between nodes holds its ports too: 0 to 1 waits for 0 to 4, and 3 to 2 does not."""
    network = ps.Network(nodes=ps.Nodes(4, port_bandwidth=8, nic_bandwidth=1, n_nics=1))
    graph, tasks = messages([(0, 4, 1, 3), (0, 1, 1, 1), (2, 5, 2, 1), (3, 2, 2, 1)], network)
    timeline = ps.simulate(graph, tasks, engine=name)
    assert draw(timeline, rows="send") == grid("""
        0 send:1 | .. .. .. .. F0
        0 send:4 | .. F0 F0 F0 ..
        2 send:5 | .. .. .. .. F0
        3 send:2 | .. .. F0 .. ..
    """)


@st.composite
def routes(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Draw messages for `messages` between eight devices, of few different moments."""
    ends = st.permutations(range(8)).map(lambda devices: devices[:2])
    moments = st.tuples(st.integers(0, 6), st.integers(0, 4))
    return [(*draw(ends), *draw(moments)) for _ in range(draw(st.integers(1, 9)))]


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(routes(), st.sampled_from([1, 2, 4]))
def test_engines_agree_on_messages(sent: list[tuple[int, int, int, int]], n_nics: int) -> None:
    """Many messages of few moments, each of which may hold a port and a NIC at both ends."""
    nodes = ps.Nodes(4, port_bandwidth=1, nic_bandwidth=1, n_nics=n_nics)
    graph, tasks = messages(sent, ps.Network(nodes=nodes))
    describe(graph, tasks)
    assert_rules_hold(assert_engines_agree(graph, tasks), tasks)


# Replicas, drawn by hand

#: Two stages on one device, twice; the second replica's takes twice as long (device 1).
STACK = ps.Schedule.from_orders([["0F0", "1F0", "1B0", "0B0"]])
SLOW = ps.Noise(seed=0, slow_devices={1: 2.0})
#: An all-reduce of two lasts 2 (2 - 1) / 2 * 2 bytes / 1 = 2 seconds.
REDUCED = ps.Costs(1, 1, optimizer_step=1, parameter_bytes=2, network=ps.Network(bandwidth=1))


@pytest.mark.parametrize("name", ENGINES)
def test_reduction_waits_for_the_slower_replica(name: str) -> None:
    """Rule 9: 1B0 ends at 3 and at 6; stage 0's backward runs beside the reduction."""
    graph = ps.lower(STACK, n_replicas=2)
    timeline = ps.simulate(graph, REDUCED, engine=name, noise=SLOW)
    assert draw(timeline) == grid("""
        0            | 0F0 1F0 1B0 0B0 ..  ..  ..  ..  ..  ..  ST  ST  ..  ..
        0 collective | ..  ..  ..  ..  ..  ..  RG  RG  RG  RG  ..  ..  ..  ..
        1            | 0F0 0F0 1F0 1F0 1B0 1B0 0B0 0B0 ..  ..  ST  ST  ST  ST
        1 collective | ..  ..  ..  ..  ..  ..  RG  RG  RG  RG  ..  ..  ..  ..
    """)


@pytest.mark.parametrize("name", ENGINES)
def test_reduction_without_overlap(name: str) -> None:
    """Rule 5: the reduction keeps stage 0's backward waiting."""
    graph = ps.lower(STACK, n_replicas=2, overlap=False)
    timeline = ps.simulate(graph, REDUCED, engine=name, noise=SLOW)
    assert draw(timeline) == grid("""
        0 | 0F0 1F0 1B0 ..  ..  ..  RG  RG  0B0 ..  RG  RG  ST  ST  ..  ..
        1 | 0F0 0F0 1F0 1F0 1B0 1B0 RG  RG  0B0 0B0 RG  RG  ST  ST  ST  ST
    """)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("shortest", "starts"), [(0.0, 4), (4.0, 7)])
def test_collective_with_a_member_of_no_time_holds_nothing(
    name: str, shortest: float, starts: int
) -> None:
    """Stage 1's reduction is there at 3, stage 0's at 4: both hold the NICs of their nodes."""
    nodes = ps.Nodes(2, nic_bandwidth=1, n_nics=1)
    graph = ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=2, step="none")
    tasks = ps.Costs(1, 1, parameter_bytes=2, network=ps.Network(nodes=nodes)).of(graph)
    is_reduction = graph.op == Op.REDUCE_GRAD
    duration = np.where(is_reduction, 4.0, tasks.duration)
    duration[is_reduction & (graph.stage == 1) & (graph.replica == 0)] = shortest
    timeline = ps.simulate(graph, replace(tasks, drawn=duration), engine=name)
    assert timeline.start[is_reduction & (graph.stage == 1)].tolist() == [3, 3]
    assert timeline.start[is_reduction & (graph.stage == 0)].tolist() == [starts, starts]


@pytest.mark.parametrize("name", ENGINES)
def test_step_waits_for_the_reduction_of_its_stage(name: str) -> None:
    """Device 3, which holds stage 1 of the second replica, takes twice as long."""
    graph = ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=2)
    noise = ps.Noise(seed=0, slow_devices={3: 2.0})
    timeline = ps.simulate(graph, REDUCED, engine=name, noise=noise)
    assert draw(timeline, rows="^.$|coll") == grid("""
        0            | F0 .. .. B0 .. .. .. .. ST
        0 collective | .. .. .. .. .. .. RG RG ..
        1            | .. F0 B0 .. .. .. .. ST ..
        1 collective | .. .. .. .. .. RG RG .. ..
        2            | F0 .. .. .. .. B0 .. .. ST
        2 collective | .. .. .. .. .. .. RG RG ..
        3            | .. F0 F0 B0 B0 .. .. ST ST
        3 collective | .. .. .. .. .. RG RG .. ..
    """)
    assert times(ps.simulate(ps.lower(STACK), REDUCED), "0STEP") == (4, 5)  # nothing to reduce


def test_members_of_a_collective_last_the_same() -> None:
    """What a collective draws, it draws once: its members end together."""
    graph = ps.lower(ps.schedule("1f1b", 2, 3), n_replicas=3)
    noise = ps.Noise(seed=3, message=LogNormal(0.5), task=LogNormal(0.2))
    timeline = ps.simulate(graph, REDUCED, noise=noise)
    assert len(graph.collectives) == 2
    ends = [timeline.end[graph.collectives[k]] for k in range(2)]
    assert [len(np.unique(end)) for end in ends] == [1, 1]
    lasts = timeline.duration[graph.is_op(COLLECTIVES)]
    assert len(np.unique(lasts.round(9))) == 2
    assert not graph.is_op(SENDS)[graph.collectives.values].any()


# Without numba

#: Prints the answers of three processes, forked before numba is loaded: with it, then without.
_SCRIPT = """
import json, os, sys, warnings
import pipesim as ps
from pipesim.utils import jit

for way in ("enabled", "disabled", "missing"):
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0
else:
    sys.exit()
os.environ["NUMBA_DISABLE_JIT"] = "1" if way == "disabled" else "0"
if way == "missing":
    sys.modules["numba"] = None  # makes `import numba` fail
answers = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for nodes in (None, ps.Nodes(2, port_bandwidth=2, nic_bandwidth=1, n_nics=1)):
        graph = ps.lower(ps.schedule("1f1b", 4, 16), recompute="always", n_replicas=2)
        network = ps.Network(nodes=nodes)
        costs = ps.Costs(1, 2, launch=.01, output_bytes=1, parameter_bytes=1, network=network)
        draw = ps.simulation
        noise = ps.Noise(seed=5, task=draw.LogNormal(.1), device=draw.Normal(.1), gpus_per_device=2,
                         message=draw.Normal(.1), failures=draw.Failures(100, 3))
        timeline = ps.simulate(graph, costs, noise=noise, scenario=1)
        many = ps.simulate_many(graph, costs, noise, 3, n_jobs=2, progress=False)
        answers.append([timeline.start.tolist(), timeline.end.tolist(), many.makespan.tolist(),
                        many.bubble_fraction.round(12).tolist(), timeline.memory.peak.tolist()])
print(json.dumps({"available": jit.available(), "numba": bool(sys.modules.get("numba")),
                  "answers": answers, "warnings": [w.category.__name__ for w in caught],
                  "texts": [str(w.message) for w in caught],
                  "files": [w.filename for w in caught]}))
"""


@pytest.mark.slow
def test_without_numba() -> None:
    """Switched off or missing: a warning, and the same answers to the last bit."""
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    with_numba, *without = map(json.loads, done.stdout.splitlines())
    assert len(without) == 2
    assert with_numba["available"]
    assert with_numba["numba"]
    assert with_numba["warnings"] == []
    for python in without:
        assert not python["available"]
        assert not python["numba"]
        assert python["answers"] == with_numba["answers"]
        assert set(python["warnings"]) == {"EngineWarning"}
        assert "numba is missing or switched off; SimPy's engine serves" in python["texts"][0]
        assert python["files"][0] == "<string>", "the warning points at who called simulate"


def test_simpys_engine_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    """Who asks for it gets it."""
    ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), ps.Costs(1, 2), engine="simpy")
    assert not recwarn.list


def test_one_pass_makes_tasks_wait_for_links() -> None:
    """Outputs and gradients share a NIC, and ask for it in order of their ids."""
    graph = ps.lower(ps.schedule("1f1b", 4, 8))
    nodes = ps.Nodes(1, port_latency=0, port_bandwidth=4, nic_latency=0, nic_bandwidth=4, n_nics=1)
    of_stages = ps.Costs(1.0, 2.0, output_bytes=6, network=ps.Network(nodes=nodes))
    tasks = of_stages.of(graph)
    times = engine.run_in_one_pass(make_plan(graph, tasks))
    assert times is not None
    assert (times[0] == simpy_engine.run(graph, tasks)[0]).all()
    alone = replace(tasks, table=tasks.table._replace(links=np.full_like(tasks.table.links, -1)))
    assert times[1].max() > simpy_engine.run(graph, alone)[1].max()
