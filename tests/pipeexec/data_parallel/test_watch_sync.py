"""The linter of gradient synchronization: loops that are watched, traces, and timelines."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from places import BENCHMARKS
from ranks import Ranks
from small_pipelines import dense, mse
from test_accumulation import _parts, _replica, _sgd
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import pipeexec as px
import pipesim as ps
from pipeexec.data_parallel import sync_report
from pipeexec.data_parallel.sync_rules import (
    CLEAR,
    STEP,
    AllReduceCall,
    MicroStep,
    SyncReport,
    apply_rules,
)
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError, ExecutionError, TimelineError

sys.path.insert(0, str(BENCHMARKS))
from _no_sync_variants import VARIANTS

K = 4
#: Bytes of the gradients of `dense(2)`, which are one bucket.
NBYTES = 4 * sum(x.numel() for x in dense(2).parameters())

Findings = dict[str, tuple[list[int], int, float]]


def _findings(report: SyncReport) -> Findings:
    """Return micro-steps, calls and bytes by kind of finding; check what is true of all."""
    for x in report.findings:
        assert 0 <= x.saved <= x.seconds <= report.seconds
        assert (x.seconds > 0) == (x.n_calls > 0)
        assert f"{x.kind} ({x.model})" in str(report)
    return {x.kind: (list(x.micro_steps), x.n_calls, x.nbytes) for x in report.findings}


def _calls(micro_steps: list[int]) -> tuple[list[int], int, float]:
    """Return a finding of an all-reduce of a bucket in each of some micro-steps."""
    return micro_steps, len(micro_steps), len(micro_steps) * NBYTES


#: What each of the published loops is told, in 11 batches of which K are accumulated.
PUBLISHED: dict[str, tuple[int, Findings]] = {
    "baseline": (
        11,
        {"added_to": _calls([1, 2, 3, 5, 6, 7]), "never_stepped": _calls([9, 10])},
    ),
    "no_sync_improper": (
        11,
        {"forward_outside_no_sync": _calls([1, 2, 3, 5, 6, 7]), "never_stepped": _calls([9, 10])},
    ),
    "no_sync": (3, {}),
    "accumulate": (3, {}),
    "listing": (2, {"not_cleared": ([4, 8], 0, 0.0)}),
}

Loop = Callable[[DistributedDataParallel, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]], None]


def _forward_inside(ddp: Any, optimizer: Any, parts: Any) -> None:
    for inputs, targets in parts[:2]:
        optimizer.zero_grad()
        with ddp.no_sync():
            loss = mse(ddp(inputs), targets)
        loss.backward()
        optimizer.step()


def _cleared_late(ddp: Any, optimizer: Any, parts: Any) -> None:
    """Accumulate, but clear gradients right before each step's own backward."""
    for inputs, targets in parts[:2]:
        mse(ddp(inputs), targets).backward()
        for parameter in ddp.parameters():
            parameter.grad = None
        mse(ddp(inputs), targets).backward()
        optimizer.step()
        ddp.zero_grad()


def _each_is_stepped(ddp: Any, optimizer: Any, parts: Any) -> None:
    enabled, disabled = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    for (inputs, targets), scaler in zip(parts, (enabled, enabled, disabled), strict=False):
        optimizer.zero_grad()
        scaler.scale(mse(ddp(inputs), targets)).backward()
        closures = [] if scaler is enabled else [lambda: 0.0]
        scaler.step(optimizer, *closures)
        scaler.update()


def _several_losses(ddp: Any, optimizer: Any, parts: Any) -> None:
    accumulation = px.GradientAccumulation(ddp, optimizer, 2)
    for inputs, targets in parts[:2]:
        with accumulation.microbatch(len(inputs), n_losses=2):
            accumulation.backward(mse(ddp(inputs), targets))
            accumulation.backward(ddp(inputs).square().mean())


#: Other loops: all-reduces, and what they are told.
OTHERS: dict[str, tuple[Loop, int, Findings]] = {
    "forward inside": (
        _forward_inside,
        0,
        {
            "forward_inside_no_sync": ([0, 1], 0, 0.0),
            "unsynchronized_step": ([0, 1], 0, 0.0),
        },
    ),
    "cleared late": (_cleared_late, 4, {"overwritten": _calls([0, 2])}),
    "each is stepped": (_each_is_stepped, 3, {}),
    "several losses": (_several_losses, 1, {}),
}


def _judged(loop: Loop, named: bool = False, hooked: bool = False) -> tuple[int, Findings]:
    """Return the number of all-reduces of a loop, and what it is told."""
    if hooked:  # by a hook in Python
        ddp, optimizer, _ = _replica(dense(2))
    else:
        ddp = DistributedDataParallel(dense(2))
        optimizer = _sgd(ddp)
    with px.watch_sync(ddp if named else None) as sync:
        loop(ddp, optimizer, _parts(*[2] * 11))
    report = sync.report()
    assert (report.nbytes, report.n_calls) == (NBYTES * report.n_calls, report.n_calls)
    assert 0 <= report.exposed <= report.seconds
    return report.n_calls, _findings(report)


def _published(name: str) -> Loop:
    return lambda ddp, optimizer, parts: VARIANTS[name](ddp, optimizer, parts, K)


def _by_hand(processes: Processes) -> Findings:
    """Reduce gradients without DDP, but for those of the last micro-step."""
    model = dense(2)
    optimizer = _sgd(model)
    with px.watch_sync(model) as sync:
        for _ in range(2):
            for inputs, targets in _parts(2, 2, seed=processes.rank):
                mse(model(inputs), targets).backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            dist.all_reduce(torch.ones(3))  # a metric
            optimizer.step()
            optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()
    return _findings(sync.report())


class _Either(nn.Module):
    """Two layers, of which each forward uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs: Tensor, layers: str) -> Tensor:
        return torch.stack([getattr(self, name)(inputs) for name in layers]).sum()


def _unused(
    layers: list[str], n_steps: int = 0, **options: Any
) -> tuple[list[tuple[str, list[int], Any]], str]:
    """Return kind, micro-steps and parameters of each finding, with a micro-step a forward."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(_Either(), **options)
    optimizer = _sgd(ddp)
    accumulation = px.GradientAccumulation(ddp, optimizer, n_steps=n_steps or len(layers))
    with px.watch_sync() as sync:
        for names in layers:
            with accumulation.microbatch():
                accumulation.backward(ddp(torch.ones(4, 2), names))
    report = sync.report()
    return [(x.kind, list(x.micro_steps), x.parameters) for x in report.findings], str(report)


def _unused_cases(_: Processes) -> list[Any]:
    return [
        _unused(["a", "b"]),
        _unused(["a"]),
        _unused(["a", "ab"]),
        _unused(["a", "b"], find_unused_parameters=True),
        _unused(["ab", "b"], n_steps=1, bucket_cap_mb=1e-6),  # a bucket a parameter from 1 on
    ]


def test_unused_parameters_are_the_cause(two_ranks: Ranks) -> None:
    """DDP waits for their gradients: the report names them and the option, if that is so."""
    a, b = (("a.weight", "a.bias"), ("b.weight", "b.bias"))
    for results in two_ranks.run(_unused_cases):
        findings, texts = zip(*results, strict=True)
        assert findings[0] == [("unused_parameters", [0, 1], a)]
        assert findings[1] == [("unused_parameters", [0], b)]
        assert findings[2] == findings[3] == []
        assert findings[4] == [("unused_parameters", [1], a)]
        for k in (0, 1, 4):
            assert "find_unused_parameters=True" in texts[k]
            assert "outside no_sync()" not in texts[k]
        assert "1 micro-step 0: b.weight, b.bias" in texts[1]
        assert "0 all-reduces" in texts[1]
        assert "3 all-reduces" in texts[4]  # of all, and of the buckets of b, the first ones


def _all_cases(processes: Processes) -> dict[str, Any]:
    before = _patched()
    results: dict[str, Any] = {name: _judged(_published(name)) for name in PUBLISHED}
    results |= {name: _judged(loop) for name, (loop, _, _) in OTHERS.items()}
    results["given, with a hook"] = _judged(_published("baseline"), named=True, hooked=True)
    results["by hand"] = _by_hand(processes)
    assert _patched() == before
    return results


def _patched() -> list[object]:
    """Return what a watch replaces."""
    return [
        vars(DistributedDataParallel)["forward"], vars(torch.optim.Optimizer)["zero_grad"],
        vars(nn.Module)["zero_grad"], vars(torch.amp.GradScaler)["step"], torch.autograd.backward,
        torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Autograd"),
    ]  # fmt: skip


def test_published_and_other_loops(two_ranks: Ranks) -> None:
    """The five loops of the no_sync guide, and what else can go wrong."""
    expected: dict[str, Any] = {**PUBLISHED, **{name: row[1:] for name, row in OTHERS.items()}}
    expected["given, with a hook"] = PUBLISHED["baseline"]
    n_tensors = len(list(dense(2).parameters()))
    expected["by hand"] = {
        "added_to": ([0, 2], 2 * n_tensors, 2.0 * NBYTES),
        "unsynchronized_step": ([4], 0, 0.0),
    }
    for results in two_ranks.run(_all_cases):
        assert results == expected


@pytest.fixture
def alone() -> Iterator[None]:
    """Be a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_trace_tells_the_same(tmp_path: Path) -> None:
    """In a process alone, too."""
    ddp = DistributedDataParallel(dense(2))
    optimizer, path = _sgd(ddp), str(tmp_path / "trace.json")
    parts = _parts(*[2] * 11)
    VARIANTS["no_sync"](ddp, optimizer, parts[:1], K)
    for name in ("baseline", "accumulate", "listing"):
        n_calls, expected = PUBLISHED[name]
        optimizer.zero_grad()
        with px.watch_sync() as sync, profile() as profiled:
            VARIANTS[name](ddp, optimizer, parts, K)
        profiled.export_chrome_trace(path)
        watched, traced = sync.report(), sync_report(path)
        assert _findings(watched) == expected
        actual = {kind: row[:2] for kind, row in _findings(traced).items()}
        assert actual == {kind: row[:2] for kind, row in expected.items()}
        assert traced.n_calls == n_calls
        assert (traced.n_micro_steps, traced.n_steps) == (watched.n_micro_steps, watched.n_steps)
        assert "a trace does not tell where no_sync() was" in str(traced)


@pytest.mark.usefixtures("alone")
def test_watches_end_where_a_loop_raises_and_do_not_nest() -> None:
    before = _patched()
    ddp = DistributedDataParallel(dense(2))
    watch = px.watch_sync()
    with px.watch_sync(), pytest.raises(ExecutionError, match="watched already"):
        watch.__enter__()
    with pytest.raises(OSError, match="disk"), px.watch_sync(ddp):
        raise OSError("a flaky disk")
    assert _patched() == before
    assert not any(x._post_accumulate_grad_hooks for x in ddp.parameters())
    with px.watch_sync() as sync:
        pass
    assert "no backward of a watched model was seen" in str(sync.report())
    assert "nothing found" not in str(sync.report())
    with pytest.raises(ArgumentError, match="no parameter"), px.watch_sync(nn.ReLU()):
        pass
    ((inputs, targets),) = _parts(2)
    for group, n_calls in ((dist.new_group([0]), 0), (dist.group.WORLD, 1)):
        with px.watch_sync(group=group) as sync:
            mse(ddp(inputs), targets).backward()
        assert sync.report().n_calls == n_calls
        assert "one process" not in str(sync.report())  # without a step it does not matter


def _call(start: float, end: float, exposed: float) -> AllReduceCall:
    return AllReduceCall(8.0, (start, end), ((end - exposed, end),))


def test_seconds_are_those_in_which_nothing_was_computed() -> None:
    """Two calls at one time count once, and those of the last micro-step are of use."""
    first = MicroStep(0, calls=[_call(0.0, 4.0, 1.0), _call(2.0, 5.0, 2.0)])
    second = MicroStep(1, calls=[_call(10.0, 12.0, 2.0)])
    report = apply_rules({"model": [first, second, STEP, CLEAR]})
    (finding,) = report.findings
    assert (finding.kind, finding.n_calls, finding.nbytes) == ("added_to", 2, 16.0)
    assert (finding.seconds, finding.saved, report.saved) == (5.0, 2.0, 2.0)
    assert (report.seconds, report.exposed) == (7.0, 4.0)
    text = "added_to (model), 1 micro-step 0: 2 all-reduces of 1.6e-05 MB in all took 5e+03 ms; "
    assert f"{text}no_sync would save 2e+03 ms" in str(report)
    assert apply_rules({"model": [second, STEP, CLEAR]}).findings == ()


def test_seconds_of_all_reduces_within_each_other_count_once() -> None:
    """From 0 to 10, from 2 to 3, from 4 to 12; nothing else ran from 2 to 3 and from 5 to 12."""
    calls = [_call(0.0, 10.0, 5.0), _call(2.0, 3.0, 1.0), _call(4.0, 12.0, 6.0)]
    report = apply_rules({"model": [MicroStep(0, calls=calls), STEP, CLEAR]})
    assert (report.seconds, report.exposed) == (12.0, 8.0)


def test_kernels_of_a_gpu_say_what_overlaps(tmp_path: Path) -> None:
    """Two micro-steps over NCCL, written by hand: half of the first all-reduce is overlapped."""
    events: list[dict[str, Any]] = []

    def add(name: str, start: float, end: float, cat: str = "cpu_op", **args: Any) -> None:
        events.append({"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": 1, "ts": start,
                       "dur": end - start, "args": args})  # fmt: skip

    node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    for origin in (0.0, 100.0):
        add("DistributedDataParallel.forward", origin, origin + 5, "user_annotation")
        add(node, origin + 10, origin + 14)
        add("torch::autograd::AccumulateGrad", origin + 10, origin + 11)
        add("c10d::allreduce_", origin + 12, origin + 13)
        add("record_param_comms", origin + 12, origin + 13, **{
            "Collective name": "allreduce", "In msg nelems": 100, "dtype": "Half"})  # fmt: skip
        add("ncclDevKernel_AllReduce_Sum_f16_RING_LL", origin + 20, origin + 60, "kernel")
        add("gemm", origin + 15, origin + 40, "kernel")
    add("c10d::allreduce_", 170, 171)  # of a metric, which no backward calls
    add("record_param_comms", 170, 171, **{
        "Collective name": "allreduce", "In msg nelems": 1, "dtype": "Float"})  # fmt: skip
    add("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 171, 172, "kernel")
    add("Optimizer.step#SGD.step", 180, 190, "user_annotation")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    report = sync_report(path)
    (finding,) = report.findings
    assert (finding.kind, finding.micro_steps, finding.nbytes) == ("added_to", (0,), 200.0)
    assert finding.seconds == pytest.approx(40e-6)
    assert finding.saved == pytest.approx(20e-6)
    assert (report.n_calls, report.nbytes) == (2, 400.0)
    assert "1 further all-reduce of 0.001 ms in all" in str(report)  # that of the metric
    events = [x for x in events if x["name"] != "DistributedDataParallel.forward"]
    path.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(TimelineError, match=r"has no range 'DistributedDataParallel.forward'"):
        sync_report(path)


@pytest.mark.parametrize("step", [None, 0.5])
def test_a_timeline_with_a_sum_a_micro_batch(step: float | None) -> None:
    """``every`` sums K times, of which one is of use; beside a backward they cost nothing."""
    costs = ps.Costs(forward=1.0, backward=2.0, reduce_grad=2.5, gradient_bytes=10.0,
                     **({} if step is None else {"optimizer_step": step}))  # fmt: skip
    graphs = {
        mode: ps.lower(ps.schedule("1f1b", 1, 4), n_replicas=2, grad_sync=mode)
        for mode in ("every", "last")
    }
    reports = {mode: sync_report(ps.simulate(graph, costs)) for mode, graph in graphs.items()}
    assert reports["last"].findings == ()
    assert [x.model for x in reports["every"].findings] == ["stage 0 of 2 replicas"]
    text = str(reports["every"])
    assert "3 micro-batches 0-2: " in text
    assert 'lower with grad_sync="last"' in text
    assert "no_sync" not in text
    for finding in reports["every"].findings:
        assert (finding.kind, finding.micro_steps) == ("added_to", (0, 1, 2))
        assert (finding.n_calls, finding.nbytes) == (3, 30.0)
        assert finding.seconds == pytest.approx(7.5)
        assert finding.saved == 0.0
    two_batches = ps.schedule("1f1b", 2, 8).with_updates(2, "stashed")
    for schedule in (ps.schedule("gpipe", 2, 4), two_batches):  # of gpipe, micro-batch 0 is last
        for options in ({"grad_sync": "last"}, {"grad_sync": "bucketed", "n_buckets": 3}):
            graph = ps.lower(schedule, n_replicas=2, **options)  # type: ignore[arg-type]
            assert sync_report(ps.simulate(graph, costs)).findings == ()
    every = ps.lower(two_batches, n_replicas=2, grad_sync="every")
    findings = sync_report(ps.simulate(every, costs)).findings
    assert {x.micro_steps for x in findings} == {(0, 1, 2, 4, 5, 6)}
    serial = ps.lower(ps.schedule("1f1b", 1, 4), n_replicas=2, grad_sync="every", overlap=False)
    report = sync_report(ps.simulate(serial, costs))
    for finding in report.findings:
        assert finding.saved == pytest.approx(7.5)
    assert math.isclose(report.findings[0].saved, report.saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "added_to" in str(report)


def test_a_timeline_of_replicas_that_differ_or_are_sharded_or_alone() -> None:
    costs = ps.Costs(forward=1.0, backward=2.0, reduce_grad=2.5, gradient_bytes=10.0)
    gpipe = ps.schedule("gpipe", 2, 4)
    notes = {
        "the graph has one replica: nothing to synchronize": ps.lower(gpipe),
        "stage 0 is sharded: each row has one owner": ps.lower(gpipe, n_replicas=2, sharded=[0]),
    }
    for note, graph in notes.items():
        report = sync_report(ps.simulate(graph, costs))
        assert report.findings == ()
        assert f"note: {note}" in str(report)
    every = ps.lower(ps.schedule("1f1b", 1, 4), n_replicas=2, grad_sync="every")
    timeline = ps.simulate(every, costs)
    end = timeline.end.copy()
    end[(every.op == ps.Op.REDUCE_GRAD) & (every.replica == 1) & (every.microbatch == 0)] += 0.5
    findings = sync_report(replace(timeline, end=end)).findings
    assert [x.model for x in findings] == [f"stage 0 of replica {k}" for k in range(2)]


def _one_step(model: nn.Module) -> SyncReport:
    """Step once, without an all-reduce for a model that is not DDP."""
    optimizer = _sgd(model)
    ((inputs, targets),) = _parts(2)
    with px.watch_sync(model) as sync:
        mse(model(inputs), targets).backward()
        optimizer.step()
    return sync.report()


def test_one_process_has_nothing_to_synchronize(request: pytest.FixtureRequest) -> None:
    """Without a process group, and in a group of one process."""
    for _ in range(2):
        report = _one_step(dense(2))
        assert (report.n_steps, report.findings) == (1, ())
        assert "note: one process: nothing to synchronize" in str(report)
        assert "every all-reduce was of use" not in str(report)
        if not dist.is_initialized():
            request.getfixturevalue("alone")


def test_a_trace_that_is_missing(tmp_path: Path) -> None:
    """A file is suggested for its name, and not for its suffix alone."""
    (tmp_path / "container_info.json").touch()
    with pytest.raises(TimelineError, match=r"No such file or directory; check the path$"):
        sync_report(tmp_path / "nope.json")
    with pytest.raises(TimelineError, match=r"did you mean 'container_info.json'"):
        sync_report(tmp_path / "container-info.json")


#: Names of kernels of all-reduces in published traces; the last is of no known library.
KERNELS = [
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
    "ncclKernel_Generic_4(ncclDevComm*, unsigned long, ncclWork*)",
    "void mscclKernel_Sum_float_Simple<false>()",
    "void vendor::sum<4, float>(int)",
]


def _all_reduces_on_gpu(
    tmp_path: Path, source: str, kernel: str, *, grouped: bool = False
) -> SyncReport:
    """Report on two micro-steps, whose all-reduces take 5 ms on the GPU and 30 us on the host.

    ``source`` says how the trace tells which kernel is of which call. A broadcast, and kernels of
    3 ms behind the first all-reduce, of which nothing is communication, are there, too.
    """
    events: list[dict[str, Any]] = []

    def add(name: str, cat: str, start: float, length: float, **args: Any) -> None:
        events.append({"ph": "X", "name": name, "cat": cat, "ts": start, "dur": length,
                       "pid": 0 if cat in ("kernel", "gpu_user_annotation") else 1,
                       "tid": args.pop("tid", 2), "args": args})  # fmt: skip

    def arguments(number: int, external: int) -> dict[str, Any]:
        numbers = {"correlation": number} if "launch" in source else {}
        return {**numbers, **({"External id": external} if "operation" in source else {})}

    node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    for k in range(2):
        t = 20000.0 * k
        add("DistributedDataParallel.forward", "user_annotation", t, 100, tid=1)
        add("c10d::broadcast_", "cpu_op", t + 110, 20, tid=1, **{"External id": 40 + k})
        add("hipExtLaunchKernel", "hip_runtime", t + 115, 5, tid=1, correlation=30 + k)
        if kernel.startswith("nccl"):
            add(KERNELS[1], "kernel", t + 120, 40, **arguments(30 + k, 40 + k),
                **({"Collective name": "broadcast"} if source == "order" else {}))  # fmt: skip
        add(node, "cpu_op", t + 200, 200)
        add("torch::autograd::AccumulateGrad", "cpu_op", t + 210, 20)
        for part in range(1 + grouped):
            begin = t + 250 + 60 * part
            add("c10d::allreduce_", "cpu_op", begin, 50)
            add("record_param_comms", "cpu_op", begin + 10, 35, **{
                "External id": 10 * part + k + 1, "Collective name": "allreduce", "dtype": "Float",
                "In msg nelems": 1_000_000 // (1 + grouped)})  # fmt: skip
            add("nccl:all_reduce", "user_annotation", begin + 15, 30, **{"External id": 20 + k})
        add("hipExtLaunchKernel", "hip_runtime", t + 270 + 100 * grouped, 5, correlation=k + 1)
        if kernel:
            add(kernel, "kernel", t + 1000, 5000, **arguments(k + 1, k + 1))
        if "copy" in source:
            add("nccl:all_reduce", "gpu_user_annotation", t + 1000, 5000, **{
                "External id": 20 + k} if "operation" in source else {})  # fmt: skip
        add("gemm", "kernel", t + 1000, 3000, correlation=77)
    add("Optimizer.step#SGD.step", "user_annotation", 30000, 50, tid=1)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return sync_report(path)


@pytest.mark.parametrize(
    ("source", "kernel"),
    [
        *(("launch", kernel) for kernel in KERNELS),
        *(("operation", kernel) for kernel in KERNELS),
        *(("order", kernel) for kernel in KERNELS[:5]),
        ("copy", ""),
        ("copy, operation", ""),
        ("copy, launch", KERNELS[-1]),
    ],
)
def test_all_reduces_last_as_long_as_kernels(tmp_path: Path, source: str, kernel: str) -> None:
    """Whatever the kernel is called: the launch, the operation, the copy or the order source it."""
    report = _all_reduces_on_gpu(tmp_path, source, kernel)
    assert report.seconds == pytest.approx(10e-3)
    assert report.exposed == pytest.approx(4e-3)
    assert report.nbytes == 8e6
    (finding,) = report.findings
    assert (finding.kind, finding.n_calls, finding.nbytes) == ("added_to", 1, 4e6)
    assert finding.seconds == pytest.approx(5e-3)
    assert finding.saved == pytest.approx(2e-3)
    assert report.notes == ("a trace does not tell where no_sync() was",)


@pytest.mark.parametrize("source", ["launch", "order"])
def test_grouped_all_reduces_share_their_kernel(tmp_path: Path, source: str) -> None:
    """One kernel, launched after two calls, counts once."""
    report = _all_reduces_on_gpu(tmp_path, source, KERNELS[1], grouped=True)
    assert (report.n_calls, report.nbytes) == (4, 8e6)
    assert report.seconds == pytest.approx(10e-3)
    (finding,) = report.findings
    assert (finding.n_calls, finding.nbytes) == (2, 4e6)
    assert finding.seconds == pytest.approx(5e-3)
    assert ("shared out in order" in str(report)) == (source == "order")


def test_kernels_of_no_call_are_named(tmp_path: Path) -> None:
    """Where no kernel is of a call, the seconds are those of calls, and a note says both."""
    events = json.loads(_trace_with_an_early_kernel(tmp_path).read_text())["traceEvents"]
    assert len(events) > 20
    report = sync_report(tmp_path / "trace.json")
    assert report.seconds == pytest.approx(10e-3)
    note = "1 kernel of communication, 7 ms in all, belong to no call that the trace shows"
    assert note in str(report)
    assert "not counted: ncclDevKernel_Generic" in str(report)
    events = [x for x in events if x["name"] not in (*KERNELS, "gemm")]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    report = sync_report(tmp_path / "trace.json")
    assert report.seconds == pytest.approx(100e-6)
    assert "does not tell when all-reduces ended; their seconds are those of the calls" in str(
        report
    )


def _trace_with_an_early_kernel(tmp_path: Path) -> Path:
    """Write a trace whose first kernel was launched before the trace begins."""
    _all_reduces_on_gpu(tmp_path, "launch", KERNELS[1])
    path = tmp_path / "trace.json"
    events = json.loads(path.read_text())["traceEvents"]
    early = {"ph": "X", "name": KERNELS[1], "cat": "kernel", "ts": -9000, "dur": 7000, "pid": 0,
             "tid": 2, "args": {"correlation": 99}}  # fmt: skip
    path.write_text(json.dumps({"traceEvents": [early, *events]}))
    return path
