"""Steps as CUDA graphs: when a step is captured, replayed, or runs eagerly; by a stand-in on CPU.

The stand-in replays by issuing the step again, but reads and writes what a graph would: the tensors
that there were at the capture, whatever the host has put in their place since.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from fake_cuda import named_gpus
from small_pipelines import Faulty, assert_same, cut, data, dense, gradients, mse, pipeline, sgd
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.executor import StepResult, step_capture
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step
from pipeexec.executor.step_capture import CudaGraphs, check_can_capture, check_state
from pipesim.errors import ArgumentError, ExecutionError


@dataclass
class Recorded:
    """The objects that a CUDA graph would keep alive."""

    run: Step
    tasks: Sequence[PlannedTask]
    before: list[Tensor | None]
    gradients: list[Tensor | None]
    losses: list[Tensor | None]


@dataclass
class FakeRecorder:
    """Stands in for `step_capture.Recorder`; ``subject`` is the pipeline, once it is there."""

    device: torch.device
    subject: px.Pipeline | None = None
    launched: int = 0

    def record(self, run: Step, tasks: Sequence[PlannedTask]) -> Recorded:
        """Run nothing, as a capture: state is unchanged, and new tensors hold garbage."""
        assert self.subject is not None
        parameters = [p for m in self.subject.modules for p in m.parameters()]
        initial = [p.grad for p in parameters]
        changed = [*self._state(), *(gradient for gradient in initial if gradient is not None)]
        before = [(x, x.detach().clone()) for x in changed]
        run.walk(tasks)
        with torch.no_grad():
            gradients = [p.grad for p in parameters]
            for garbage in (*gradients, *run.inputs.loss.losses):
                if garbage is not None:
                    garbage.fill_(float("nan"))
            for tensor, value in before:
                tensor.copy_(value)
        return Recorded(run, tasks, initial, gradients, list(run.inputs.loss.losses))

    def launch(self, graph: Recorded) -> float:
        """Issue the step again, into the tensors of the capture."""
        assert self.subject is not None
        self.launched += 1
        run, parameters = graph.run, [p for m in self.subject.modules for p in m.parameters()]
        for parameter, gradient in zip(parameters, graph.before, strict=True):
            parameter.grad = gradient
        self.subject._runner._microbatch_loss.step = run
        run.walk(graph.tasks)
        self.subject._runner._microbatch_loss.step = None
        with torch.no_grad():
            current = [p.grad for p in parameters]
            losses = run.inputs.loss.losses
            for static, tensor in zip(
                (*graph.gradients, *graph.losses), (*current, *losses), strict=True
            ):
                if static is not None and tensor is not None and static is not tensor:
                    static.copy_(tensor)
        run.inputs.loss.losses[:] = graph.losses
        return 1e-6

    def _state(self) -> list[Tensor]:
        assert self.subject is not None
        tensors = [x for m in self.subject.modules for x in (*m.parameters(), *m.buffers())]
        for optimizer in self.subject.optimizers:
            for state in {} if optimizer is None else optimizer.state.values():
                tensors += [x for x in state.values() if isinstance(x, Tensor)]
        return tensors


Make = Callable[..., px.Pipeline]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return what makes pipelines of CPU workers whose steps the stand-in captures."""
    recorders: list[FakeRecorder] = []
    subjects: list[px.Pipeline] = []

    def recorder(device: torch.device) -> FakeRecorder:
        recorders.append(FakeRecorder(device))
        return recorders[-1]

    def make(*arguments: Any, **options: Any) -> px.Pipeline:
        subject = pipeline(*arguments, **options, cuda_graph=True)
        recorders[-1].subject = subject
        subjects.append(subject)
        return subject

    monkeypatch.setattr(step_capture, "Recorder", recorder)
    monkeypatch.setattr(step_capture, "check_can_capture", lambda *_: None)
    monkeypatch.setattr(step_capture, "check_state", lambda *_: None)
    yield make
    for subject in subjects:
        subject.close()


def _counts(subject: px.Pipeline) -> tuple[int, int]:
    """Return how many steps were captured, and how many ran as graphs."""
    inner = subject._runner.capture
    assert inner is not None
    recorder = inner._recorder
    assert isinstance(recorder, FakeRecorder)
    return inner.n_captures, recorder.launched


def _graph(schedule: str = "1f1b", n_devices: int = 2, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(schedule, n_devices=n_devices, n_microbatches=4), **options)


class Twins(NamedTuple):
    """A pipeline that captures, one that does not, and their equal stages."""

    subject: px.Pipeline
    eager: px.Pipeline
    stages: list[nn.Module]
    others: list[nn.Module]

    def step(self, *batch: Tensor) -> tuple[StepResult, StepResult]:
        """Run a step of both, after which their stages must still be equal."""
        results = self.subject.step(*batch), self.eager.step(*batch)
        assert_same(self.stages, self.others)
        return results


def _twins(captured: Make, optimizer: Any = sgd, schedule: str = "1f1b") -> Twins:
    stages = cut(dense(2), [1, 1])
    others = copy.deepcopy(stages)
    subject = captured(stages, _graph(schedule), mse, optimizer)
    return Twins(subject, pipeline(others, _graph(schedule), mse, optimizer), stages, others)


def test_steps_are_the_same_as_eager_ones(captured: Make) -> None:
    """Two eager, one captured and replayed, three replayed; each with a different batch."""
    twins = _twins(captured)
    results = []
    with twins.eager:
        for seed in range(6):
            results.append(twins.step(*data(9, seed=seed)))
            assert twins.subject.n_steps == twins.eager.n_steps
    assert _counts(twins.subject) == (1, 4)
    for actual, wanted in results:  # those of earlier steps were not overwritten
        assert torch.equal(actual.loss, wanted.loss)
        assert all(map(torch.equal, actual.losses, wanted.losses))
        assert actual.timeline.complete
        assert actual.peak_held == wanted.peak_held
    assert results[-1][0].host_seconds == 1e-6


@pytest.mark.parametrize("schedule", ["gpipe", "chimera"])
def test_gradients_add_up_from_step_to_step(captured: Make, schedule: str) -> None:
    """Without an optimizer; whatever the caller does with them in between."""
    twins = _twins(captured, None, schedule)
    with twins.eager:
        for step in range(9):
            for parameter in (p for s in (*twins.stages, *twins.others) for p in s.parameters()):
                if step in (2, 4):  # just before the capture, and between replays
                    parameter.grad = None
                if step == 6:
                    parameter.grad = torch.ones_like(parameter)
            twins.step(*data(9, seed=step))
    assert _counts(twins.subject)[0] == 1


def test_a_new_learning_rate_is_taken(captured: Make) -> None:
    """The step with it runs eagerly, the next one is captured anew."""
    twins = _twins(captured)
    with twins.eager:
        for seed in range(8):
            if seed == 4:
                for optimizer in (*twins.subject.optimizers, *twins.eager.optimizers):
                    optimizer.param_groups[0]["lr"] = 0.5
            twins.step(*data(8, seed=seed))
    assert _counts(twins.subject) == (2, 5)  # steps 2, 3; 5, 6, 7


def test_a_learning_rate_that_always_changes_is_never_captured(captured: Make) -> None:
    twins = _twins(captured)
    with twins.eager:
        for seed in range(5):
            for optimizer in (*twins.subject.optimizers, *twins.eager.optimizers):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + seed)
            twins.step(*data(8, seed=seed))
    assert _counts(twins.subject) == (0, 0)


def test_a_state_that_moves_is_followed(captured: Make) -> None:
    """Loading a checkpoint puts other tensors into the optimizer."""
    twins = _twins(captured)
    with twins.eager:
        for seed in range(8):
            if seed in (1, 4):
                for optimizer in twins.subject.optimizers:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            twins.step(*data(8, seed=seed))
    assert _counts(twins.subject)[0] == 2


def test_a_step_that_leaves_no_trace_leaves_the_graph_valid(captured: Make) -> None:
    """`preserved` puts the state back where it was: else no validation would replay anything."""
    twins = _twins(captured)
    with twins.eager:
        for seed in range(8):
            assert twins.subject.held_bytes(*data(8)) == twins.eager.held_bytes(*data(8))
            assert twins.subject.n_steps == seed
            twins.step(*data(8, seed=seed))
    assert _counts(twins.subject) == (1, 6)


def test_another_mode_is_another_step(captured: Make) -> None:
    twins = _twins(captured)
    with twins.eager:
        for seed in range(7):
            if seed == 4:
                for stage in (*twins.stages, *twins.others):
                    stage.eval()
            twins.step(*data(8, seed=seed))
    assert _counts(twins.subject)[0] == 2


def test_a_batch_of_another_shape_is_refused(captured: Make) -> None:
    """And the next one of the right shape runs."""
    subject, *_ = _twins(captured)
    for _ in range(3):
        subject.step(*data(8))
    with pytest.raises(ArgumentError, match=r"for inputs of \(8, 16\).*got \(9, 16\).*smaller"):
        subject.step(*data(9))
    with pytest.raises(ArgumentError, match=r"for targets of \(8, 16\) .*got \(8, 16\) .*float64"):
        subject.step(data(8)[0], data(8)[1].double())
    assert subject.step(*data(8)).timeline.complete
    assert _counts(subject) == (1, 2)


def test_a_stage_that_draws_is_refused(captured: Make) -> None:
    """Seeds are the host's. In evaluation mode it draws nothing."""
    stages = [nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))]
    subject = captured(stages, _graph(), mse)
    for _ in range(2):
        subject.step(*data(8))
    with pytest.raises(ExecutionError, match=r"stage 1 draws random numbers .*same ones in every"):
        subject.step(*data(8))
    stages[1].eval()
    for _ in range(3):
        subject.step(*data(8))
    assert _counts(subject)[0] == 1


def test_a_stage_that_cannot_be_captured_is_named(captured: Make) -> None:
    """With the task; gradients are those of before, and later steps run."""
    error = RuntimeError("operation not permitted when stream is capturing")
    faulty = Faulty(error, forward=9)  # the second micro-batch of the third step
    stages = [nn.Linear(16, 16), nn.Sequential(faulty, nn.Linear(16, 16))]
    subject = captured(stages, _graph(), mse)
    for _ in range(2):
        subject.step(*data(8))
    before = [g.clone() for g in gradients(stages) if g is not None]
    recorder = subject._runner.capture._recorder  # type: ignore[union-attr]
    recorder.record = lambda run, tasks: run.walk(tasks)  # type: ignore[method-assign,union-attr]
    held = [p.grad for s in stages for p in s.parameters()]
    with pytest.raises(ExecutionError, match=r"1F1 cannot be captured .*stream is capturing") as e:
        subject.step(*data(8))
    assert e.value.__cause__ is error
    assert all(p.grad is g for p, g in zip((p for s in stages for p in s.parameters()), held,
                                           strict=True))  # fmt: skip
    assert len(before) == 4
    assert subject.step(*data(8)).timeline.complete


@pytest.mark.slow
def test_launch_is_nothing(captured: Make) -> None:
    """The host issues one graph, not tasks: that is what the profile says."""
    subject = captured(cut(dense(2), [1, 1]), _graph(), mse)
    assert subject.cuda_graph
    costs = _launch_of(subject)
    assert costs == 0.0
    with pipeline(cut(dense(2), [1, 1]), _graph(), mse) as eager:
        assert _launch_of(eager) > 0.0


def _launch_of(subject: px.Pipeline) -> float:
    part = subject._model.part(CudaGraphs)
    part.is_on, is_on = False, part.is_on  # calibration makes eager pipelines
    calibration = sys.modules["pipeexec.profiling.calibration"].Calibration(subject, *data(8))
    part.is_on = is_on
    calibration.warm_up(0)
    calibration.step()
    return float(calibration.result().costs.launch)


# What is refused from the beginning


def test_cpu_workers_have_no_graphs() -> None:
    with pytest.raises(ArgumentError, match=r"cuda_graph=True needs CUDA devices, got cpu"):
        pipeline(cut(dense(2), [1, 1]), _graph(), mse, cuda_graph=True)


def test_several_gpus_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"on one GPU, got cuda:0, cuda:1.*slices of one GPU"):
        check_can_capture(_graph(), named_gpus(0, 1), [None, None])


def test_several_mini_batches_are_refused() -> None:
    graph = ps.lower(ps.schedule("pipedream", n_devices=2, n_microbatches=4))
    with pytest.raises(ArgumentError, match=r"one mini-batch a step, the graph has 4"):
        check_can_capture(graph, named_gpus(0, 0), [None, None])


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"grad_norm": True}, "the norm of gradients"),
        ({"tied": [(0, 1)]}, "sums over tied stages"),
        ({"expert_layers": 1}, "layers with experts"),
    ],
)
def test_features_that_are_not_captured(options: dict[str, Any], what: str) -> None:
    graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4), hosts="one", **options)
    with pytest.raises(ArgumentError, match=rf"does not capture {what}.*leave cuda_graph out"):
        check_can_capture(graph, named_gpus(0, 0), [None, None])


def test_optimizers_must_be_capturable() -> None:
    """``capturable`` must be set where it exists; others are checked once they have a state."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    momentum = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    adam = torch.optim.Adam(parameters)
    with pytest.raises(ArgumentError, match=r"of stage 1 \(Adam\) keeps numbers on the host"):
        check_can_capture(_graph(), named_gpus(0, 0), [momentum, adam])
    check_can_capture(
        _graph(), named_gpus(0, 0), [momentum, torch.optim.Adam(parameters, capturable=True)]
    )
    adagrad = torch.optim.Adagrad(parameters)  # has no such option, and counts steps on the host
    check_can_capture(_graph(), named_gpus(0, 0), [None, adagrad])
    with pytest.raises(ArgumentError, match=r"of stage 0 \(Adagrad\) keeps numbers on the host"):
        check_state([adagrad, None], 2)
    check_state([momentum, None], 2)
