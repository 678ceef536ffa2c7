"""The order of tasks of `px.GPipe`, its task graph, and the bytes of messages."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
from gpipe_models import (
    CPUS,
    MODES,
    Pop,
    Stash,
    batch,
    check_same,
    dense,
    plain_step,
    sequential,
    step,
)
from hypothesis import given
from hypothesis import strategies as st
from small_pipelines import assert_order_respected
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.gpipe.backward_order import clock_cycles
from pipesim.ops import Op

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.usefixtures("one_torch_thread"),
]


def test_clock_cycles_by_hand() -> None:
    """Four micro-batches, three partitions."""
    assert list(clock_cycles(4, 3)) == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1), (0, 2)],
        [(3, 0), (2, 1), (1, 2)],
        [(3, 1), (2, 2)],
        [(3, 2)],
    ]


@given(st.integers(1, 9), st.integers(1, 9))
def test_clock_cycles_run_everything_once_in_order(m: int, n: int) -> None:
    cycles = list(clock_cycles(m, n))
    assert len(cycles) == m + n - 1
    assert sorted(x for cycle in cycles for x in cycle) == [
        (i, j) for i in range(m) for j in range(n)
    ]
    assert all(i + j == k for k, cycle in enumerate(cycles) for i, j in cycle)


@pytest.mark.parametrize("checkpoint", MODES)
def test_the_backward_is_the_forward_turned_around(checkpoint: Any) -> None:
    """With dependencies: the order of the graph, and a recompute before it, if any."""
    model = px.GPipe(sequential("dense"), [1, 2, 1], devices=CPUS, chunks=4, checkpoint=checkpoint)
    step(model, batch())
    timeline, graph = model.timeline(), model.graph(8)
    assert timeline.complete
    assert list(graph) == list(timeline.graph)
    n_recomputed = {"always": 4, "except_last": 3, "never": 0}[checkpoint]
    assert int((graph.op == Op.R).sum()) == 3 * n_recomputed
    for device in range(3):
        backward = [
            k for k in range(len(graph)) if graph.op[k] == Op.B and graph.device[k] == device
        ]
        started = sorted(backward, key=lambda k: timeline.start[k])
        assert [int(graph.microbatch[k]) for k in started] == [3, 2, 1, 0]
    assert ps.simulate(graph, ps.Costs(1, 2)).makespan > 0


@pytest.mark.parametrize("checkpoint", MODES)
def test_without_dependencies_recomputes_come_early(checkpoint: Any) -> None:
    """In the last partition all R before any B, elsewhere one micro-batch ahead."""
    model = px.GPipe(
        sequential("dense"), [1, 2, 1],
        devices=CPUS, chunks=4, checkpoint=checkpoint, dependencies=False,
    )  # fmt: skip
    step(model, batch())
    order = ["R3", "R2", "B3", "R1", "B2", "R0", "B1", "B0"]
    last = ["R3", "R2", "R1", "R0", "B3", "B2", "B1", "B0"]
    dropped = {"always": [], "except_last": ["R3"], "never": ["R3", "R2", "R1", "R0"]}[checkpoint]
    assert [backward_of(model, j).split() for j in range(3)] == [
        [task for task in tasks if task not in dropped] for tasks in (order, order, last)
    ]
    assert model.timeline().complete


def backward_of(model: px.GPipe, partition: int) -> str:
    """Return recomputes and backwards of a partition in the order in which they began."""
    timeline = model.timeline()
    graph = timeline.graph
    tasks = [
        k for k in range(len(graph))
        if graph.device[k] == partition and graph.op[k] in (Op.R, Op.B)
    ]  # fmt: skip
    tasks.sort(key=lambda k: (timeline.start[k], timeline.end[k]))
    return " ".join(f"{Op(graph.op[k]).name}{graph.microbatch[k]}" for k in tasks)


def test_without_dependencies_an_order_can_be_drawn() -> None:
    """Each partition has its own; the same seed gives the same, and gradients are the same."""
    plain = sequential("dense")

    def orders(seed: int, **options: Any) -> list[str]:
        model = px.GPipe(
            copy.deepcopy(plain), [1, 2, 1], devices=CPUS, chunks=8, backward_seed=seed, **options
        )
        step(model, batch())
        check_same(model, once)
        return [backward_of(model, j) for j in range(3)]

    once = copy.deepcopy(plain)
    plain_step(once, batch(), 8)
    drawn = orders(0, dependencies=False)
    assert drawn == orders(0, dependencies=False)
    assert drawn != orders(1, dependencies=False)
    assert len(set(drawn)) == 3
    assert [sorted(text.split()) for text in drawn] == [sorted(drawn[0].split())] * 3
    ordered = orders(0)
    assert ordered == orders(1)
    assert ordered[0].split()[-4:] == ["R1", "B1", "R0", "B0"]


@pytest.mark.slow
@pytest.mark.parametrize("dependencies", [True, False])
@pytest.mark.parametrize("copy_streams", [True, False])
@pytest.mark.parametrize("portals", [True, False])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_step_is_that_of_its_graph(
    dependencies: bool, copy_streams: bool, portals: bool, seed: int | None
) -> None:
    """Messages of skips included, every task runs behind those that the graph has before it."""
    model = px.GPipe(
        sequential("skips"), [1, 4, 2, 1], devices=CPUS, chunks=4, dependencies=dependencies,
        copy_streams=copy_streams, portals=portals, backward_seed=seed,
    )  # fmt: skip
    step(model, batch(requires_grad=True))
    timeline = model.timeline()
    assert timeline.complete
    assert_order_respected(timeline)
    graph = model.graph(8)
    assert list(graph) == list(timeline.graph)
    assert (timeline.graph.skips, timeline.graph.portals) == (((0, 3), (1, 2)), portals)
    costs = ps.Costs.from_timeline(timeline, skip_bytes={(0, 3): 48, (1, 2): 48})
    assert ps.simulate(timeline.graph, costs).makespan > 0


def test_portals_remove_the_copies_between() -> None:
    """Two micro-batches of a skip from the first partition to the last, 96 bytes each."""

    def messages(**options: Any) -> dict[str, float]:
        model = px.GPipe(
            nn.Sequential(Stash(), *dense(2), Pop()), [1, 1, 1, 1],
            devices=CPUS, chunks=2, **options,
        )  # fmt: skip
        step(model, batch(requires_grad=True))
        timeline = model.timeline()
        return {
            str(timeline.graph.task(k)): float(timeline.nbytes[k])
            for k in range(len(timeline))
            if timeline.graph.peer_stage[k] >= 0
        }

    straight = "0SEND_F{i}>3 3RECV_F{i}<0 3SEND_B{i}>0 0RECV_B{i}<3"
    hops = (
        "0SEND_F{i}>1 1RECV_F{i}<0 1SEND_B{i}>0 0RECV_B{i}<1 "
        "1SEND_F{i}>2 2RECV_F{i}<1 2SEND_B{i}>1 1RECV_B{i}<2 "
        "2SEND_F{i}>3 3RECV_F{i}<2 3SEND_B{i}>2 2RECV_B{i}<3"
    )
    for portals, tasks in ((True, straight), (False, hops)):
        names = {name for i in range(2) for name in tasks.format(i=i).split()}
        assert messages(portals=portals) == dict.fromkeys(names, 96.0)


def test_bytes_of_a_skip_are_those_of_the_largest_micro_batch() -> None:
    """Of seven samples in three micro-batches the last one has a single sample."""
    model = px.GPipe(
        nn.Sequential(Stash(), *dense(1), Pop()), [1, 1, 1], devices=CPUS[:3], chunks=3
    )
    model(batch(7))
    assert model.skip_bytes() == {(0, 2): 3 * 6 * 4}


def test_a_recompute_does_not_wait_for_its_gradient() -> None:
    """The backward of the last partition waits for a recompute of the first, which comes."""
    recomputed, came = threading.Event(), []

    class Tells(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if px.is_recomputing():
                recomputed.set()
            return x

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            if y.requires_grad:
                y.register_hook(lambda _: came.append(recomputed.wait(10)))
            return y

    model = px.GPipe(
        nn.Sequential(nn.Linear(6, 6), Tells(), nn.Linear(6, 6), Waits()), [2, 2],
        devices=CPUS, chunks=2, checkpoint="always", threads=True,
    )  # fmt: skip
    step(model, batch())
    assert came == [True, True]
    timeline = model.timeline()
    task_ids = {str(timeline.graph.task(k)): k for k in range(len(timeline))}
    assert timeline.start[task_ids["0B1"]] >= timeline.end[task_ids["1B1"]]


def test_bytes_of_messages() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=2)
    step(model, batch())
    timeline = model.timeline()
    is_message = timeline.graph.pair >= 0
    assert (timeline.nbytes[is_message] == 4 * 6 * 4).all()
