"""The task graph: dependencies, pairs, queues, and the views on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import dependencies
from strategies import graphs

import pipesim as ps
from pipesim.errors import ArgumentError, CapacityError, GraphError, UnknownNameError
from pipesim.graph import Tasks
from pipesim.graph.graph import TaskGraph
from pipesim.graph.rules import PAIRS, RULES
from pipesim.graph.tasks import StreamKind
from pipesim.ops import RECVS, SENDS, Action, Op
from pipesim.utils.csr import CSR


@pytest.mark.slow
@given(graphs())
def test_dependencies_are_rule_3(graph: ps.TaskGraph) -> None:
    """The table of rules, against the rules written out task by task."""
    actual = [graph.dependencies[task].tolist() for task in range(len(graph))]
    assert [set(needed) for needed in actual] == dependencies(graph)
    assert all(len(needed) == len(set(needed)) for needed in actual)


def test_dependencies_by_hand() -> None:
    """Rule 3 on two stages and one micro-batch, recomputed and split in halves."""
    orders = [["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]]
    graph = ps.lower(ps.Schedule.from_orders(orders), recompute="always")
    actual = {
        str(graph.task(task)): sorted(str(graph.task(int(n))) for n in graph.dependencies[task])
        for task in range(len(graph))
    }
    assert actual == {
        "0F0": [],
        "0SEND_F0": ["0F0"],
        "1RECV_F0": [],
        "1F0": ["1RECV_F0"],
        "0R0": ["0F0"],
        "1R0": ["1F0"],
        "1I0": ["1F0", "1R0"],
        "1SEND_B0": ["1I0"],
        "1W0": ["1I0"],
        "0RECV_B0": [],
        "0I0": ["0F0", "0R0", "0RECV_B0"],
        "0W0": ["0I0"],
        "0STEP": ["0W0"],
        "1STEP": ["1W0"],
    }


def test_stages_of_one_device_hand_over_for_free() -> None:
    """Rule 4: no message between the two stages of the fold of a V."""
    orders = [["0F0", "1F0", "1B0", "0B0"]]
    graph = ps.lower(ps.Schedule.from_orders(orders), step="none")
    assert [str(graph.task(t)) for t in range(len(graph))] == ["0F0", "1F0", "1B0", "0B0"]
    assert graph.dependencies[1].tolist() == [0]
    assert sorted(graph.dependencies[3].tolist()) == [0, 2]


@settings(max_examples=20)
@given(graphs())
def test_tasks_and_rows(graph: ps.TaskGraph) -> None:
    """A graph iterates over the tasks of its frame, which has the rows of a timeline's."""
    frame = graph.frame
    assert [task.id for task in graph] == frame.index.tolist()
    for name in ("device", "stream", "stage"):
        assert [getattr(task, name) for task in graph] == frame[name].tolist()
    assert [task.op.name for task in graph] == frame["op"].tolist()
    assert [-1 if t.microbatch is None else t.microbatch for t in graph] == list(
        frame["microbatch"]
    )
    assert [graph[k] for k in range(len(graph))] == list(graph)
    times = ps.Timeline(graph, *np.zeros((3, len(graph)))).all_rows()
    assert times.drop(columns=["start", "end", "nbytes"]).equals(frame)


@given(graphs())
def test_pairs(graph: ps.TaskGraph) -> None:
    """A SEND and its RECV know each other, and cross from one device to another."""
    transfers = graph.is_op(SENDS | RECVS)
    assert (graph.pair[~transfers] == -1).all()
    messages = np.flatnonzero(transfers)
    assert (graph.pair[graph.pair[messages]] == messages).all()
    assert (graph.device[messages] != graph.device[graph.pair[messages]]).all()
    for task in np.flatnonzero(graph.is_op(RECVS)):
        recv, send = graph.task(int(task)), graph.task(int(graph.pair[task]))
        op, offset = PAIRS[recv.op]
        peer = recv.peer_stage  # of an edge that is no step of a chain
        ends = (peer, recv.stage) if peer >= 0 else (recv.stage + offset, -1)
        assert send.action == Action(ends[0], op, recv.microbatch, ends[1])


@given(graphs())
def test_queues(graph: ps.TaskGraph) -> None:
    """Every task is on one stream of its device, in the order of the ids (rule 1)."""
    assert sorted(graph.queues.values.tolist()) == list(range(len(graph)))
    for number, (device, _) in enumerate(graph.streams):
        queue = graph.queues[number]
        assert (graph.device[queue] == device).all()
        assert (graph.stream[queue] == number).all()
        assert (np.diff(queue) > 0).all()
        before = [-1, *queue.tolist()[:-1]]
        assert graph.queue_predecessor[queue].tolist() == before


@given(graphs())
def test_ids_are_topological(graph: ps.TaskGraph) -> None:
    """Whatever a task waits for has a smaller id and a lower level."""
    waits = graph.precedence
    assert (waits.values < waits.rows).all()
    assert (graph.levels[waits.values] < graph.levels[waits.rows]).all()
    assert (graph.levels >= 0).all()


@pytest.mark.slow
@given(graphs())
def test_task_views(graph: ps.TaskGraph) -> None:
    """A view says what the columns say."""
    for index in range(0, len(graph), 7):
        task = graph.task(index)
        assert task.id == index
        assert task.op == graph.op[index]
        assert graph.streams[graph.stream[index]] == (task.device, task.stream)
        assert (task.microbatch is None) == (graph.microbatch[index] == -1)
        assert str(task) == str(task.action) == str(Action.parse(str(task)))
        assert graph.on_compute[index] == (task.stream == "compute")
        assert graph.homes[task.replica, task.stage] == task.device


def test_view_of_no_task() -> None:
    """Beyond the end, before the start, and what is no number."""
    graph = ps.lower(ps.schedule("gpipe", 1, 1))
    with pytest.raises(ArgumentError, match="no task 3 in a graph of 3 tasks"):
        graph.task(3)
    with pytest.raises(ArgumentError, match="task id must be at least 0, got -1"):
        graph.task(-1)
    with pytest.raises(ArgumentError, match=r"task id must be a whole number, got 0\.5"):
        graph.task(0.5)  # type: ignore[arg-type]


def test_names_and_repr() -> None:
    """What tables and prompts show."""
    graph = ps.lower(ps.schedule("1f1b", 2, 3), recompute="always")
    assert graph.name == "1f1b"
    assert graph.with_name("mine").name == "mine"
    assert repr(graph) == (
        f"<TaskGraph 1f1b: {len(graph)} tasks, 2 devices, 2 stages, 3 micro-batches, "
        "recompute=always>"
    )
    assert len(graph) == 2 * 3 * 3 + 2 * (2 * 3) + 2  # F B R; a SEND and a RECV each way; STEP


@pytest.mark.slow
@given(graphs())
def test_build_mends_the_order(graph: ps.TaskGraph) -> None:
    """Tasks given device by device are put into an order that is topological."""
    by_stream = [StreamKind.code(graph.streams[s][1]) for s in graph.stream]
    columns = (
        *(graph.op, graph.device, graph.stage, graph.microbatch),
        *(np.array(by_stream), graph.replica, graph.kinds.overlapped[graph.kind]),
        *(graph.peer_stage, graph.part),
    )
    order = np.argsort(graph.stream, kind="stable")
    shuffled = Tasks(*(column[order] for column in columns))
    kept = ("rendezvous", "n_batches", "grad_sync", "tied", "edges")
    same = {name: getattr(graph, name) for name in kept}
    again = TaskGraph.build(shuffled, **same)
    ps.verify(again)
    for rebuilt, other in zip(range(len(again.queues)), range(len(graph.queues)), strict=True):
        assert [str(again.task(t)) for t in again.queues[rebuilt]] == [
            str(graph.task(t)) for t in graph.queues[other]
        ]


#: F and B of one micro-batch, of the first of two stages, and what runs on the second device.
COLUMNS = {
    "op": [Op.F, Op.F, Op.B, Op.B, Op.STEP],
    "device": [0, 1, 1, 0, 1],
    "stage": [0, 1, 1, 0, 1],
    "microbatch": [0, 0, 0, 0, -1],
    "stream": [StreamKind.COMPUTE] * 5,
    "replica": [0] * 5,
}


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        pd.Series,
        lambda column: pd.Series(column, dtype="Int64"),
        lambda column: np.array(column, dtype=object),
        lambda column: np.array(column, dtype=np.int8),
        lambda column: np.array(column, dtype=np.int8)[::-1][::-1],
    ],
)
def test_columns_are_any_integers(convert: Callable[[list[int]], Any]) -> None:
    """Lists, series and small integers make the graph that arrays of 64 bits make."""
    arrays = {name: np.array(column, dtype=np.int64) for name, column in COLUMNS.items()}
    wanted = TaskGraph.build(Tasks(**arrays))
    graph = TaskGraph.build(
        Tasks(**{name: convert(column) for name, column in COLUMNS.items()}),
        group=convert([-1] * 5),
    )
    assert [graph.task(t) for t in range(5)] == [wanted.task(t) for t in range(5)]
    assert graph.dependencies.values.tolist() == wanted.dependencies.values.tolist()
    assert graph.streams == wanted.streams == ((0, "compute"), (1, "compute"))
    ps.verify(graph)


def test_small_integers_do_not_overflow() -> None:
    """Streams 127 and -2 are 129 apart, which is -127 in 8 bits: 3 of the device before."""
    columns = ([Op.F] * 3, [63, 62, 0], [0, 0, 1], [0, 1, 0], [127, 1, -2])
    graph = TaskGraph.build(Tasks(*(np.array(column, np.int8) for column in columns)))
    assert graph.streams == ((0, "collective"), (62, "send:0"), (63, "send:63"))


def test_tasks_without_any() -> None:
    """Empty lists, which numpy takes for floats."""
    assert len(TaskGraph.build(Tasks([], [], [], [], []))) == 0  # type: ignore[arg-type]


def changed(name: str, row: int, value: object) -> dict[str, Any]:
    """Return a column with another value in one row."""
    column: list[Any] = list(COLUMNS[name])
    column[row] = value
    return {name: column}


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (changed("op", 2, 20), "row 2: op must be 0 to 19, got 20; operations are 0 F, 1 B"),
        (changed("op", 2, -1), "row 2: op must be 0 to 19, got -1"),
        (changed("device", 3, -1), "row 3: device must be 0 to 2147483646, got -1; number them f"),
        (changed("device", 3, 10**30), f"row 3: device must be 0 to 2147483646, got {10**30}"),
        (changed("stage", 1, -1), "row 1: stage must be 0 to 2147483646, got -1"),
        (changed("stage", 1, 2**31 - 1), "row 1: stage must be 0 to 2147483646, got 2147483647"),
        (changed("replica", 4, -1), "row 4: replica must be 0 to 2147483646, got -1"),
        (changed("microbatch", 4, -2), "row 4: microbatch must be -1 to 2147483646, got -2"),
        (
            changed("microbatch", 3, -1),
            r"row 3: microbatch is -1, but B of stage 0 is of one micro-batch; .*\(only REDUCE_GR",
        ),
        (changed("stream", 0, 11), "row 0: stream must be -6 to 4, got 11; there are 2 devices, t"),
        (changed("stream", 1, 5), r"row 1: stream must be -6 to 4, got 5; .* stream is recv:1;"),
        (changed("stream", 1, -7), "row 1: stream must be -6 to 4, got -7"),
        (changed("stage", 1, 0.5), r"row 1: stage must be an integer, got 0\.5 \(float\); give"),
        (changed("stage", 1, "1"), r"row 1: stage must be an integer, got '1' \(str\)"),
        (changed("stage", 1, None), "row 1: stage must be an integer, got None"),
        ({"op": np.zeros(5)}, r"row 0: op must be an integer, got .*0\.0.*float64"),
        ({"op": np.zeros(5, dtype=bool)}, "row 0: op must be an integer, got .*False"),
        ({"op": np.full(5, 2**64 - 1, np.uint64)}, f"row 0: op must be 0 to 19, got {2**64 - 1}"),
        ({"op": None}, "column 'op' must be a sequence of integers, one a task, got None"),
        ({"op": 3}, "column 'op' must be a sequence of integers, one a task, got 3"),
        ({"op": "FFBBW"}, "column 'op' must be a sequence of integers, one a task, got 'FFBBW'"),
        ({"op": [[0], [1, 2]]}, "column 'op' must be a sequence of integers"),
        ({"op": np.zeros((5, 1), int)}, "column 'op' must be a sequence of integers"),
        (
            {"stage": [0, 1]},
            r"columns differ in length \(.*'device': 5, 'stage': 2, .*; give one v",
        ),
        ({"group": [-1]}, "columns differ in length .*'group': 1"),
        ({"group": [-1, -1, -1, -1, -2]}, "row 4: group must be -1 to .*, got -2; give -1 to tas"),
        ({"group": [-1, -1, -1, -1, 0.0]}, r"row 4: group must be an integer, got 0\.0"),
    ],
)
def test_bad_columns(column: dict[str, Any], message: str) -> None:
    """The error names column, row, value and allowed values, for either way to build a graph."""
    columns = {**COLUMNS, **column}
    group = columns.pop("group", None)
    for make in (TaskGraph.build, TaskGraph.wire):
        with pytest.raises(GraphError, match=message):
            make(Tasks(**columns), group=group)


def test_numbers_far_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 32 bits each, but together beyond memory, or beyond what can be told apart."""
    monkeypatch.setattr("pipesim.utils.host_memory.available_memory", lambda: 10**10)
    with pytest.raises(CapacityError, match=r"stages to 2147483646 and .*from 0, without gaps"):
        TaskGraph.build(Tasks(**{**COLUMNS, **changed("stage", 4, 2**31 - 2)}))
    far = {"device": [0, 10**6] * 2, "stage": [0, 10**6] * 2, "stream": [0, 2 * 10**6] * 2}
    tasks = Tasks(op=[0, 1] * 2, microbatch=[0] * 4, replica=[0, 3] * 2, **far)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="devices to 1000000, of stages to 1000000 and of replic"):
        TaskGraph.build(tasks)


def test_no_tasks_at_all() -> None:
    """Columns that are in nothing."""
    with pytest.raises(GraphError, match=r"a graph is wired from pipesim\.graph\.Tasks, got list"):
        TaskGraph.build([[0], [0], [0], [0], [0]])  # type: ignore[arg-type]


def test_rules_cover_the_operations() -> None:
    """An operation without a row has no dependencies, which has to be meant."""
    by_hand = {op for rule in RULES for op in rule.ops}
    on_messages = set(PAIRS)  # a RECV waits for its SEND, as rule 4 says
    not_lowered_yet = {Op.ALL_TO_ALL}
    assert by_hand | on_messages | not_lowered_yet == set(Op)
    assert {send for send, _ in PAIRS.values()} == SENDS
    assert set(PAIRS) == RECVS


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))), st.permutations(range(6)))
def test_csr(pairs: list[tuple[int, int]], wanted: list[int]) -> None:
    """Rows, their values in order, the transpose, and several rows at once."""
    rows, values = (np.array([p[k] for p in pairs], dtype=np.int64) for k in (0, 1))
    csr = CSR.from_pairs(rows, values, 6)
    listed = [[v for r, v in pairs if r == row] for row in range(6)]
    assert [csr[row].tolist() for row in range(6)] == listed
    assert len(csr) == 6
    assert sorted(zip(csr.rows.tolist(), csr.values.tolist(), strict=True)) == sorted(pairs)
    across = csr.transpose()
    assert [across[v].tolist() for v in range(6)] == [
        sorted(r for r, x in pairs if x == v) for v in range(6)
    ]
    chosen = np.array(wanted[:3], dtype=np.int64)
    assert csr.gather(chosen).tolist() == [v for row in wanted[:3] for v in listed[row]]


@pytest.mark.parametrize("peer", [0, 1, 17])
def test_stream_names(peer: int) -> None:
    """A stream's name and its code are inverse, as timelines need them when they are loaded."""
    for name in ("compute", "copy", f"send:{peer}", f"recv:{peer}"):
        assert StreamKind.name(StreamKind.code(name)) == name


def test_unknown_hosts() -> None:
    """A graph of one's own has hosts of a known kind too."""
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(UnknownNameError, match=r"unknown hosts 'two' \(known: one, per_device\)"):
        TaskGraph.build(Tasks(one, one, one, one, one), hosts="two")  # type: ignore[arg-type]


def test_graphs_share_no_arrays_that_can_be_written() -> None:
    """Writing to the arrays of a graph fails, or changes no other graph of its schedule."""
    schedule = ps.schedule("1f1b", 2, 3)
    costs = ps.Costs(forward=1.0, backward=2.0, output_bytes=1.0, network=ps.Network(bandwidth=1.0))
    for n_replicas in (1, 2):
        before = ps.lower(schedule, n_replicas=n_replicas)
        makespan, homes = ps.simulate(before, costs).makespan, before.homes.tolist()
        graph = ps.lower(schedule, n_replicas=n_replicas)
        kinds = [getattr(graph.kinds, x.name) for x in fields(graph.kinds)]
        for array in (*kinds, graph.homes, graph.device_of_stage, graph.kinds.streams[1]):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0
        for name, array in vars(graph).items():
            if isinstance(array, np.ndarray):
                assert array.flags.writeable, name
                array[:] = 0
        after = ps.lower(schedule, n_replicas=n_replicas)
        assert after.homes.tolist() == homes
        assert ps.simulate(after, costs).makespan == makespan
        assert ps.simulate(before, costs).makespan == makespan
