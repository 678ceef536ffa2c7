"""Step ``instrument``: events against a second clock, and what they cost.

Measured times are those of CUDA's events. Here the kernels of a step, as CUPTI reports them through
torch.profiler, are compared with the events of the same step. Once started, CUPTI slows launches
down, also after the profiler has ended. So host times are measured before it.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import pipeexec as px
import pipesim as ps
from on_gpu.attempts import attempt
from on_gpu.bench import Bench, lowered, noted_warnings, sgd
from on_gpu.contention import contention
from on_gpu.report import Report
from on_gpu.turns import Step as TimedStep
from on_gpu.turns import in_turn, ratio
from pipeexec.devices.cuda import CapturedEvent, CudaEvent
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step
from pipeexec.executor.step_capture import Recorder
from pipeexec.executor.step_result import StepResult
from pipeexec.executor.step_runner import StepRunner
from pipesim.ops import COMPUTE

#: Largest difference of a makespan by CUPTI from that by events.
TARGET = 0.01
#: Share of a stream's kernel time within the tasks of a device from which it is that device's.
INSIDE = 0.98
_TIMED, _UNTIMED = "with times", "without times"
#: Name of the kernel of `torch.cuda._sleep`, which marks the beginning and end of a step.
_MARKER = "spin_kernel"
#: Categories of a Chrome trace for work of the GPU.
_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


def instrument(bench: Bench, report: Report) -> None:
    """Check the instrument; a part that raises costs only itself."""
    graphs = [True] if True in bench.kinds and bench.captures(True) else []
    report.add("2 slices, 1f1b of 4 micro-batches, as in validation")
    if not graphs:
        report.add("no steps as CUDA graphs: left out")
    for cuda_graph in (False, *graphs):
        _part(bench, report, f"cost of events, {_kind(cuda_graph)}", cost_of_events, cuda_graph)
    _part(bench, report, f"events beside CUPTI, {_kind(False)}", events_beside_cupti, False)
    for n in bench.slice_counts:
        if n <= 4:
            _part(bench, report, f"contention, {n} slices", contention, n)
    for cuda_graph in graphs:  # last, as it is most likely to end the process
        _part(bench, report, f"events beside CUPTI, {_kind(cuda_graph)}", events_beside_cupti,
              cuda_graph)  # fmt: skip


def _part(
    bench: Bench, report: Report, name: str, part: Callable[..., None], argument: int
) -> None:
    report.add(f"\n{name}")
    report.begin()
    with noted_warnings(report.add):
        attempt(report, name, part, bench, report, argument)
    bench.release()


def _kind(cuda_graph: bool) -> str:
    return "graph" if cuda_graph else "eager"


def _pipeline(bench: Bench, cuda_graph: bool) -> AbstractContextManager[px.Pipeline]:
    graph, stages = lowered("1f1b", 2, 4), bench.stages(2, 4)
    return bench.pipeline(graph, stages, cuda_graph=cuda_graph, optimizer=sgd)


def _batch(bench: Bench) -> tuple[Tensor, Tensor]:
    return bench.batch(4 * bench.samples(2))


# What events cost


def cost_of_events(bench: Bench, report: Report, cuda_graph: bool) -> None:
    """Time steps in turn, one kind with events that note the time, the other with none."""
    batch = _batch(bench)
    captures: dict[str, list[_Capture]] = {}
    with _unread_times(), _pipeline(bench, cuda_graph) as timed, _pipeline(
        bench, cuda_graph
    ) as untimed:  # fmt: skip

        def without_times() -> float:
            with _events_without_times():
                return untimed.step(*batch).host_seconds

        steps: dict[str, TimedStep] = {
            _TIMED: lambda: timed.step(*batch).host_seconds, _UNTIMED: without_times
        }  # fmt: skip
        for name, step in steps.items():
            with _noted_captures(bench) as captures[name]:
                for _ in range(bench.pick(3, 1)):
                    step()
        if bench.captures(cuda_graph) and not all(captures.values()):
            raise RuntimeError("no step was captured as a CUDA graph")
        times = in_turn(bench, steps, bench.pick(5, 2), bench.pick(1, 0))
        n_tasks = len(timed.graph)
    stats = ratio(times[_TIMED].wall, times[_UNTIMED].wall)
    walls = [statistics.median(times[name].wall) for name in steps]
    report.record(
        "event-cost", cuda_graph=cuda_graph, n_tasks=n_tasks, timed=walls[0], untimed=walls[1],
        ratio=stats.median, low=stats.low, high=stats.high,
    )  # fmt: skip
    seconds = (walls[0] - walls[1]) / n_tasks
    report.add(f"a step: {walls[0] * 1e3:.3f} ms with times, {walls[1] * 1e3:.3f} without, ratio "
               f"{stats.median:.4f} ({stats.low:.4f} to {stats.high:.4f}), {seconds * 1e6:+.2f} us "
               f"for each of {n_tasks} tasks")  # fmt: skip
    for name in steps:
        for capture in captures[name]:
            launch = statistics.median(times[name].host)
            attempt(report, "facts of the CUDA graph", _facts, report, name, capture, launch)


@contextmanager
def _unread_times() -> Iterator[None]:
    """Leave events of replays unread, as those of eager steps are."""
    result = StepRunner.result

    def lazy(self: StepRunner, step: Step, *, may_wait: bool = False) -> StepResult:
        return result(self, step, may_wait=True)

    with patch.object(StepRunner, "result", lazy):
        yield


@contextmanager
def _events_without_times() -> Iterator[None]:
    """Make events that order streams and do not note the time."""

    def make(self: CudaEvent) -> None:
        self.order = self.time = torch.cuda.Event()

    with patch.object(CudaEvent, "__init__", make), patch.object(CapturedEvent, "__init__", make):
        yield


# Facts of a CUDA graph


class _Capture(NamedTuple):
    """A captured step.

    Attributes
    ----------
    graph
        torch's graph, which keeps its nodes.
    capture, instantiate
        Seconds to capture and to instantiate it.
    nbytes
        Bytes that its private pool reserves.
    """

    graph: Any
    capture: float
    instantiate: float
    nbytes: int


@contextmanager
def _noted_captures(bench: Bench) -> Iterator[list[_Capture]]:
    """Give a list of the steps that are captured within the block."""
    record, captures = Recorder.record, list[_Capture]()
    keeping = partial(torch.cuda.CUDAGraph, keep_graph=True)

    def noting(self: Recorder, step: Step, tasks: Sequence[PlannedTask]) -> torch.cuda.CUDAGraph:
        bench.release()  # so that only the pool of the graph is reserved anew
        before, start = torch.cuda.memory_reserved(), perf_counter()
        with patch.object(torch.cuda, "CUDAGraph", keeping):
            graph = record(self, step, tasks)
        captured = perf_counter()
        if hasattr(graph, "instantiate"):  # the stand-in for CUDA has no such call
            graph.instantiate()
        end, after = perf_counter(), torch.cuda.memory_reserved()
        captures.append(_Capture(graph, captured - start, end - captured, after - before))
        return graph

    with patch.object(Recorder, "record", noting):
        yield captures


def _facts(report: Report, name: str, capture: _Capture, launch: float) -> None:
    """Report the size of a CUDA graph and the seconds that it takes."""
    nodes = node_counts(capture.graph)
    report.record(
        "graph-facts", events=name, capture=capture.capture, instantiate=capture.instantiate,
        launch=launch, pool_bytes=capture.nbytes, nodes=sum(nodes.values()) or None, **nodes,
    )  # fmt: skip
    text = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in nodes.items())
    report.add(f"graph {name}: captured in {capture.capture * 1e3:.1f} ms, instantiated in "
               f"{capture.instantiate * 1e3:.1f}, launched in {launch * 1e3:.3f}; pool of "
               f"{capture.nbytes / 2**20:.0f} MiB; nodes: {text or 'unknown'}")  # fmt: skip


#: Names of some values of `CUgraphNodeType`.
_NODES = {0: "kernels", 1: "copies", 2: "fills", 5: "empty_nodes", 7: "event_records"}


def node_counts(graph: Any) -> Counter[str]:
    """Return the number of nodes of each kind; empty if torch does not give the graph."""
    counts: Counter[str] = Counter()
    if not hasattr(graph, "raw_cuda_graph"):
        return counts
    library, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph())
    count, kind = ctypes.c_size_t(), ctypes.c_int()
    _check(library.cuGraphGetNodes(handle, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _check(library.cuGraphGetNodes(handle, nodes, ctypes.byref(count)))
    for node in nodes:
        _check(library.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        counts[_NODES.get(kind.value, "other_nodes")] += 1
    return counts


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the driver answered with CUDA error {status}")


# Events beside CUPTI


def events_beside_cupti(bench: Bench, report: Report, cuda_graph: bool) -> None:
    """Compare the kernels of a step, as CUPTI reports them, with its events."""
    batch = _batch(bench)
    with _pipeline(bench, cuda_graph) as subject:
        for _ in range(bench.pick(3, 1)):
            subject.step(*batch)
        timeline, kernels = _profiled(bench, lambda: subject.step(*batch))
    if bench.dry:
        report.add("the profiler ran; CPU workers have no kernels to compare")
        return
    bench.out.mkdir(parents=True, exist_ok=True)
    kernels.to_csv(bench.out / f"{_kind(cuda_graph)}-kernels.csv", index=False)
    timeline.save(bench.out / f"{_kind(cuda_graph)}-timeline.csv")
    report_spans(report, spans(timeline, between_markers(kernels)), cuda_graph)


def _profiled(bench: Bench, step: Callable[[], StepResult]) -> tuple[ps.Timeline, pd.DataFrame]:
    """Run two steps; return the timeline of the second, and the kernels of both.

    The first one pays for what CUPTI does when it begins.
    """
    is_cuda = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler, _marked_steps(bench):
        for _ in range(2):
            result = step()
        bench.wait()
    timeline = result.timeline
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text(errors="replace"), strict=False)
    return timeline, kernels_of(trace)


@contextmanager
def _marked_steps(bench: Bench) -> Iterator[None]:
    """Run a kernel on the caller's stream before and after the tasks of each step.

    Without it, kernels that copy the batch or the losses would count as kernels of tasks.
    """
    if bench.dry:
        yield
        return

    def marked(call: Callable[..., Any]) -> Callable[..., Any]:
        def method(*arguments: Any) -> Any:
            torch.cuda._sleep(1)
            value = call(*arguments)
            torch.cuda._sleep(1)
            return value

        return method

    walk, launch = marked(Step.walk), marked(Recorder.launch)
    with patch.object(Step, "walk", walk), patch.object(Recorder, "launch", launch):
        yield


def kernels_of(trace: Mapping[str, Any]) -> pd.DataFrame:
    """Return the work of the GPU in a Chrome trace, in order: start, end (s), stream, name.

    Numbers of streams are unique in their context alone, and slices have contexts of their own.
    """
    events = [x for x in trace["traceEvents"] if x.get("cat") in _WORK and "dur" in x]
    zero = min((x["ts"] for x in events), default=0.0)
    rows = [
        ((x["ts"] - zero) * 1e-6, (x["ts"] - zero + x["dur"]) * 1e-6,
         f"{x['args'].get('context')}/{x['args'].get('stream')}", x["name"][:60])
        for x in events
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["start", "end", "stream", "name"]).sort_values("start")


def between_markers(kernels: pd.DataFrame) -> pd.DataFrame:
    """Return the kernels of the last step.

    Raises
    ------
    RuntimeError
        If the trace has no kernels between two markers.
    """
    markers = kernels[kernels["name"].str.contains(_MARKER)]
    if len(markers) >= 2:
        first, last = markers.iloc[-2], markers.iloc[-1]
        inside = kernels[(kernels["start"] >= first["end"]) & (kernels["end"] <= last["start"])]
        if len(inside):
            return inside
    raise RuntimeError(
        f"CUPTI reported {len(kernels)} kernels, {len(markers)} of them markers, and none between "
        "the last two markers"
    )


class Span(NamedTuple):
    """Kernels and tasks of a device, or of all.

    Attributes
    ----------
    device
        None for all devices together.
    kernels, events
        Seconds from the first start to the last end, by CUPTI and by events.
    n_kernels
        Number of kernels.
    inside
        Share of kernel time that is within tasks; None for all devices.
    filled
        Kernel time over the time of the tasks.
    """

    device: int | None
    kernels: float
    events: float
    n_kernels: int
    inside: float | None
    filled: float

    @property
    def error(self) -> float:
        """Makespan by CUPTI over makespan by events - 1."""
        return self.kernels / self.events - 1


def spans(timeline: ps.Timeline, kernels: pd.DataFrame) -> list[Span]:
    """Compare kernels with tasks: of all devices, and of each if streams can be told apart."""
    graph = timeline.graph
    computes = graph.is_op(COMPUTE)
    tasks = pd.DataFrame(
        {"device": graph.device, "start": timeline.start, "end": timeline.end}
    )[computes]  # fmt: skip
    # CUPTI's clock has another zero. The last event follows the last kernel at once.
    shift = tasks["end"].max() - kernels["end"].max()
    kernels = kernels.assign(start=kernels["start"] + shift, end=kernels["end"] + shift)
    by_device = dict(list(tasks.groupby("device")))
    device_of = {s: _device_of(own, by_device) for s, own in kernels.groupby("stream")}
    devices = kernels["stream"].map(device_of)
    result = [_span(None, tasks, kernels)]
    is_known = _time(kernels[devices >= 0]) >= INSIDE * _time(kernels)
    if is_known and set(by_device) <= set(device_of.values()):
        result += [_span(d, own, kernels[devices == d]) for d, own in by_device.items()]
    return result


def _device_of(kernels: pd.DataFrame, tasks: Mapping[int, pd.DataFrame]) -> int:
    """Return the device in whose tasks the kernels of a stream are; -1 if there is none."""
    shares = {device: _overlap(kernels, own) / _time(kernels) for device, own in tasks.items()}
    device = max(shares, key=shares.__getitem__)
    return device if shares[device] >= INSIDE else -1


def _span(device: int | None, tasks: pd.DataFrame, kernels: pd.DataFrame) -> Span:
    seconds, inside = _time(kernels), None
    if device is not None:
        inside = _overlap(kernels, tasks) / seconds
    extent = [float(x["end"].max() - x["start"].min()) for x in (kernels, tasks)]
    return Span(device, *extent, len(kernels), inside, seconds / _time(tasks))


def _time(intervals: pd.DataFrame) -> float:
    return float((intervals["end"] - intervals["start"]).sum())


def _overlap(kernels: pd.DataFrame, tasks: pd.DataFrame) -> float:
    """Return the seconds of kernels within tasks of one device, which do not overlap."""
    begin = np.maximum.outer(kernels["start"].to_numpy(), tasks["start"].to_numpy())
    end = np.minimum.outer(kernels["end"].to_numpy(), tasks["end"].to_numpy())
    return float(np.clip(end - begin, 0.0, None).sum())


def report_spans(report: Report, device_spans: Sequence[Span], cuda_graph: bool) -> None:
    """Report how far CUPTI and events are apart."""
    for span in device_spans:
        report.record(
            "instrument", cuda_graph=cuda_graph, **span._asdict(), error=span.error, target=TARGET
        )
        where = "all" if span.device is None else f"device {span.device}"
        text = (f"{where}: makespan by CUPTI {span.kernels * 1e3:.3f} ms, by events "
                f"{span.events * 1e3:.3f}, {span.error:+.2%} (target {TARGET:.0%}); "
                f"{span.n_kernels} kernels fill {span.filled:.1%} of tasks")  # fmt: skip
        if span.inside is not None:
            text += f", {span.inside:.2%} of their time is inside"
        report.time(abs(span.error) <= TARGET, text)
    if len(device_spans) == 1:
        report.add("streams of CUPTI are not those of devices: only the whole step is compared")
