"""The order of a backward that nothing orders: recorded from torch, predicted, and run here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import DATA
from torch import nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import ArgumentError, ScheduleError, UnknownNameError
from pipesim.graph import AutogradGraph
from pipesim.ops import Op
from pipesim.scheduling.autograd_engine import engine_order

#: Of torchgpipe 0.0.7 on CPUs; `torchgpipe_orders.py` records them.
RECORDED = json.loads((DATA / "torchgpipe_orders.json").read_text())
pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
ORDERS = RECORDED["orders"]
WITHOUT = [case for case in ORDERS if not case["dependencies"]]


def name(case: dict[str, Any]) -> str:
    dependencies = "" if case["dependencies"] else "-without"
    return f"{case['m']}x{case['n']}-{case['checkpoint']}{dependencies}"


def n_recomputed(case: dict[str, Any]) -> int:
    m: int = case["m"]
    return {"always": m, "except_last": m - 1, "never": 0}[case["checkpoint"]]


def of_stages(order: str, n: int) -> list[list[str]]:
    """Return the actions of each stage, in order."""
    return [[action for action in order.split() if action.startswith(f"{j}")] for j in range(n)]


def after_forwards(graph: ps.TaskGraph) -> list[list[str]]:
    """Return R and B of each device, in the order of its stream."""
    computes = [
        [str(graph.task(int(k))) for k in graph.queues[number] if graph.op[k] in (Op.R, Op.B)]
        for number, (_, stream) in enumerate(graph.streams)
        if stream == "compute"
    ]
    assert len(computes) == graph.n_devices
    return computes


@pytest.mark.parametrize("case", ORDERS, ids=name)
def test_the_model_of_the_engine_is_what_torch_does(case: dict[str, Any]) -> None:
    """Every R and B of all stages, in one order."""
    order = engine_order(
        case["n"], case["m"], n_recomputed(case), dependencies=case["dependencies"]
    )
    assert " ".join(map(str, order)) == case["order"]


@pytest.mark.parametrize("case", WITHOUT, ids=name)
def test_a_schedule_is_lowered_to_it(case: dict[str, Any]) -> None:
    """R is listed for every micro-batch, and those are lowered that the mode has."""
    schedule = ps.schedule("gpipe", case["n"], case["m"], backward_order="autograd")
    graph = ps.lower(schedule, recompute=case["checkpoint"])
    assert after_forwards(graph) == of_stages(case["order"], case["n"])


@pytest.mark.slow
@pytest.mark.parametrize("case", WITHOUT, ids=name)
def test_a_module_runs_it(case: dict[str, Any]) -> None:
    """The tasks that are issued, and those of the graph."""
    m, n = case["m"], case["n"]
    model = px.GPipe(
        nn.Sequential(*(nn.Linear(1, 1) for _ in range(n))), [1] * n, devices=["cpu"] * n, chunks=m,
        checkpoint=case["checkpoint"], dependencies=False, threads=False,
    )  # fmt: skip
    for _ in range(2):  # the first step of a process may have another order
        model(torch.ones(m, 1)).sum().backward()
    assert model._last_call is not None
    issued = [f"{j}{op.name}{i}" for op, j, i in model._last_call.order]
    assert " ".join(issued) == case["order"]
    for graph in (model.graph(m), model.timeline().graph):
        assert after_forwards(graph) == of_stages(case["order"], n)
        assert graph.recompute == ("never" if m == 1 and case["checkpoint"] == "except_last"
                                   else case["checkpoint"])  # fmt: skip


#: Two steps of one layer in one partition, in a process that has made no other nodes.
TWO_STEPS = """
import torch, pipeexec as px
layer = torch.nn.Linear(1, 1)
model = px.GPipe(torch.nn.Sequential(layer), [1], devices=["cpu"], chunks=4, checkpoint="always",
                 dependencies=False, threads=False)
for _ in range(2):
    model(torch.ones(4, 1)).sum().backward()
    print(*(f"{op.name}{i}" for op, _, i in model._last_call.order))
"""


@pytest.mark.slow
def test_the_first_step_of_a_process_has_another_order() -> None:
    """R0, the second node of the caller's thread, is older than B1, B2 and B3 of the other's."""
    done = subprocess.run([sys.executable, "-c", TWO_STEPS], capture_output=True, text=True,
                          check=True, timeout=120)  # fmt: skip
    assert done.stdout.splitlines() == ["R3 R2 R1 B3 B2 B1 R0 B0", "R3 R2 R1 R0 B3 B2 B1 B0"]


@pytest.mark.parametrize(
    ("options", "has_choice"),
    [
        ({}, False),
        ({"dependencies": False, "backward_seed": 1}, False),
        ({"dependencies": False, "backward_order": ps.schedule("gpipe", 3, 4)}, False),
        ({"dependencies": False}, True),
    ],
)  # fmt: skip
def test_the_engine_has_a_choice_only_without_dependencies(
    options: dict[str, Any], has_choice: bool
) -> None:
    """Elsewhere the graph is a chain, whose order is imposed."""
    layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    model = px.GPipe(layers, [1] * 3, devices=["cpu"] * 3, chunks=4, **options)
    output = model(torch.ones(4, 1))
    graph = px.autograd_graph(output)
    output.sum().backward()
    assert graph.n_choices is not None
    assert (graph.n_choices > 0) == has_choice


def race(graph: AutogradGraph, draw: Callable[[list[int]], int]) -> tuple[tuple[str, ...], ...]:
    """Run a graph's nodes as the engine does with a thread a partition; ``draw`` has the next run.

    Each thread runs the newest of its ready nodes. Returns R and B of each partition in order.
    """
    waits = Counter(edge.target for edge in graph.edges)
    orders: list[list[str]] = [[], []]
    ready: list[list[int]] = [[], [0]]
    while partitions := [j for j in range(2) if ready[j]]:
        j = draw(partitions)
        node = max(ready[j], key=lambda k: graph.nodes[k].sequence or 0)
        ready[j].remove(node)
        orders[j] += map(str, graph.nodes[node].tasks)
        for edge in graph.edges:
            if edge.source == node:
                waits[edge.target] -= 1
                if not waits[edge.target]:
                    partition = graph.nodes[edge.target].partition
                    ready[j if partition is None else partition].append(edge.target)
    return tuple(map(tuple, orders))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_threads_that_race_take_the_orders_of_the_model(checkpoint: Any) -> None:
    """Threads are drawn at random: each order of `autograd_orders` comes, and no other."""
    model = px.GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=["cpu"] * 2,
                     chunks=3, checkpoint=checkpoint, dependencies=False)  # fmt: skip
    model(torch.ones(3, 1)).sum().backward()  # the first step may have another order
    graph, generator = px.autograd_graph(model(torch.ones(3, 1))), np.random.default_rng(0)
    raced = {race(graph, lambda js: int(generator.choice(js))) for _ in range(200)}
    possible = ps.autograd_orders(2, 3, COSTS, recompute=checkpoint)
    assert possible.is_exhaustive
    assert raced == {
        tuple(tuple(str(a) for a in order if a.op != Op.F) for order in schedule.orders)
        for schedule in possible.schedules
    }


def test_a_schedule_may_list_recomputes() -> None:
    """They are run where they are listed; a mode adds what is not listed, and drops what is."""
    orders = [["0F0", "0F1", "0R0", "0R1", "0B1", "0B0"]]
    schedule = ps.Schedule.from_orders(orders)
    assert ps.lower(schedule).recompute == "always"

    def lowered(orders: list[str], **options: Any) -> str:
        graph = ps.lower(ps.Schedule.from_orders([orders]), step="none", **options)
        return " ".join(str(graph.task(k)) for k in range(len(graph)))

    assert lowered(*orders) == "0F0 0F1 0R0 0R1 0B1 0B0"
    assert lowered(*orders, recompute="except_last") == "0F0 0F1 0R0 0B1 0B0"
    assert lowered(*orders, recompute="never") == "0F0 0F1 0B1 0B0"
    some = ["0F0", "0F1", "0R0", "0B1", "0B0"]
    assert lowered(some) == "0F0 0F1 0R0 0B1 0B0"
    assert lowered(some, recompute="always") == "0F0 0F1 0R0 0R1 0B1 0B0"
    early = ps.Schedule.from_orders([["0F0", "0F1", "0R1", "0B1", "0B0"]])
    assert ps.lower(early).recompute == "some"


def test_listed_recomputes_of_bidirectional_and_split_schedules_run() -> None:
    """Each right before its backward is what `lower` does by itself."""
    for base in (ps.schedule("chimera", 4, 4), ps.schedule("zb_h1", 3, 4)):
        orders = [
            [x for a in order for x in ([a._replace(op=Op.R), a] if a.op in (Op.B, Op.I) else [a])]
            for order in base.orders
        ]
        listed = ps.Schedule.from_orders(orders, placement=base.placement, name=base.name)
        for mode in ("always", "except_last", "never"):
            actual, wanted = ps.lower(listed, recompute=mode), ps.lower(base, recompute=mode)
            assert len(actual) == len(wanted)
            assert list(actual) == list(wanted)


def test_gradients_are_those_of_the_unsplit_model() -> None:
    """With recomputes listed where the engine puts them, in a pipeline of two stages."""
    torch.manual_seed(0)
    stages = [nn.Linear(3, 3).double(), nn.Linear(3, 2).double()]
    schedule = ps.schedule("gpipe", 2, 4, backward_order="autograd")
    inputs, targets = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    with px.Pipeline(stages, ps.lower(schedule), ["cpu"] * 2, nn.functional.mse_loss) as pipeline:
        pipeline.step(inputs, targets)
    gradients = [
        p.grad.clone() for stage in stages for p in stage.parameters() if p.grad is not None
    ]
    for stage in stages:
        stage.zero_grad()
    nn.functional.mse_loss(nn.Sequential(*stages)(inputs), targets).backward()
    wanted = [p.grad for stage in stages for p in stage.parameters()]
    torch.testing.assert_close(gradients, wanted)


def test_files_of_listed_recomputes(tmp_path: Path) -> None:
    """A grid has them; torch's CSV has no such action."""
    schedule = ps.schedule("gpipe", 2, 3, backward_order="autograd")
    schedule.save(tmp_path / "order.txt")
    assert ps.Schedule.load(tmp_path / "order.txt") == schedule
    with pytest.raises(ScheduleError, match=r"lists recomputes \(R\).*\.txt"):
        schedule.save(tmp_path / "order.csv")


COSTS = ps.Costs(
    forward=1, backward=2, output_bytes=1, activation_bytes=4, network=ps.Network(bandwidth=1)
)


def test_orders_where_threads_race() -> None:
    """Two devices, two micro-batches: by hand, the first has one R ahead or none."""
    orders = ps.autograd_orders(2, 2, COSTS)
    assert orders.is_exhaustive
    assert orders.n_possible == 2
    assert {tuple(map(str, schedule.orders[0][2:])) for schedule in orders.schedules} == {
        ("0R1", "0B1", "0R0", "0B0"), ("0R1", "0R0", "0B1", "0B0"),
    }  # fmt: skip
    for schedule in orders.schedules:
        assert [str(a) for a in schedule.orders[1][2:]] == ["1R1", "1R0", "1B1", "1B0"]
    assert orders.best.makespan == orders.makespans.min()
    assert orders.spread == orders.worst.makespan / orders.best.makespan - 1
    assert orders.table.loc["on a CPU", "makespan"] == orders.timelines[0].makespan


@pytest.mark.parametrize(("recompute", "m"), [("always", 3), ("except_last", 3), ("never", 3)])
def test_all_orders(recompute: Any, m: int) -> None:
    """Catalan's number a device; those that are drawn are among them."""
    every = ps.autograd_orders(2, m, COSTS, recompute=recompute, recompute_thread="caller")
    assert every.n_possible == (1 if recompute == "never" else (math.comb(6, 3) // 4) ** 2)
    assert every.is_exhaustive
    listed = [schedule.orders for schedule in every.schedules]
    assert len(set(listed)) == len(listed) == every.n_possible
    some = ps.autograd_orders(
        2, m, COSTS, recompute=recompute, recompute_thread="caller", n_orders=12, seed=1
    )
    assert {schedule.orders for schedule in some.schedules} <= set(listed)
    assert len(some.schedules) == min(12, every.n_possible)
    on_device = ps.autograd_orders(2, m, COSTS, recompute=recompute)
    assert {schedule.orders for schedule in on_device.schedules} <= set(listed)


def test_drawn_orders_are_equally_likely() -> None:
    """Of five orders of a device, each comes a fifth of the times."""
    from pipesim.analysis.autograd_orders import _drawn

    generator = np.random.default_rng(0)
    _, counts = np.unique([_drawn(3, 3, generator) for _ in range(5000)], axis=0,
                          return_counts=True)  # fmt: skip
    assert len(counts) == 5
    assert np.all(np.abs(counts - 1000) < 5 * math.sqrt(800))


def test_what_cannot_be_raced() -> None:
    with pytest.raises(ArgumentError, match="leave recompute_first out"):
        ps.autograd_orders(2, 2, COSTS, recompute_first=True)
    with pytest.raises(UnknownNameError, match="unknown recompute_thread 'gpu'"):
        ps.autograd_orders(2, 2, COSTS, recompute_thread="gpu")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="lists its recomputes"):
        ps.lower(ps.schedule("gpipe", 2, 2, backward_order="autograd"), recompute_first=True)


@pytest.mark.parametrize("dependencies", [True, False])
def test_a_recompute_may_wait_for_its_gradient(dependencies: bool) -> None:
    """Without copy streams a gradient is received first: in the graph, and by the module."""
    layers = [nn.Linear(2, 2) for _ in range(3)]
    options: dict[str, Any] = {"chunks": 3, "checkpoint": "always", "copy_streams": False}
    model = px.GPipe(nn.Sequential(*layers), [1, 1, 1], devices=["cpu"] * 3, recompute_waits=True,
                     dependencies=dependencies, threads=True, **options)  # fmt: skip
    model(torch.ones(6, 2)).sum().backward()
    timeline = model.timeline()
    graph = timeline.graph
    place = {str(graph.task(k)): k for k in range(len(graph))}
    for stage in range(2):
        for m in range(3):
            received, again = place[f"{stage}RECV_B{m}"], place[f"{stage}R{m}"]
            assert received < again
            assert timeline.end[received] <= timeline.start[again]
    with pytest.raises(ArgumentError, match="recompute_waits=True, but messages have copy streams"):
        px.GPipe(nn.Sequential(*layers), [3], devices=["cpu"], recompute_waits=True)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_module_runs_any_of_the_orders(checkpoint: Any) -> None:
    """The fastest and the slowest; what a graph lists is what is run."""
    orders = ps.autograd_orders(3, 4, COSTS, recompute=checkpoint, recompute_thread="caller")
    for wanted in (orders.best, orders.worst):
        schedule = orders.schedules[orders.timelines.index(wanted)]
        layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
        model = px.GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=4, checkpoint=checkpoint,
                         dependencies=False, backward_order=schedule, threads=False)  # fmt: skip
        model(torch.ones(4, 1)).sum().backward()
        for graph in (model.graph(4), model.timeline().graph):
            assert after_forwards(graph) == after_forwards(wanted.graph)
        with pytest.raises(ArgumentError, match="has 4 micro-batches, but the mini-batch makes 3"):
            model(torch.ones(3, 1))


def test_orders_that_no_module_follows() -> None:
    def refused(schedule: ps.Schedule, words: str, **options: Any) -> None:
        with pytest.raises(ArgumentError, match=words):
            px.GPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"],
                     backward_order=schedule, **{"dependencies": False, **options})  # fmt: skip

    one = ps.schedule("gpipe", 1, 2)
    refused(ps.schedule("gpipe", 2, 2), "of 2 stages on 2 devices, but there are 1 partitions")
    refused(ps.schedule("zb_h1", 1, 2), "whose backwards are split or overlap")
    refused(one, "that has no other order", dependencies=True)
    refused(one, "that has no other order", backward_seed=1)
    refused("gpipe", "backward_order must be a pipesim.Schedule")  # type: ignore[arg-type]
