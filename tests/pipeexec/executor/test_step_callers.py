"""Who may call a pipeline, and when: second threads, stages, closed and forked pipelines."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_to_end
from small_pipelines import Faulty, assert_same, call_within, cut, data, dense, mse
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.executor import StepResult
from pipesim.errors import ArgumentError, ExecutionError, PipeError, StageError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

GRAPH = ps.lower(ps.schedule("1f1b", 2, 2))


class Gate(nn.Module):
    """Passes its input on once it may; tells when it has been entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.may_go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        self.may_go_on.wait(20)
        return x


class Calls(nn.Module):
    """Calls a function in its forward, and keeps its error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        self.call()
        return x


def make(first: nn.Module, **options: Any) -> px.Pipeline:
    stages = [nn.Sequential(dense(1), first), dense(1)]
    return px.Pipeline(stages, GRAPH, ["cpu"] * 2, mse, timeout=20, **options)


@pytest.fixture
def stepping() -> Iterator[tuple[px.Pipeline, Gate, list[Any]]]:
    """A pipeline whose step waits in a stage, in another thread."""
    gate = Gate()
    pipeline = make(gate)
    outcome: list[Any] = []

    def step() -> None:
        try:
            outcome.append(pipeline.step(*data(4)))
        except PipeError as error:
            outcome.append(error)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    assert gate.entered.wait(10)
    yield pipeline, gate, outcome
    gate.may_go_on.set()
    thread.join(10)
    assert not thread.is_alive()
    call_within(5, pipeline.close)


CALLS: dict[str, Callable[[px.Pipeline], Any]] = {
    "step": lambda p: p.step(*data(4)),
    "with_graph": lambda p: p.with_graph(GRAPH),
    "held_bytes": lambda p: p.held_bytes(*data(4)),
    "left_bytes": lambda p: p.left_bytes(*data(4)),
    "device_bytes": lambda p: p.device_bytes(*data(4)),
    "preserved": lambda p: p.preserved().__enter__(),
    "profile": lambda p: px.profile(p, *data(4)),
    "step of another pipeline": lambda p: px.Pipeline(
        [dense(1), dense(1)], GRAPH, p.devices, mse
    ).step(*data(4)),
}


@pytest.mark.measures_time
@pytest.mark.parametrize("call", CALLS)
def test_a_second_thread_is_refused_at_once(
    stepping: tuple[px.Pipeline, Gate, list[Any]], call: str
) -> None:
    """The step that runs is not disturbed."""
    pipeline, gate, outcome = stepping
    start = time.monotonic()
    with pytest.raises(ExecutionError, match="was called while thread"):
        CALLS[call](pipeline)
    assert time.monotonic() - start < 1
    gate.may_go_on.set()
    while not outcome:
        time.sleep(1e-3)
    assert isinstance(outcome[0], StepResult)


def test_two_steps_at_once_leave_the_gradients_of_one() -> None:
    """Of many attempts from two threads, each is a whole step or an error."""
    stages = cut(dense(2), [1, 1])
    x, y = data(4)
    with px.Pipeline(stages, GRAPH, ["cpu"] * 2, mse) as pipeline:
        pipeline.step(x, y)
        expected = [p.grad.clone() for s in stages for p in s.parameters() if p.grad is not None]
        for p in (p for s in stages for p in s.parameters()):
            p.grad = None

        async def both() -> list[Any]:
            steps = [asyncio.to_thread(pipeline.step, x, y) for _ in range(8)]
            return await asyncio.gather(*steps, return_exceptions=True)

        results = call_within(20, lambda: asyncio.run(both()))
        n_done = sum(isinstance(r, StepResult) for r in results)
        assert n_done >= 1
        assert all(isinstance(r, (StepResult, ExecutionError)) for r in results)
        actual = [p.grad for s in stages for p in s.parameters()]
        torch.testing.assert_close(actual, [n_done * g for g in expected])


@pytest.mark.measures_time
def test_close_ends_a_step_of_another_thread(
    stepping: tuple[px.Pipeline, Gate, list[Any]],
) -> None:
    """Though a stage hangs."""
    pipeline, _, outcome = stepping
    start = time.monotonic()
    pipeline.close()
    assert time.monotonic() - start < 1.5
    (error,) = outcome
    assert "closed while a step was running" in str(error)
    assert error.timeline is not None
    with pytest.raises(ExecutionError, match="the pipeline is closed"):
        pipeline.step(*data(4))


def test_close_in_a_signal_handler_ends_the_step() -> None:
    """Which runs in the thread of the step."""
    pipeline = make(Gate())
    before = signal.signal(signal.SIGALRM, lambda *_: pipeline.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(ExecutionError, match="closed while a step was running"):
            pipeline.step(*data(4))
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.measures_time
@pytest.mark.parametrize("call", ["step", "close", "held_bytes", "with_graph"])
@pytest.mark.parametrize("where", ["stage", "loss"])
def test_calls_from_within_a_step_are_refused(call: str, where: str) -> None:
    pipelines: list[px.Pipeline] = []

    def inside() -> None:
        if pipelines:
            (CALLS | {"close": lambda p: p.close()})[call](pipelines[0])

    def loss(output: Tensor, y: Tensor) -> Tensor:
        if where == "loss":
            inside()
        return mse(output, y)

    first = Calls(inside) if where == "stage" else nn.Identity()
    stages = [nn.Sequential(dense(1), first), dense(1)]
    with px.Pipeline(stages, GRAPH, ["cpu"] * 2, loss) as pipeline:
        pipelines.append(pipeline)
        start = time.monotonic()
        with pytest.raises(StageError, match=f"{call if call in ('step', 'close') else ''}.*was "
                                             "called from within a stage or the loss"):  # fmt: skip
            call_within(10, lambda: pipeline.step(*data(4)))
        assert time.monotonic() - start < 1
        pipelines.clear()
        pipeline.step(*data(4))


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_pipeline_says_so(call: str) -> None:
    pipeline = make(nn.Identity())
    pipeline.close()
    pipeline.close()
    with pytest.raises(PipeError, match="closed"):
        CALLS[call](pipeline)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("call", ["step", "held_bytes", "with_graph", "close"])
def test_a_forked_process_is_refused_at_once(call: str) -> None:
    """Its copy of the pipeline has no threads; the parent's stays usable."""
    with make(nn.Identity()) as pipeline:
        pipeline.step(*data(4))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                (CALLS | {"close": lambda p: p.close()})[call](pipeline)
                os.write(writer, b"no error")
            except BaseException as error:
                os.write(writer, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            text = call_within(5, file.read)
        os.waitpid(child, 0)
        expected = "no error" if call == "close" else "forked from the one that made the pipeline"
        assert expected in text
        pipeline.step(*data(4))


_SCRIPT = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
import test_step_callers as t
gate = t.Gate()
pipeline = t.make(gate)
def step():
    try:
        pipeline.step(*t.data(4))
    except t.PipeError as error:
        print("step:", error)
thread = threading.Thread(target=step)
thread.start()
gate.entered.wait()
pipeline.close()
thread.join()
print("end")
"""


@pytest.mark.slow
def test_the_interpreter_ends_after_a_close_during_a_step(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    statuses, (output,) = run_to_end([[str(script), os.path.dirname(__file__)]], tmp_path)
    assert statuses == [0], output
    assert "closed while a step was running" in output
    assert output.endswith("end\n")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pipeline_is_not_copied(copied: Callable[[Any], Any]) -> None:
    with (
        make(nn.Identity()) as pipeline,
        pytest.raises(ArgumentError, match="neither be copied nor pickled; with_graph"),
    ):
        copied(pipeline)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(mode: Callable[[], Any]) -> None:
    with (
        make(nn.Identity()) as pipeline,
        mode(),
        pytest.raises(ExecutionError, match="a step trains"),
    ):
        pipeline.step(*data(4))


@pytest.mark.parametrize("name", ["inputs", "targets"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.clone().requires_grad_(), "require gradients"),
        (lambda x: (x, x.clone().requires_grad_()), "require gradients"),
        (Tensor.to_sparse, "layout torch.sparse_coo"),
        (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), "layout torch.jagged"),
    ],
)
def test_batches_that_are_not_data_are_refused(
    name: str, change: Callable[[Tensor], Any], message: str
) -> None:
    batch = dict(zip(("inputs", "targets"), data(4), strict=True))
    batch[name] = change(batch[name])
    with make(nn.Identity()) as pipeline, pytest.raises(ArgumentError, match=f"{name}.*{message}"):
        pipeline.step(**batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": None}, "stages must be a list"),
        ({"stages": "ab"}, "stages must be a list"),
        ({"stages": [None, None]}, "2 stages, got 2"),
        ({"graph": None}, "runs a TaskGraph, got NoneType"),
        ({"devices": None}, "devices must be a list"),
        ({"devices": "cpu"}, "devices must be a list"),
        ({"devices": [None, None]}, "is no device"),
        ({"loss_fn": None}, "trains, and needs loss_fn"),
        ({"optimizer": "sgd"}, "optimizer must be a function"),
        ({"optimizer": lambda p: None}, "optimizer returned None"),
        ({"optimizer": lambda p: torch.optim.SGD}, "must return a torch.optim.Optimizer"),
        (
            {"optimizer": lambda p: torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)},
            "1 of which are not the stage's",
        ),
        ({"loss_reduction": None}, "unknown loss_reduction None"),
        ({"timeout": "x"}, "timeout must be"),
    ],
)
def test_arguments_of_the_wrong_kind(arguments: dict[str, Any], message: str) -> None:
    good = {"stages": [dense(1), dense(1)], "graph": GRAPH, "devices": ["cpu"] * 2, "loss_fn": mse}
    with pytest.raises(PipeError, match=message):
        px.Pipeline(**good | arguments)


@pytest.mark.parametrize("graph", [None, ps.schedule("1f1b", 2, 2)])
def test_with_graph_takes_a_graph(graph: Any) -> None:
    with (
        make(nn.Identity()) as pipeline,
        pytest.raises(ArgumentError, match="runs a TaskGraph"),
    ):
        pipeline.with_graph(graph)


def test_an_optimizer_of_a_part_of_a_stage_is_fine() -> None:
    def of_weights(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.dim() > 1], lr=0.1)

    with make(nn.Identity(), optimizer=of_weights) as pipeline:
        pipeline.step(*data(4))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_autocast_around_a_step_holds_in_stages_and_loss(schedule: str, recompute: Any) -> None:
    stages, others = (cut(dense(2), [1, 1]) for _ in range(2))
    x, y = data(4)
    dtypes: list[torch.dtype] = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        dtypes.append(output.dtype)
        return mse(output, y)

    graph = ps.lower(ps.schedule(schedule, 2, 2), recompute=recompute)
    with torch.autocast("cpu", torch.bfloat16):
        for half in (slice(2), slice(2, 4)):
            (mse(nn.Sequential(*others)(x[half]), y[half]) / 2).backward()
        with px.Pipeline(stages, graph, ["cpu"] * 2, loss) as pipeline:
            pipeline.step(x, y)
    assert set(dtypes) == {torch.bfloat16}
    assert_same(stages, others)


@pytest.mark.parametrize("call", [{"forward": 1}, {"backward": 0}, {"backward": 1}])
@pytest.mark.parametrize("n_before", [0, 1, 2])
def test_a_failed_step_leaves_earlier_gradients(n_before: int, call: dict[str, int]) -> None:
    """So that it can be tried again."""
    stages, others = (cut(dense(2), [1, 1]) for _ in range(2))
    faulty = Faulty(ValueError("no"))
    x, y = data(4)
    with (
        px.Pipeline([nn.Sequential(stages[0], faulty), stages[1]], GRAPH, ["cpu"] * 2, mse) as p,
        px.Pipeline(others, GRAPH, ["cpu"] * 2, mse) as other,
    ):
        for _ in range(n_before):
            p.step(x, y)
            other.step(x, y)
        faulty.calls, faulty.failing_calls = {"forward": 0, "backward": 0}, call
        with pytest.raises(StageError, match="no"):
            p.step(x, y)
        assert_same(stages, others)
        faulty.repair()
        p.step(x, y)
        other.step(x, y)
        assert_same(stages, others)


def test_an_error_names_the_stages_that_have_stepped() -> None:
    """Their weights are not those from before."""
    faulty = Faulty(ValueError("no"), backward=1)
    stages = [nn.Sequential(dense(1), faulty), dense(1)]
    graph = ps.lower(ps.schedule("1f1b", 2, 2))
    with px.Pipeline(stages, graph, ["cpu"] * 2, mse, torch.optim.AdamW) as pipeline:
        slow = pipeline.stages[0].backward

        def late(*args: Any) -> Any:
            time.sleep(0.1)  # stage 1 steps meanwhile
            return slow(*args)

        pipeline.stages[0].backward = late  # type: ignore[method-assign]
        x, y = data(4)
        with pytest.raises(StageError, match=r"the optimizer of stage 1 has stepped"):
            pipeline.step(x, y)
