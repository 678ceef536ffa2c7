"""The host's time a task: what is counted, and what is not where full queues block it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, FakeGpu
from numpy.typing import NDArray
from small_pipelines import cut, data, dense, mse
from small_pipelines import pipeline as on_workers

import pipeexec as px
import pipesim as ps
from pipeexec.cli.report import profile_report
from pipeexec.devices.cuda import CudaStream
from pipeexec.profiling import Profile
from pipeexec.profiling.task_seconds import host_share, launch_seconds, mean_launch
from pipesim.ops import Op, is_expert_exchange
from pipesim.timeline.timeline import Timeline

GRAPH = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4))
#: What a launch into a full queue takes (s), and pieces of work that a step may have before that.
BLOCKED, QUEUE = 4e-3, 16


@dataclass
class Step:
    """A measured step, as far as it is looked at."""

    timeline: Timeline
    host_times: NDArray[np.float64] | None

    @property
    def host_seconds(self) -> float:
        return float(np.nansum(self.host_times)) if self.host_times is not None else 0.5


def _step(graph: ps.TaskGraph, seconds: dict[Op, float]) -> Step:
    """Return a step whose tasks were issued in so many seconds, by their operation; others in 1."""
    took = np.array([seconds.get(Op(op), 1.0) for op in graph.op.tolist()])
    return Step(ps.simulate(graph, ps.Costs(4.0, 8.0, input_grad=5.0, weight_grad=3.0)), took)


def test_each_operation_counts_with_its_median() -> None:
    """Of one stage; so a few that were blocked do not count, and the mean of all is right."""
    step = _step(GRAPH, {Op.F: 3.0, Op.B: 5.0})
    exact = mean_launch([step])
    assert launch_seconds([step]) == pytest.approx(exact)
    assert step.host_times is not None
    for op in (Op.F, Op.B, Op.RECV_F):  # one of four
        step.host_times[np.flatnonzero(GRAPH.op == op)[0]] += 100.0
    assert launch_seconds([step]) == pytest.approx(exact)
    assert mean_launch([step]) > 4 * exact


def test_single_micro_batches_bound_the_rest() -> None:
    """Where most of an operation's tasks were blocked; I and W are bound by the B."""
    graph = ps.lower(ps.schedule("zb_h1", n_devices=2, n_microbatches=4))
    free = {Op.F: 3.0, Op.B: 7.0, Op.I: 5.0, Op.W: 4.0}
    alone = _step(ps.lower(ps.schedule("gpipe", 2, 1)), free)
    blocked = _step(graph, dict.fromkeys(free, 100.0) | {Op.SEND_F: 0.5})
    predicted = launch_seconds([blocked, blocked], [alone])
    exact = _step(graph, free | {Op.I: 7.0, Op.W: 7.0, Op.SEND_F: 0.5})
    assert predicted == pytest.approx(mean_launch([exact]))


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({"grad_norm": True}, lambda g: g.op == Op.GRAD_NORM),
        ({"n_replicas": 2, "expert_layers": 1}, lambda g: is_expert_exchange(g.op, g.part)),
    ],
)
def test_waits_for_values_are_no_launches(options: dict[str, Any], waits: Any) -> None:
    """The host is busy, but with nothing: it waits in these tasks until the GPU is done."""
    graph = ps.lower(ps.schedule("gpipe", 2, 4), **options)
    launch = 30e-6
    took = np.where(waits(graph), 0.1, launch)
    assert waits(graph).any()
    exchanges = {"exchange_dispatch": 0.1, "exchange_combine": 0.1}
    costs = ps.Costs(4.0, 8.0, **(exchanges if "expert_layers" in options else {"grad_norm": 0.1}))
    step = Step(ps.simulate(graph, costs), took)
    assert launch_seconds([step, step], [step]) == pytest.approx(launch)


def test_without_times_of_tasks_the_mean_counts() -> None:
    """As of replays."""
    step = replace(_step(GRAPH, {}), host_times=None)
    assert launch_seconds([step]) == mean_launch([step]) == 0.5 / len(GRAPH)


def test_the_share_is_that_of_a_host() -> None:
    step = _step(GRAPH, {})
    assert host_share([step]) == pytest.approx(len(GRAPH) / step.timeline.makespan)
    assert host_share([step], 2) == host_share([step]) / 2


@pytest.mark.measures_time
def test_times_are_those_of_the_walk() -> None:
    """Of all tasks, in the order in which they were issued; their sum is nearly all there was."""
    with on_workers(cut(dense(2), [1, 1]), GRAPH, mse) as subject:
        result = subject.step(*data(8))
    assert result.host_times is not None
    assert (result.host_times > 0).all()
    assert 0.5 * result.host_seconds < result.host_times.sum() <= result.host_seconds
    assert result.timeline.issued is not None
    took = np.diff(np.sort(result.timeline.issued))
    np.testing.assert_allclose(np.sort(result.host_times[:-1]), np.sort(took), atol=1e-9)


@pytest.fixture
def _blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in block the host once a step has so much work queued."""
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr(
        sys.modules["pipeexec.profiling.calibration"], "pairs_of", lambda _: []
    )  # takes seconds
    queued = [0]
    submit, synchronize = CudaStream.submit, CudaStream.synchronize

    def slow(stream: CudaStream, work: Any) -> None:
        queued[0] += 1
        if queued[0] > QUEUE:
            sleep(BLOCKED)
        submit(stream, work)

    def empty(stream: CudaStream) -> None:
        queued[0] = 0
        synchronize(stream)

    monkeypatch.setattr(CudaStream, "submit", slow)
    monkeypatch.setattr(CudaStream, "synchronize", empty)


@pytest.mark.measures_time
@pytest.mark.usefixtures("_blocking")
@pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning")
def test_launch_is_not_that_of_full_queues(tmp_path: Path) -> None:
    """Of a profile on GPUs; reports and files also give the busy share of the host."""
    torch.set_num_threads(1)
    graph = ps.lower(ps.schedule("zb_h1", n_devices=2, n_microbatches=4))
    subject = px.Pipeline(cut(dense(2), [1, 1]), graph, [FakeGpu(), FakeGpu()], mse)
    seconds = subject.step(*data(8)).host_seconds
    assert seconds / len(graph) > 0.5 * BLOCKED
    profile = px.measure(subject, *data(8), n_steps=2, warm_up=1)
    assert isinstance(profile.costs.launch, float)
    assert 0 < profile.costs.launch < 0.25 * BLOCKED
    assert profile.launch_share < 0.5 * profile.host_share
    profile.save(tmp_path / "run")
    loaded = Profile.load(tmp_path / "run")
    assert (loaded.host_share, loaded.launch_share) == (profile.host_share, profile.launch_share)
    assert "us a task (launch), which is" in profile_report(profile)
    old = replace(profile, host_share=float("nan"), launch_share=float("nan"))
    old.save(tmp_path / "old")
    assert np.isnan(Profile.load(tmp_path / "old").host_share)
    assert "(launch)" not in profile_report(old)
