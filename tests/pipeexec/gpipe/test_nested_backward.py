"""No task of a backward is issued within another one, whatever the autograd engine does."""

from __future__ import annotations

import json
import threading
from functools import partial
from typing import Any

import pytest
import torch
from places import HELPERS
from ranks import run_to_end
from small_pipelines import call_within
from torch import Tensor

from pipeexec.gpipe import backward_order
from pipeexec.gpipe.backward_order import (
    TaskIssuer,
    _Tasks,
    link_backward,
    link_tasks,
    unordered_backward,
)
from pipesim.ops import Op

Task = tuple[Op, int, int]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run backwards on a device that has a thread of the engine's own, in another process."""
    program = str(HELPERS / "device_thread.py")
    statuses, (output,) = run_to_end([[program]], tmp_path_factory.mktemp("ran"))
    assert statuses == [0], output
    results: dict[str, Any] = json.loads(output)
    return results


@pytest.mark.slow
def test_the_device_has_a_thread(ran: dict[str, Any]) -> None:
    """Else the test below would show nothing."""
    assert ran["threads"]
    assert "MainThread" not in ran["threads"]


@pytest.mark.slow
def test_no_backward_is_issued_within_another(ran: dict[str, Any]) -> None:
    """Of one call none; of two calls only where the gradient of an input is needed before."""
    for case in ran["found"]:
        deepest = 2 if case["calls"] == 2 and case["input_grad"] else 1
        assert case["deepest"] <= deepest, case
        assert case["worst"] < 1e-5, case


@pytest.mark.slow
def test_orders_are_those_of_the_dependencies(ran: dict[str, Any]) -> None:
    """By clock cycles from the last one on; without dependencies as the engine happens to run."""
    for case in ran["found"]:
        cells = [[j, i] for j in (1, 0) for i in range(case["chunks"])]
        cycles = sorted(cells, key=lambda cell: (-sum(cell), -cell[0]))
        for order in case["orders"]:
            assert order == cycles if case["dependencies"] else sorted(order) == sorted(cells)
            assert all(order.index([1, i]) < order.index([0, i]) for i in range(case["chunks"]))


class Recorder:
    """Notes the tasks that it issues; some have others come while they are being issued."""

    def __init__(self, nested: dict[Task, Any] | None = None) -> None:
        self.issued: list[Task] = []
        self.nested = nested or {}
        self.depth = self.deepest = 0

    def begin(self, gradients: Any) -> bool:
        """Take gradients, and return that of the input."""
        return True

    def forget(self) -> None:
        """Drop nothing."""

    def leaf_gradients(self) -> list[Tensor | None]:
        assert self.depth == 0, "within a task of its own"
        return [torch.full((2,), float(len(self.issued)))]

    def issue(self, op: Op, i: int, j: int) -> None:
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)
        self.issued.append((op, i, j))
        self.nested.get((op, i, j), lambda: None)()
        self.depth -= 1


@pytest.mark.parametrize("returns_gradients", [False, True])
def test_tasks_that_come_while_one_is_issued_wait(returns_gradients: bool) -> None:
    """Also those of another call; all are issued in the order in which they came."""
    order: list[str] = []
    other = TaskIssuer(Recorder({(Op.B, 0, 0): lambda: order.append("other")}), False)
    recorder = Recorder(
        {
            (Op.B, 2, 0): lambda: (
                first.issue_or_queue([(Op.B, 1, 0)]),
                other.issue_or_queue([(Op.B, 0, 0)]),
                first.issue_or_queue([(Op.R, 0, 0), (Op.B, 0, 0)]),
                order.append("first"),
            )
        }
    )
    first = TaskIssuer(recorder, returns_gradients)
    first.issue_or_queue([(Op.R, 2, 0), (Op.B, 2, 0)])
    assert recorder.issued == [
        (Op.R, 2, 0), (Op.B, 2, 0), (Op.B, 1, 0), (Op.R, 0, 0), (Op.B, 0, 0)
    ]  # fmt: skip
    assert order == ["first", "other"]
    assert recorder.deepest == 1
    assert not backward_order._QUEUES


def test_a_failure_leaves_no_queue() -> None:
    """Queued tasks are dropped, as the engine drops later nodes; the next run starts empty."""

    def fail() -> None:
        issuer.issue_or_queue([(Op.B, 0, 0)])
        raise ZeroDivisionError

    subject = Recorder({(Op.B, 1, 0): fail})
    for returns_gradients in (False, True):
        issuer = TaskIssuer(subject, returns_gradients)
        subject.issued.clear()
        with pytest.raises(ZeroDivisionError):
            issuer.issue_or_queue([(Op.B, 1, 0)])
        assert not backward_order._QUEUES
        issuer.issue_or_queue([(Op.B, 2, 0)])
        assert subject.issued == [(Op.B, 1, 0), (Op.B, 2, 0)]


def _output(recorder: Recorder, x: Tensor, m: int = 3) -> Tensor:
    """Return an output whose backward issues a B a micro-batch."""
    leave = link_backward(
        recorder,
        (x,),
        partial(link_tasks, unordered_backward(1, [False] * m, None)),
    )
    return leave([(torch.ones(1, 2),)] * m)[0]


def test_the_gradient_of_an_input_comes_after_all_tasks() -> None:
    """Of a second call in the same run of the engine, whose tasks wait behind one of the first."""
    x, z = (torch.ones(2, requires_grad=True) for _ in range(2))
    second = Recorder()
    graph: list[Any] = []

    def run_nodes() -> None:
        """Run all nodes of the second call within a task of the first, as the engine may."""
        for _ in range(3):
            _Tasks.backward(graph[0], None)  # type: ignore[no-untyped-call]
            graph[0] = graph[0].next_functions[0][0]
        assert second.issued == []
        gradients.extend(graph[0].apply(None))

    gradients: list[Any] = []
    first = Recorder({(Op.B, 2, 0): run_nodes})
    output = _output(second, z)  # keeps the nodes
    assert output.grad_fn is not None
    output.grad_fn.issuer.returns_gradients = True  # type: ignore[attr-defined]
    graph.append(output.grad_fn.next_functions[0][0])
    _output(first, x).sum().backward()
    assert second.issued == [(Op.B, i, 0) for i in (2, 1, 0)]
    assert gradients[-1].tolist() == [3.0, 3.0]  # all three were issued before
    assert first.issued == [(Op.B, i, 0) for i in (2, 1, 0)]
    assert x.grad is not None
    assert not backward_order._QUEUES


def test_the_gradient_of_an_input_does_not_come_within_a_task_of_its_call() -> None:
    """Of a second call whose first node alone runs within a task of the first call."""
    z = torch.ones(2, requires_grad=True)
    node: Any = None
    is_running = False
    gradients: list[Any] = []

    def run_next_node() -> None:
        """Run a node of the second call, as the engine may; its nodes wait for each other."""
        nonlocal node, is_running
        if is_running or len(gradients) == 4:
            return
        is_running = True
        gradients.append(node.apply(None))
        node, is_running = node.next_functions[0][0], False

    second = Recorder({(Op.B, i, 0): run_next_node for i in range(3)})
    output = _output(second, z)  # keeps the nodes
    assert output.grad_fn is not None
    output.grad_fn.issuer.returns_gradients = True  # type: ignore[attr-defined]
    node = output.grad_fn.next_functions[0][0]
    first = Recorder({(Op.B, 2, 0): run_next_node})
    _output(first, torch.ones(2, requires_grad=True)).sum().backward()
    with torch.no_grad():
        while len(gradients) < 4:
            run_next_node()
    assert second.issued == first.issued == [(Op.B, i, 0) for i in (2, 1, 0)]
    assert second.deepest == 1
    assert gradients[-1][-1].tolist() == [3.0, 3.0]
    assert not backward_order._QUEUES


def test_two_threads_have_a_queue_each() -> None:
    """A backward does not wait for that of another thread, nor give it its tasks."""
    barrier = threading.Barrier(2)
    recorders = [Recorder({(Op.B, 1, 0): lambda: barrier.wait(10)}) for _ in range(2)]
    outputs = [_output(recorder, torch.ones(2, requires_grad=True)) for recorder in recorders]
    threads = [threading.Thread(target=lambda x=x: x.sum().backward()) for x in outputs]
    for thread in threads:
        thread.start()
    call_within(20, lambda: [thread.join() for thread in threads])
    assert all(recorder.issued == [(Op.B, i, 0) for i in (2, 1, 0)] for recorder in recorders)


@pytest.mark.parametrize("recomputed", [[True] * 4, [True, True, True, False], [False] * 4])
@pytest.mark.parametrize("seed", [None, 3])
def test_without_dependencies_tasks_are_issued_as_said(
    recomputed: list[bool], seed: int | None
) -> None:
    """Every task once, each R before its B, and each B behind that of the next partition."""
    recorder, x = Recorder(), torch.ones(2, requires_grad=True)
    tasks = unordered_backward(3, recomputed, seed)
    link_backward(recorder, (x,), partial(link_tasks, tasks))([(torch.ones(1, 2),)] * 4)[
        0
    ].sum().backward()
    assert recorder.issued == tasks
    assert len(set(tasks)) == len(tasks) == 3 * (4 + sum(recomputed))
    for op, i, j in tasks:
        before = [(Op.B, i, j + 1)] if j < 2 else []
        if op == Op.B and recomputed[i]:
            before.append((Op.R, i, j))
        assert all(tasks.index(task) < tasks.index((op, i, j)) for task in before)
