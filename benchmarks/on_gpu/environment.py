"""Step ``environment``: one probe for each ability of GPU, driver and torch that steps rely on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial

import torch

import pipeexec as px
from on_gpu.bench import Bench, noted_warnings
from on_gpu.report import Report
from pipeexec.devices.cuda import CapturedEvent, CudaEvent
from pipeexec.devices.emulated_links import StreamTimer, make_timer
from pipeexec.devices.gpu_kernels import load_kernels
from pipeexec.devices.green_contexts import find_driver
from pipeexec.devices.streams import Event, Stream
from pipesim.utils import jit

_BLOCKS = 4096
#: About 2 ms.
_CYCLES = 4_000_000
#: Cycles for which each block holds its multiprocessor, so that others go elsewhere.
_HELD = 20_000
#: Queues of the hardware, of CUDA_DEVICE_MAX_CONNECTIONS at most.
_QUEUES = 32


def environment(bench: Bench, report: Report) -> None:
    """Say what there is, and probe it."""
    report.add(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF")
    report.add(", ".join(f"{name}={os.environ.get(name, '')}" for name in names))
    if bench.dry:
        report.add(f"no GPU: {', '.join(PROBES)} are left out")
        return
    properties = torch.cuda.get_device_properties(bench.gpu)
    report.add(f"{properties.name}, {properties.multi_processor_count} SMs, compute capability "
               f"{properties.major}.{properties.minor}")  # fmt: skip
    report.add(_driver())
    report.add(f"green contexts through {getattr(find_driver(), '__name__', 'libcuda')}")
    lost = ""
    for name, probe in PROBES.items():
        if lost:
            report.check(False, f"{name}: not probed, {lost}")
            continue
        try:
            with noted_warnings(report.add):
                answer = probe(bench)
        except Exception as error:
            answer = f"no: {type(error).__name__}: {error}"
        is_met = answer.startswith("yes")
        report.record("environment", probe=name, met=is_met, said=answer)
        report.check(is_met, f"{name}: {answer}")
        lost = _lost(name)


def _lost(probe: str) -> str:
    """Return a remark if a probe left the GPU unusable for this process."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda:0").item()
    except Exception as error:
        return f"the GPU cannot be used since {probe!r}: {error}"
    return ""


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit",
               "--format=csv,noheader"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return f"driver, SM clock, memory clock, power limit: {done.stdout.strip()}"


def _noted(buffers: list[torch.Tensor]) -> list[set[int]]:
    torch.cuda.synchronize()
    return [set(buffer.tolist()) - {-1} for buffer in buffers]


def _disjoint(sms: list[set[int]]) -> bool:
    return sum(map(len, sms)) == len(set.union(*sms))


def _empty(n: int, bench: Bench) -> list[torch.Tensor]:
    return [torch.full((_BLOCKS,), -1, dtype=torch.int32, device=bench.gpu) for _ in range(n)]


def _splits(bench: Bench) -> str:
    sizes = []
    for n in bench.slice_counts:
        devices = px.slices("cuda:0", n)
        if devices[0]._part is None:
            return f"no: {n} slices are plain streams that share SMs"
        rest = devices[0]._copies
        copies = "own" if rest is devices[0]._part else f"{rest.n_sms if rest else 0} SMs of all"
        note = f" ({devices[0].note})" if devices[0].note else ""
        sizes.append(f"{n} x {devices[0].n_sms} SMs, copies on {copies}{note}")
    return f"yes: {'; '.join(sizes)}"


def _smid(bench: Bench) -> str:
    where, counts = load_kernels(bench.gpu).locate, []
    for n in bench.slice_counts:
        devices, buffers = px.slices("cuda:0", n), _empty(n, bench)
        torch.cuda.synchronize()
        for device, buffer in zip(devices, buffers, strict=True):
            device.stream("compute").submit(partial(where, buffer, _HELD))
        sms = _noted(buffers)
        if not _disjoint(sms):
            return f"no: {n} slices saw SMs {sorted(map(sorted, sms))}"
        counts.append("+".join(str(len(numbers)) for numbers in sms))
    return f"yes: {', '.join(counts)} SMs seen"


def _events(bench: Bench) -> str:
    first, second = (d.stream("compute") for d in px.slices("cuda:0", 2))
    began = first.record()
    first.submit(lambda: torch.cuda._sleep(_CYCLES))
    ended = first.record()
    second.wait_event(ended)
    after = second.record()
    torch.cuda.synchronize()
    slept, late = ended.seconds_since(began), after.seconds_since(ended)
    good = slept > 0 and -1e-6 < late < 1e-3
    return f"{'yes' if good else 'no'}: slept {slept * 1e3:.3f} ms, woke {late * 1e6:.1f} us later"


def _forked(streams: list[Stream], body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture ``body`` on streams that fork from one and join it."""
    graph, first = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=first):
        for stream in streams:
            stream.stream.wait_stream(first)  # type: ignore[attr-defined]
        body()
        for stream in streams:
            first.wait_stream(stream.stream)  # type: ignore[attr-defined]
    return graph


def _captured_slices(bench: Bench) -> str:
    where, n = load_kernels(bench.gpu).locate, bench.slice_counts[-1]
    devices, buffers = px.slices("cuda:0", n), _empty(n, bench)
    streams = [device.stream("compute") for device in devices]

    def body() -> None:
        for stream, buffer in zip(streams, buffers, strict=True):
            stream.submit(partial(where, buffer, _HELD))

    where(torch.empty(1, dtype=torch.int32, device=bench.gpu), 1)  # loads it
    graph = _forked(streams, body)
    if _noted(buffers) != [set()] * n:
        return "no: a capture ran its kernels"
    graph.replay()
    sms = _noted(buffers)
    counts = "+".join(str(len(numbers)) for numbers in sms)
    return f"{'yes' if _disjoint(sms) else 'no'}: {counts} SMs seen in a replay"


def _captured_events(bench: Bench) -> str:
    streams = [d.stream("compute") for d in px.slices("cuda:0", 2)]
    noted: list[CudaEvent] = []
    for stream in streams:
        stream.make_event = CapturedEvent  # type: ignore[attr-defined]

    def body() -> None:
        noted.append(streams[0].record())  # type: ignore[arg-type]
        streams[0].submit(lambda: torch.cuda._sleep(_CYCLES))
        noted.append(streams[0].record())  # type: ignore[arg-type]
        streams[1].wait_event(noted[-1])
        noted.append(streams[1].record())  # type: ignore[arg-type]

    torch.cuda._sleep(1)  # loads it
    graph = _forked(streams, body)
    times = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        times.append([event.seconds_since(noted[0]) for event in noted[1:]])
    good = all(0 < slept <= late + 1e-6 for slept, late in times)
    return f"{'yes' if good else 'no'}: {times} s"


def _wait(waits: StreamTimer, seconds: float) -> None:
    waits.wait_until(waits.timestamp(), seconds)


def _waits(bench: Bench) -> str:
    waits, device = make_timer(bench.gpu), px.slices("cuda:0", 2)[0]
    stream, wanted, took = device.stream("send:1"), (50e-6, 500e-6), []
    for seconds in wanted:
        for _ in range(3):  # the first one loads the kernels
            began = stream.record()
            stream.submit(partial(_wait, waits, seconds))
            ended = stream.record()
            torch.cuda.synchronize()
        took.append(ended.seconds_since(began))
    good = all(-1e-6 < a - b < 50e-6 for a, b in zip(took, wanted, strict=True))
    text = ", ".join(f"{s * 1e6:.1f} us" for s in took)
    return f"{'yes' if good else 'no'}: 50 and 500 us took {text} ({waits.description})"


def _side_by_side(bench: Bench) -> str:
    """Streams that share a queue of the hardware would take turns; there are 32 queues.

    The streams are those of a linear pipeline: a slice computes, and has a stream to and from each
    neighbour. Eight slices have 36, so that theirs are reported without a target.
    """
    ratios, good = [], True
    for n in bench.slice_counts:
        streams = [
            device.stream(name)
            for d, device in enumerate(px.slices("cuda:0", n))
            for name in ("compute", *(f"{way}:{peer}" for peer in (d - 1, d + 1) if 0 <= peer < n
                                      for way in ("send", "recv")))
        ]  # fmt: skip
        for _ in range(2):
            torch.cuda.synchronize()
            gate, sleeps = torch.cuda.Event(), []
            torch.cuda._sleep(_CYCLES)  # all are queued before any may begin
            gate.record()
            for stream in streams:
                stream.stream.wait_event(gate)  # type: ignore[attr-defined]
                began = stream.record()
                stream.submit(lambda: torch.cuda._sleep(_CYCLES))
                sleeps.append((began, stream.record()))
            torch.cuda.synchronize()
        first = sleeps[0][0]
        last = max(ended.seconds_since(first) for _, ended in sleeps)
        one = min(ended.seconds_since(began) for began, ended in sleeps)
        good = good and (last < 1.5 * one or len(streams) > _QUEUES)
        ratios.append(f"{len(streams)} streams {last / one:.2f}")
    return f"{'yes' if good else 'no'}: time over that of one: {', '.join(ratios)}"


def _event_nodes(bench: Bench) -> str:
    """Nodes of a CUDA graph that note the time: two a task, each some microseconds."""
    stream, count = px.slices("cuda:0", 2)[0].stream("compute"), 1000
    stream.make_event = CapturedEvent  # type: ignore[attr-defined]
    noted: list[Event] = []
    graph = _forked([stream], lambda: noted.extend(stream.record() for _ in range(count)))
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
    seconds = noted[-1].seconds_since(noted[0]) / (count - 1)
    return f"yes: {seconds * 1e6:.2f} us each, {count} in a row"


def _loops(bench: Bench) -> str:
    """Whether the simulator's loops are compiled; as plain Python they take seconds."""
    import numba

    good = jit.available()
    return f"{'yes' if good else 'no'}: numba {numba.__version__}"


#: In the order of their risk: one that fails may leave the GPU unusable for those behind it.
PROBES: dict[str, Callable[[Bench], str]] = {
    "loops are compiled": _loops,
    "slices are green contexts": _splits,
    "events order slices and tell the time": _events,
    "streams run side by side": _side_by_side,
    "imposed links take their time": _waits,
    "slices have SMs of their own": _smid,
    "events of a CUDA graph tell the time": _captured_events,
    "events of a CUDA graph in a row": _event_nodes,
    "a captured step stays on its slices": _captured_slices,
}
