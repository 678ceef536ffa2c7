"""Failures in a pipeline: the error names the task, all work stops, and the next step works."""

from __future__ import annotations

import copy
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_pipelines import (
    Faulty,
    assert_same,
    call_within,
    cut,
    data,
    dense,
    mse,
    pipeline,
    unsplit,
)
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.executor.planned_task import Remote
from pipesim.errors import (
    ArgumentError,
    ExecutionError,
    NanLossWarning,
    PipeError,
    StageError,
    UnknownNameError,
)
from pipesim.timeline.timeline import Timeline

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")


def lowered(schedule: str = "gpipe", p: int = 3, m: int = 4, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(schedule, p, m), **options)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer without state, which a failed step could leave changed."""
    return torch.optim.SGD(parameters, lr=0.1)


class Boom(Exception):
    """The error that the stages of these tests raise."""


class FaultyLoss:
    """Raises in its second call, until it is repaired."""

    def __init__(self) -> None:
        self.calls, self.broken = 0, True

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if self.broken and self.calls == 2:
            raise Boom("here")
        return mse(output, target)

    def repair(self) -> None:
        self.broken = False


class FaultyOptimizer(torch.optim.SGD):
    """Raises in its first step."""

    broken = True

    def step(self, closure: Any = None) -> Any:
        if self.broken:
            raise Boom("here")
        return super().step(closure)


def faulty_stages(index: int, **calls: int) -> tuple[list[nn.Module], Faulty]:
    """Return three stages, one of which raises."""
    fault = Faulty(Boom("here"), **calls)
    stages: list[nn.Module] = list(cut(dense(3), [1, 1, 1]))
    stages[index] = nn.Sequential(stages[index], fault)
    return stages, fault


def failing_step(subject: px.Pipeline) -> StageError:
    """Run a step that must fail, without hanging, and return its error."""
    with pytest.raises(StageError) as caught:
        call_within(30, lambda: subject.step(*data(8)))
    assert isinstance(caught.value, PipeError)
    return caught.value


def check_error(error: StageError, task: str, device: int, stage: int, microbatch: Any) -> None:
    """Check what an error names, and that its timeline holds what ran before, no more."""
    message = str(error)
    where = f"device {device}, stage {stage}"
    where += "" if microbatch is None else f", micro-batch {microbatch}"
    assert message.startswith(f"{task} failed ({where}): Boom: here"), message
    assert isinstance(error.__cause__, Boom)
    timeline = error.timeline
    assert isinstance(timeline, Timeline)
    assert not timeline.complete
    ran = {str(timeline.graph.task(k)) for k in np.flatnonzero(timeline.ran).tolist()}
    assert task not in ran
    assert len(timeline.frame) == len(ran)
    waits = timeline.graph.precedence
    orphans = timeline.ran[waits.rows] & ~timeline.ran[waits.values]
    assert not orphans.any(), "a task ran whose needs had not"


def check_recovery(
    subject: px.Pipeline, stages: list[nn.Module], repair: Callable[[], None]
) -> None:
    """Check that the next step gives the right gradients, and holds and leaks nothing."""
    repair()
    assert subject._runner._microbatch_loss.step is None
    assert all(not stage._activations and not stage._inputs for stage in subject.stages)
    whole = copy.deepcopy(stages)
    graph = subject.graph
    loss = unsplit(whole, graph, *data(8))
    for module in stages:
        module.zero_grad()
    result = call_within(30, lambda: subject.step(*data(8)))
    assert torch.equal(result.loss, loss)
    assert_same(stages, whole)
    costs = ps.Costs(forward=1.0, backward=1.0, activation_bytes=1.0)
    assert list(result.peak_held) == ps.simulate(graph, costs).memory.peak.tolist()


# A stage that raises


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stage_that_raises_in_forward(index: int, schedule: str) -> None:
    stages, fault = faulty_stages(index, forward=1)
    with pipeline(stages, lowered(schedule)) as subject:
        error = failing_step(subject)
        check_error(error, f"{index}F1", index, index, 1)
        assert fault.calls["forward"] == 2, "the stage ran on after it had failed"
        check_recovery(subject, stages, fault.repair)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stage_that_raises_in_backward(index: int) -> None:
    """GPipe's backwards begin with the last micro-batch: the second is that of micro-batch 2."""
    stages, fault = faulty_stages(index, backward=1)
    with pipeline(stages, lowered("gpipe")) as subject:
        error = failing_step(subject)
        check_error(error, f"{index}B2", index, index, 2)
        assert fault.calls["backward"] == 2
        check_recovery(subject, stages, fault.repair)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stage_that_raises_in_recompute(index: int) -> None:
    """After four forwards, the recomputes: the second is that of micro-batch 2."""
    stages, fault = faulty_stages(index, forward=5)
    with pipeline(stages, lowered("gpipe", recompute="always")) as subject:
        error = failing_step(subject)
        check_error(error, f"{index}R2", index, index, 2)
        assert fault.calls["forward"] == 6
        check_recovery(subject, stages, fault.repair)


@pytest.mark.parametrize(("call", "task"), [(0, "1I0"), (1, "1I1")])
def test_a_stage_that_raises_in_a_split_backward(call: int, task: str) -> None:
    """The chain is gone through in I, and not again in W."""
    orders = [
        ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"],
        ["1F0", "1F1", "1I0", "1W0", "1I1", "1W1"],
        ["2F0", "2I0", "2W0", "2F1", "2I1", "2W1"],
    ]
    stages, fault = faulty_stages(1, backward=call)
    with pipeline(stages, ps.lower(ps.Schedule.from_orders(orders))) as subject:
        check_error(failing_step(subject), task, 1, 1, int(task[-1]))
        fault.repair()
        whole = copy.deepcopy(stages)
        for module in stages:
            module.zero_grad()
        unsplit(whole, subject.graph, *data(8))
        call_within(30, lambda: subject.step(*data(8)))
        assert_same(stages, whole)


def test_a_loss_that_raises() -> None:
    """It is part of the last stage's forward."""
    stages, loss = list(cut(dense(3), [1, 1, 1])), FaultyLoss()
    with pipeline(stages, lowered(), loss) as subject:
        check_error(failing_step(subject), "2F1", 2, 2, 1)
        assert loss.calls == 2
        check_recovery(subject, stages, loss.repair)


def test_an_optimizer_that_raises() -> None:
    """A STEP is of no micro-batch."""
    stages = list(cut(dense(3), [1, 1, 1]))
    with pipeline(stages, lowered(), mse, sgd) as subject:
        subject.optimizers[1] = broken = FaultyOptimizer(stages[1].parameters(), lr=0.1)
        check_error(failing_step(subject), "1STEP", 1, 1, None)
        broken.broken = False
        whole = copy.deepcopy(stages)
        unsplit(whole, subject.graph, *data(8))
        optimizers = [sgd(stage.parameters()) for stage in whole]
        call_within(30, lambda: subject.step(*data(8)))
        for optimizer in optimizers:
            optimizer.step()
        assert_same(stages, whole)


def test_a_partial_timeline_is_saved_and_loaded(tmp_path: Path) -> None:
    stages, _ = faulty_stages(1, backward=1)
    with pipeline(stages, lowered("1f1b")) as subject:
        timeline = failing_step(subject).timeline
    assert isinstance(timeline, Timeline)
    assert np.isnan(timeline.start[~timeline.ran]).all()
    assert "only" in repr(timeline)
    timeline.save(tmp_path / "partial.csv")
    loaded = Timeline.load(tmp_path / "partial.csv")
    assert loaded.frame.equals(timeline.frame)
    assert len(loaded) == len(timeline)
    assert not loaded.complete
    assert loaded.makespan == timeline.makespan


def test_other_workers_stop_at_once() -> None:
    """The remaining tasks of a busy device are dropped, although it waits for no other device.

    Device 1 fails while device 0 is in its second forward, and eight more are queued behind.
    """
    calls: list[int] = []
    failed = threading.Event()

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(calls))
            if len(calls) == 2:
                assert failed.wait(20)
                time.sleep(0.05)  # the failure is noted after the stage has raised
            return super().forward(x)

    class Second(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            failed.set()
            raise Boom("here")

    with pipeline([First(16, 16), Second(16, 16)], lowered("gpipe", 2, 10)) as subject:
        with pytest.raises(StageError) as caught:
            call_within(30, lambda: subject.step(*data(20)))
        assert str(caught.value).startswith("1F0 failed")
        assert calls == [0, 1]


def test_a_task_that_fails_after_what_it_waited_for_has_not_run() -> None:
    """As a RECV whose message was there, and then the connection broke."""

    def breaks(*_: object) -> None:
        raise Boom("here")

    with pipeline(list(cut(dense(3), [1, 1, 1])), lowered()) as subject:
        subject._runner.tasks = [
            task._replace(handler=breaks, remote=Remote(before_start=lambda *_: None))
            if str(subject.graph.task(task.id)) == "1F1" else task
            for task in subject._runner.tasks
        ]  # fmt: skip
        error = failing_step(subject)
    check_error(error, "1F1", 1, 1, 1)


def test_the_first_of_several_failures_is_told() -> None:
    stages = [nn.Sequential(nn.Linear(16, 16), Faulty(Boom("here"), forward=k)) for k in range(3)]
    with pipeline(stages, lowered("1f1b")) as subject:
        error = failing_step(subject)
    check_error(error, "0F0", 0, 0, 0)


def test_failures_step_after_step_leave_no_thread_behind() -> None:
    stages, fault = faulty_stages(2, forward=0)
    with pipeline(stages, lowered()) as subject:
        for call in range(5):
            fault.calls["forward"], fault.failing_calls = 0, {"forward": call % 4}
            check_error(failing_step(subject), f"2F{call % 4}", 2, 2, call % 4)
        workers = threading.active_count()
        check_recovery(subject, stages, fault.repair)
        assert threading.active_count() == workers
    assert threading.active_count() == workers - 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError("no more")])
def test_a_stage_that_raises_what_ends_programs(error: BaseException) -> None:
    """In a worker it is an error like any other, and the pipeline stays usable."""
    stages, fault = faulty_stages(1, forward=1)
    fault.error = error
    with pipeline(stages, lowered()) as subject:
        caught = failing_step(subject)
        assert caught.__cause__ is error
        assert f"1F1 failed (device 1, stage 1, micro-batch 1): {type(error).__name__}" in str(
            caught
        )
        check_recovery(subject, stages, fault.repair)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
def test_an_interrupt_of_the_caller_leaves_the_pipeline_usable() -> None:
    """Control-C, while the caller waits for the devices: work stops, and it is raised as it is."""

    class Interrupts(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                time.sleep(0.05)
                signal.pthread_kill(main, signal.SIGINT)
                time.sleep(0.1)
            return super().forward(x)

    main = threading.main_thread().ident
    assert main is not None
    stages = [*cut(dense(2), [1, 1]), Interrupts(16, 16)]
    # A process in the background may have been told to ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pipeline(stages, lowered("gpipe", 3, 4)) as subject:
        try:
            with pytest.raises(KeyboardInterrupt):
                subject.step(*data(8))
        finally:
            signal.signal(signal.SIGINT, before)
        assert stages[2].calls == 2
        check_recovery(subject, stages, lambda: None)


# What stages and losses return


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("text", "the output of stage 0 must be a tensor or a tuple of tensors, got str"),
        (None, "the output of stage 0 must be a tensor or a tuple of tensors, got NoneType"),
        ([1], "the output of stage 0 must be a tensor or a tuple of tensors, got list"),
        ((torch.ones(2), 1), "got tuple with int"),
    ],
)
def test_an_output_that_is_no_tensor(output: Any, message: str) -> None:
    class Odd(nn.Module):
        def forward(self, _: Tensor) -> Any:
            return output

    with pipeline([Odd(), nn.Linear(16, 16)], lowered("1f1b", 2)) as subject:
        with pytest.raises(StageError, match=r"0F0 failed \(device 0, stage 0, micro") as e:
            call_within(30, lambda: subject.step(*data(8)))
        assert message in str(e.value)
        assert isinstance(e.value.__cause__, ExecutionError)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda output, target: (output - target) ** 2, r"\(2, 16\)"),
        (lambda output, target: 3.0, "float"),
        (lambda output, target: None, "NoneType"),
    ],
)
def test_a_loss_that_is_no_single_number(loss: Any, got: str) -> None:
    with (
        pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2), loss) as subject,
        pytest.raises(StageError, match=f"1F0 .*tensor with one element, got {got}"),
    ):
        call_within(30, lambda: subject.step(*data(8)))


def test_a_nan_loss_is_warned_of() -> None:
    """By micro-batch and step; the step itself is whole."""
    inputs, targets = data(8)
    inputs[5] = float("nan")  # of samples 4 and 5: micro-batch 2
    with pipeline(cut(dense(2), [1, 1]), lowered("1f1b", 2)) as subject:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            subject.step(*data(8))
        with pytest.warns(NanLossWarning) as caught:
            result = subject.step(inputs, targets)
    assert [str(w.message) for w in caught] == [
        "the loss of micro-batch 2 is NaN (step 1); look at its inputs, or lower the learning rate"
    ]
    assert caught[0].filename == __file__
    assert result.loss.isnan()
    assert [bool(loss.isnan()) for loss in result.losses] == [False, False, True, False]
    assert result.timeline.complete


# Batches


def step(inputs: Any, targets: Any, m: int = 4) -> Any:
    with pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2, m)) as subject:
        return subject.step(inputs, targets)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (data(3)[0], data(3)[1], "inputs have 3 samples, too few for 4 micro-batches; give a larg"),
        (data(8)[0], data(7)[1], "inputs have 8 samples, targets 7; give as many"),
        (data(8)[0], data(3)[1], "inputs have 8 samples, targets 3; give as many"),
        (data(0)[0], data(0)[1], "inputs have 0 samples"),
        (
            (data(8)[0], data(7)[0]),
            data(8)[1],
            r"inputs\[1\] has shape \(7, 16\), the batch 8 samp",
        ),
        (torch.tensor(3.0), data(8)[1], "inputs must be a tensor of samples .* got 0-d tensor"),
        ((), data(8)[1], "inputs must be a tensor of samples or hold one, got tuple"),
        ((torch.tensor(1.0), 3), data(8)[1], "got tuple of 0-d tensor, int"),
        (data(8)[0], None, "targets are None, but this process has the last stage; give them"),
    ],
)
def test_batches_that_cannot_be_split(inputs: Any, targets: Any, message: str) -> None:
    """Found before anything runs."""
    with pytest.raises(ArgumentError, match=message) as caught:
        step(inputs, targets)
    assert "\n" not in str(caught.value)


# Pipelines that cannot be made


def make(**changes: Any) -> px.Pipeline:
    arguments: dict[str, Any] = {
        "stages": cut(dense(2), [1, 1]),
        "graph": lowered("1f1b", 2),
        "devices": ["cpu", "cpu"],
        "loss_fn": mse,
    }
    return px.Pipeline(**{**arguments, **changes})


def _shared() -> list[nn.Module]:
    stages = cut(dense(2), [1, 1])
    stages[1][0][0].weight = stages[0][0][0].weight
    return list(stages)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"graph": ps.schedule("1f1b", 2, 4)},
            "Pipeline runs a TaskGraph, got Schedule; lower the schedule first",
        ),
        ({"graph": None}, "Pipeline runs a TaskGraph, got NoneType"),
        ({"stages": cut(dense(3), [1, 1, 1])}, "the graph has 2 stages, got 3"),
        ({"stages": []}, "the graph has 2 stages, got 0"),
        ({"stages": [nn.Linear(1, 1), torch.relu]}, "give one nn.Module a stage"),
        ({"stages": _shared()}, "stages 0 and 1 share the parameter '1.0.weight'; stages run at"),
        ({"devices": ["cpu"]}, r"the graph has 2 devices, got 1: \['cpu'\]; give one device"),
        ({"devices": ["cpu"] * 3}, "the graph has 2 devices, got 3"),
        ({"devices": ["cpu", "tpu"]}, "'tpu' is no device; write 'cpu' or 'cuda:0'"),
        ({"loss_reduction": "average"}, "unknown loss_reduction 'average'"),
    ],
)
def test_pipelines_that_cannot_be_made(changes: dict[str, Any], message: str) -> None:
    """And no worker is left behind."""
    workers = threading.active_count()
    with pytest.raises(ArgumentError, match=message):
        make(**changes)
    assert threading.active_count() == workers


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'mean'"):
        make(loss_reduction="meen")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_where_there_is_none() -> None:
    with pytest.raises(ArgumentError, match="'cuda:0' is not there: torch sees 0 CUDA devices"):
        make(devices=["cuda:0", "cuda:0"])


def test_skip_connections_are_refused() -> None:
    """Even where they need no message: what a stage is given does not have them."""
    one_device = ps.Schedule.from_orders([["0F0", "1F0", "1B0", "0B0"]])
    for schedule, devices in ((ps.schedule("gpipe", 2, 2), ["cpu"] * 2), (one_device, ["cpu"])):
        graph = ps.lower(schedule, skips=[(0, 1)])
        with pytest.raises(ArgumentError, match=r"has skip connections .*; pipeexec\.GPipe does"):
            make(graph=graph, devices=devices)


def test_sharded_optimizers_are_refused() -> None:
    """Where replicas are in one process: with the stage named, and no worker left behind."""
    workers = threading.active_count()
    graph = ps.lower(ps.schedule("gpipe", 1, 2), n_replicas=2, shard_optimizer=True)
    message = "shard_optimizer=True, but replicas of stage 0 are in one process, where they"
    with pytest.raises(ArgumentError, match=message):
        make(stages=[nn.Linear(16, 16)], graph=graph, devices=["cpu"] * 2)
    assert threading.active_count() == workers


def test_sharded_stages_that_are_no_embeddings_are_refused() -> None:
    graph = ps.lower(ps.schedule("gpipe", 2, 2), sharded=[0])
    message = r"stage 0 sharded, but its module is a Linear; give pipeexec\.EmbeddingStage"
    with pytest.raises(ArgumentError, match=message):
        make(stages=[nn.Linear(16, 16), nn.Linear(16, 16)], graph=graph)


def test_too_few_samples_for_all_replicas() -> None:
    """One process takes the batch of all."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), n_replicas=2)
    message = "inputs have 3 samples, too few for 4 micro-batches, 2 of each of 2 replicas; give a"
    subject = make(graph=graph, devices=["cpu"] * 4)
    with subject, pytest.raises(ArgumentError, match=message):
        subject.step(*data(3))


def test_a_closed_pipeline_says_so() -> None:
    """So do those that share its devices."""
    with make() as subject:
        sibling = subject.with_graph(lowered("gpipe", 2))
        subject.step(*data(8))
    for closed in (subject, sibling):
        with pytest.raises(ExecutionError, match="the pipeline is closed"):
            closed.step(*data(8))
    subject.close()
