"""Pipelines whose graphs have several hosts: a thread issues for each; and imposed launches."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, FakeGpu
from small_pipelines import (
    Faulty,
    assert_order_respected,
    assert_same,
    call_within,
    cut,
    data,
    dense,
    mse,
    nap_stages,
    unsplit,
)
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.executor import host_threads
from pipeexec.executor.step_capture import check_can_capture
from pipeexec.profiling.calibration import Calibration
from pipesim.errors import (
    AccuracyWarning,
    ArgumentError,
    ExecutionError,
    StageError,
    StallError,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning"),
]

HOSTS: list[Any] = ["per_device", [0, 1, 0], [1, 0, 0]]
SLOW = 0.2  # s that a launch takes, in steps that are stopped


@pytest.fixture(params=["workers", "GPUs"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that builds pipelines, on CPU workers or on the stand-in for CUDA."""
    subjects: list[px.Pipeline] = []

    def build(stages: Any, graph: ps.TaskGraph, **options: Any) -> px.Pipeline:
        n = graph.n_devices
        devices: list[Any] = ["cpu"] * n
        if request.param == "GPUs":
            FakeCuda().install(monkeypatch)
            devices = [FakeGpu(k) for k in range(n)]
        subjects.append(px.Pipeline(stages, graph, devices, mse, **options))
        return subjects[-1]

    yield build
    for subject in subjects:
        subject.close()


def lowered(schedule: str = "1f1b", p: int = 3, m: int = 4, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(schedule, p, m), **options)


class Named(nn.Module):
    """Passes its input on; notes the thread that runs it, after some time."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.threads = seconds, set[str]()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        self.threads.add(threading.current_thread().name)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("order", ["clock_cycle", "stage_major"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_a_step_is_that_of_the_unsplit_model(make: Any, hosts: Any, order: Any) -> None:
    """To the last bit, in the order of the graph; the first stage makes the others wait."""
    for schedule in ("1f1b", "zb_h1"):
        graph = lowered(schedule, hosts=hosts, issue_order=order, recompute="except_last")
        stages, whole = (cut(dense(3), [1, 1, 1]) for _ in range(2))
        loss = unsplit(whole, graph, *data(8))
        stages[0].append(Named(2e-3))
        result = make(stages, graph).step(*data(8))
        assert torch.equal(result.loss, loss)
        assert_same([stages[0][:1], *stages[1:]], whole)
        assert_order_respected(result.timeline)


def test_replicas_reduce_their_gradients_over_hosts(make: Any) -> None:
    """In buckets too, whose reductions wait for events within backwards of other hosts."""
    for sync in ("last", "bucketed"):
        graph = lowered(p=2, n_replicas=2, hosts="per_device", grad_sync=sync)
        stages, whole = (cut(dense(4), [2, 2]) for _ in range(2))
        inputs, targets = data(8)
        make(stages, graph).step(inputs, targets)
        mse(nn.Sequential(*whole)(inputs), targets).backward()
        for actual, wanted in zip(stages, whole, strict=True):
            for parameter, other in zip(actual.parameters(), wanted.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, other.grad)


def test_a_host_is_at_home_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it never has to change the current GPU, which takes time at every task."""
    FakeCuda().install(monkeypatch)
    gpus = [FakeGpu(k, memory=k) for k in range(3)]
    with px.Pipeline(cut(dense(3), [1, 1, 1]), lowered(hosts="per_device"), gpus, mse) as subject:
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: 1 / 0)
        subject.step(*data(8))


def test_each_host_is_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs stages run in the thread that issues them."""
    FakeCuda().install(monkeypatch)
    stages = [nn.Sequential(nn.Linear(16, 16), Named()) for _ in range(3)]
    graph, before = lowered(hosts=[0, 1, 0]), set(threading.enumerate())
    with px.Pipeline(stages, graph, [FakeGpu(k) for k in range(3)], mse) as subject:
        subject.step(*data(8))
        subject.with_graph(lowered()).step(*data(8))
    own = threading.current_thread().name
    names = [{"cuda:0 host"}, {"cuda:1 host"}, {"cuda:0 host"}]
    assert [stage[1].threads for stage in stages] == [name | {own} for name in names]
    assert not any("host" in thread.name for thread in set(threading.enumerate()) - before)


@pytest.mark.parametrize("call", [{"forward": 2}, {"backward": 1}])
@pytest.mark.parametrize("index", [0, 2])
def test_a_stage_that_raises_stops_all_hosts(make: Any, index: int, call: Any) -> None:
    fault = Faulty(ValueError("broken"), **call)
    stages = cut(dense(3), [1, 1, 1])
    stages[index].append(fault)
    subject = make(stages, lowered(hosts="per_device"), timeout=20)
    with pytest.raises(StageError, match=f"device {index}, stage {index}.*ValueError: broken"):
        call_within(10, lambda: subject.step(*data(8)))
    fault.repair()
    assert np.isfinite(call_within(10, lambda: subject.step(*data(8))).timeline.makespan)


def test_a_host_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a stage that never ends holds its host up, and so the others; not the caller."""
    FakeCuda().install(monkeypatch)
    left = threading.Event()

    class Hangs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            left.wait(30)
            return super().forward(x)

    stages = [*cut(dense(2), [1, 1]), Hangs(16, 16)]
    gpus = [FakeGpu(k) for k in range(3)]
    subject = px.Pipeline(stages, lowered(hosts="per_device"), gpus, mse, timeout=0.3)
    try:
        with pytest.raises(StallError, match="2F0"):
            call_within(10, lambda: subject.step(*data(8)))
        with pytest.raises(ExecutionError, match="closed"):
            subject.step(*data(8))
    finally:
        left.set()


def slow(hosts: Any, launch: float = SLOW, **by_op: Any) -> px.Pipeline:
    """Return a pipeline whose hosts need some time to issue, 5 s and more by default."""
    devices = px.workers(3, launch=launch, **by_op)
    return px.Pipeline(cut(dense(3), [1, 1, 1]), lowered(hosts=hosts), devices, mse)


@pytest.mark.measures_time
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
@pytest.mark.parametrize("hosts", ["one", "per_device"])
def test_an_interrupt_stops_hosts(hosts: Any) -> None:
    """They issue no more tasks, and the pipeline can be used again."""
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with slow(hosts) as subject:
        timer = threading.Timer(0.15, signal.pthread_kill, (main, signal.SIGINT))
        start = time.perf_counter()
        try:
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                subject.step(*data(8))
        finally:
            signal.signal(signal.SIGINT, before)
        assert time.perf_counter() - start < 10 * SLOW
        for device in subject.devices:
            device.launch = 0.0
        assert subject.step(*data(8)).loss > 0


def test_closing_stops_hosts() -> None:
    """From another thread, as for any step."""
    subject = slow("per_device")
    timer = threading.Timer(0.15, subject.close)
    timer.start()
    with pytest.raises(ExecutionError, match="was closed while a step was running"):
        call_within(10 * SLOW, lambda: subject.step(*data(8)))
    timer.join()


def test_an_error_of_a_host_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is unchanged, and not mistaken for one of a task."""
    subject = slow([0, 1, 1], launch=0.0)
    stream = subject.devices[1].stream("compute")
    with monkeypatch.context() as patch, subject:
        patch.setattr(stream, "wait_event", lambda event: 1 / 0)  # of hosts alone
        with pytest.raises(ZeroDivisionError):
            call_within(10, lambda: subject.step(*data(8)))
        patch.undo()
        assert call_within(10, lambda: subject.step(*data(8))).loss > 0


@pytest.mark.slow
@pytest.mark.measures_time
def test_an_imposed_launch_is_what_issuing_takes() -> None:
    """No task is issued before the simulator's time; times of waking up do not add up.

    A host a device: the same, and waits for other hosts are no launches. So are messages that need
    none.
    """
    launch: dict[str, Any] = {"launch": 4e-3}
    free: dict[str, Any] = {**launch, "launch_by_op": {"messages": 0, "STEP": 8e-3}}
    for hosts, imposed in (("one", launch), ("per_device", launch), ("one", free)):
        with slow(hosts, **imposed) as subject:
            assert "launches are imposed: 0.004 s of the host a task" in repr(subject)
            assert ("task, SEND_F 0 s, RECV_F 0 s" in repr(subject)) == (imposed is free)
            results = [subject.step(*data(8)) for _ in range(3)]
        alike = lowered(hosts=hosts, host_threads=True)
        costs = ps.Costs(0, 0, **imposed)
        least = ps.simulate(alike, costs).issue_times
        for result in results:
            assert (result.timeline.issue_times >= least - 1e-9).all()
            assert result.host_seconds == pytest.approx(np.sum(result.host_times))
        total = costs.of(alike).launch.sum()  # the fastest step, which others delay least
        assert 0.8 * total < min(result.host_seconds for result in results) < 3 * total


def test_a_late_host_launches_after_the_tasks_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if they were issued while it overslept: its launch time counts from then."""
    launch, late = 2e-3, itertools.chain([0, 1.6], itertools.repeat(0))  # of the last device

    def oversleep(seconds: float) -> None:
        is_last = threading.current_thread().name == "cpu:2 host"
        time.sleep(seconds + (next(late) * launch if is_last else 0))

    monkeypatch.setattr(host_threads, "sleep", oversleep)
    graph = lowered(hosts="per_device", host_threads=True)
    least = ps.simulate(graph, ps.Costs(0, 0, launch=launch)).issue_times
    with px.Pipeline(cut(dense(3), [1, 1, 1]), graph, px.workers(3, launch=launch), mse) as subject:
        assert (subject.step(*data(8)).timeline.issue_times >= least - 1e-9).all()


@pytest.mark.slow
@pytest.mark.measures_time
def test_imposed_launches_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the costs that are measured on such workers: with one host that is late, and with two.

    Also if messages take less.
    """
    monkeypatch.setattr(
        sys.modules["pipeexec.profiling.calibration"], "pairs_of", lambda _: []
    )  # takes seconds
    launch, m = 4e-3, 6
    free: dict[str, Any] = {"launch_by_op": {"messages": 0}}
    for hosts, by_op in (("one", {}), ("per_device", {}), ("one", free)):
        graph = ps.lower(ps.schedule("gpipe", 2, m), hosts=hosts, host_threads=True, step="none")
        stages = nap_stages(2, 2e-3, 2e-3)
        workers = px.workers(2, launch=launch, **by_op)
        with px.Pipeline(stages, graph, workers, mse) as subject:
            batch = data(12, 4)
            costs = px.profile(subject, *batch, n_steps=1, warm_up=1)
            measured = subject.step(*batch).timeline.makespan
            calibrated = Calibration(subject, *batch).loaded.graph
            assert calibrated.host.tolist() == graph.host.tolist()
        assert 0.8 * launch < costs.launch < 1.6 * launch
        assert all(0 <= x < 0.4 * launch for _, x in costs.launch_by_op or ())
        assert len(costs.launch_by_op or ()) == (4 if by_op else 0)
        predicted = ps.simulate(graph, costs).makespan
        assert 0.6 < predicted / measured < 1.6
        total = ps.Costs(0, 0, launch=launch, **by_op).of(graph).launch.sum()
        assert predicted > 0.8 * total / (1 if hosts == "one" else 2)


@pytest.mark.parametrize("launch", [-1e-3, float("inf"), "fast", None])
def test_launches_that_mean_nothing(launch: Any) -> None:
    with pytest.raises(ArgumentError, match="launch must be finite seconds >= 0 a task, got"):
        px.workers(2, launch=launch)


def test_predictions_of_gpipe_have_its_launches() -> None:
    """Those that are imposed, also by operation."""
    for options in ({"launch": 1e-3}, {"launch_by_op": {"F": 1e-3}}):
        devices = px.workers(2, **options)  # type: ignore[arg-type]
        model = px.GPipe(nn.Sequential(*dense(2)), [1, 1], devices=devices, chunks=2)
        validation = px.validate(
            model, loss_fn=mse, batches=iter(lambda: data(8), None), n_steps=1, warm_up=0
        )
        costs = validation.costs
        assert (costs.launch, costs.launch_by_op) == (
            options.get("launch", 0.0), (("F", 1e-3),) if "launch_by_op" in options else None,
        )  # fmt: skip


def test_a_capture_has_one_host() -> None:
    graph = lowered(p=2, hosts="per_device")
    check_can_capture(lowered(p=2), gpus := _slices(2), [None, None])
    with pytest.raises(
        ArgumentError, match=r"captures what one host issues, the graph has 2.*'one"
    ):
        check_can_capture(graph, gpus, [None, None])


def _slices(n: int) -> Any:
    """Return devices of one GPU, as far as that is looked at."""

    class Slice:
        torch_device = torch.device("cuda", 0)

    return [Slice() for _ in range(n)]


def test_memory_and_validation_with_hosts() -> None:
    """The counts of a step do not depend on the host threads that issue its tasks."""
    schedule, counted = ps.schedule("gpipe", 2, 2), []
    batch = torch.randn(4, 3), torch.randn(4, 3)
    for devices, options in (
        (["cpu"] * 2, {}),
        (["cpu"] * 2, {"hosts": "per_device", "host_threads": True}),
        (px.workers(2, launch=1e-4), {}),
    ):
        stages = [nn.Linear(3, 3), nn.Linear(3, 3)]
        graph = ps.lower(schedule, **options)
        with px.Pipeline(stages, graph, devices, nn.functional.mse_loss) as pipeline:
            counted.append(pipeline.memory(*batch).peak.tolist())
    assert counted[0] == counted[1] == counted[2]
    assert min(counted[0]) > 0


def test_processes_are_not_threads() -> None:
    """Hosts that a graph takes for processes are threads in a pipeline of one process."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), hosts="per_device")
    stages = [nn.Linear(3, 3), nn.Linear(3, 3)]
    with pytest.warns(AccuracyWarning, match="lower it with host_threads=True"):
        px.Pipeline(stages, graph, ["cpu"] * 2, nn.functional.mse_loss).close()
