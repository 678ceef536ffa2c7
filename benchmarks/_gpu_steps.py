"""Steps of ``benchmarks/gpu.py``: overlap, host time, peers, memory, soak."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from _gpu import (
    Bench,
    Report,
    counted_replays,
    hidden_share,
    lowered,
    messages_timed_once,
    noted_warnings,
    sgd,
)
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.models import cross_entropy

MICROSECONDS = 25.0  # of the host a task, without CUDA graphs


def overlap(bench: Bench, report: Report) -> None:
    """Show by timelines that copies run beside compute, and with ``overlap=False`` do not."""
    n = bench.pick(4, 2)
    m, batch = 2 * n, bench.batch(2 * n)  # tasks of a millisecond
    links = {"50 GB/s, 10 us": ps.Network(10e-6, 50e9), "5 GB/s, 10 us": ps.Network(10e-6, 5e9)}
    report.say(f"{n} slices with imposed links: share of the SENDs' time in which their slice "
               "computes, and the makespan; medians of 5 steps")  # fmt: skip
    for link_name, link in links.items():
        for name in ("gpipe", "1f1b") if "50" in link_name else ("1f1b",):
            for cuda_graph in (False, True):
                shares, makespans = {}, {}
                for overlaps in (True, False):
                    graph = lowered(name, n, m, overlaps)
                    with (
                        noted_warnings(report.say),
                        bench.pipeline(graph, bench.stages(n, 2 * n), cuda_graph=cuda_graph,
                                       link=link, optimizer=sgd) as subject,
                    ):  # fmt: skip
                        steps = [subject.step(*batch) for _ in range(bench.pick(8, 2))][-5:]
                    lines = [step.timeline for step in steps]
                    shares[overlaps] = statistics.median(map(hidden_share, lines))
                    makespans[overlaps] = statistics.median(x.makespan for x in lines)
                report.check(
                    bench.dry or (shares[True] > 0.3 and shares[False] < 0.01),
                    f"{link_name}, {name}{', graph' if cuda_graph else ''}: on {shares[True]:.0%} "
                    f"{makespans[True] * 1e3:.2f} ms, off {shares[False]:.0%} "
                    f"{makespans[False] * 1e3:.2f} ms",
                )


def host(bench: Bench, report: Report) -> None:
    """Time the host a task, with stages that do nothing, and say where the time goes."""
    n = bench.pick(4, 2)
    m = 8 * n
    report.say(f"{n} slices, {m} micro-batches, empty stages; microseconds a task, medians")
    for name in ("gpipe", "1f1b"):
        graph = ps.lower(ps.schedule(name, n, m), step="none")
        batch = torch.zeros(m, 1), torch.zeros(m, 1)
        for cuda_graph in (False, True):
            with px.Pipeline(
                [nn.Identity() for _ in range(n)], graph, bench.devices(n), lambda y, t: y.sum(),
                cuda_graph=bench.captures(cuda_graph),
            ) as subject:  # fmt: skip
                steps = [subject.step(*batch) for _ in range(bench.pick(33, 4))][3:]
                issue, step = (
                    statistics.median(values) / len(graph) * 1e6
                    for values in ([x.host_seconds for x in steps],
                                   [x.timeline.makespan for x in steps])
                )  # fmt: skip
                kind = "one graph" if cuda_graph else "eager"
                report.check(
                    bench.dry or issue <= MICROSECONDS,
                    f"{name}, {kind}: host {issue:.2f}, step {step:.2f}, {len(graph)} tasks",
                )
                if name == "1f1b" and not cuda_graph:
                    report.say(_hottest(lambda: [subject.step(*batch) for _ in range(5)]))  # noqa: B023


def _hottest(call: Callable[[], Any]) -> str:
    """Return the functions in which a call spends most; the profiler slows all down."""
    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.runcall(call)
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(16)
    return text.getvalue().strip()


def peers(bench: Bench, report: Report) -> None:
    """Compare with what a user would write by hand, in turns.

    torchgpipe and torch.distributed.pipelining give each stage a GPU, or a process, of its own, so
    that neither runs several stages on one GPU. What they do on several is done here by hand on
    the same slices, and plain accumulation of gradients on the whole GPU beside a pipeline of one.
    """
    n = bench.pick(4, 2)
    m = 2 * n
    batch = bench.batch(m * bench.samples(n))
    for line in (peers.__doc__ or "").splitlines()[2:]:
        report.say(line.strip())
    pairs: dict[str, tuple[Any, Any]] = {
        "one device, the whole GPU": (_ours(bench, 1, batch, m, n), _loop(bench, batch, m, n)),
        f"GPipe on {n} slices": (_ours(bench, n, batch, m, n), _by_hand(bench, batch, m, n)),
    }
    report.say("seconds of a step by the wall, without optimizer; ratio: ours over theirs, median "
               "of 20 rounds in turn")  # fmt: skip
    for name, (ours, theirs) in pairs.items():
        times: list[tuple[float, float]] = []
        for number in range(bench.pick(23, 3)):
            pair = _timed(bench, ours), _timed(bench, theirs)
            if number >= 3 or bench.dry:
                times.append(pair)
        ratio = statistics.median(a / b for a, b in times)
        a, b = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        report.check(
            bench.dry or ratio <= 1.0,
            f"{name}: ours {a:.2f} ms, by hand {b:.2f} ms, ratio {ratio:.3f}",
        )


def _timed(bench: Bench, step: Callable[[], object]) -> float:
    bench.wait()
    start = perf_counter()
    step()
    bench.wait()
    return perf_counter() - start


def _ours(
    bench: Bench, n_devices: int, batch: tuple[Tensor, Tensor], m: int, n: int
) -> Callable[[], object]:
    graph = ps.lower(ps.schedule("gpipe", n_devices, m), step="none")
    stages = bench.stages(n_devices, 2 * n)
    devices = bench.devices(n_devices) if n_devices > 1 else ["cpu" if bench.dry else "cuda:0"]
    pipeline = px.Pipeline(stages, graph, devices, cross_entropy)
    on_gpu = tuple(x.to(bench.gpu) for x in batch)

    def step() -> object:
        for stage in stages:
            stage.zero_grad()
        return pipeline.step(on_gpu[0], on_gpu[1])

    return step


def _loop(bench: Bench, batch: tuple[Tensor, Tensor], m: int, n: int) -> Callable[[], object]:
    """Return a step that accumulates gradients on the whole GPU, one stream."""
    whole = nn.Sequential(*bench.stages(1, 2 * n)).to(bench.gpu)
    parts = list(zip(*(x.to(bench.gpu).tensor_split(m) for x in batch), strict=True))

    def step() -> None:
        whole.zero_grad()
        losses = [cross_entropy(whole(inputs), targets) / m for inputs, targets in parts]
        for loss in reversed(losses):
            loss.backward()

    return step


def _by_hand(bench: Bench, batch: tuple[Tensor, Tensor], m: int, n: int) -> Callable[[], object]:
    """Return GPipe in a few lines: forwards in clock order, autograd goes back over the streams."""
    if bench.dry:
        return _loop(bench, batch, m, n)
    stages = [stage.to(bench.gpu) for stage in bench.stages(n, 2 * n)]
    slices = px.slices("cuda:0", n)
    streams: list[torch.cuda.Stream] = [d.stream("compute").stream for d in slices]  # type: ignore[attr-defined]
    inputs, targets = (x.to(bench.gpu).tensor_split(m) for x in batch)

    def step() -> None:
        caller = torch.cuda.current_stream()
        for stage, stream in zip(stages, streams, strict=True):
            stage.zero_grad()
            stream.wait_stream(caller)
        values: list[Tensor] = list(inputs)
        for clock in range(m + n - 1):
            for s in reversed(range(max(0, clock - m + 1), min(n, clock + 1))):
                j = clock - s
                if s:
                    streams[s].wait_stream(streams[s - 1])
                    values[j].record_stream(streams[s])
                with torch.cuda.stream(streams[s]):
                    values[j] = stages[s](values[j])
                    if s == n - 1:
                        values[j] = cross_entropy(values[j], targets[j]) / m
        with torch.cuda.stream(streams[-1]):
            for j in reversed(range(m)):
                values[j].backward()
        for stream in streams:
            caller.wait_stream(stream)

    return step


def memory(bench: Bench, report: Report) -> None:
    """Draw allocated memory over a step beside the simulator's."""
    from pipesim.page import save

    n = bench.pick(4, 2)
    m = 2 * n
    batch = bench.batch(m * bench.samples(n))
    for name in ("gpipe", "1f1b"):
        graph = lowered(name, n, m)
        with (
            noted_warnings(report.say),
            messages_timed_once(bench),
            bench.pipeline(graph, bench.stages(n, 2 * n), optimizer=sgd) as subject,
        ):
            for _ in range(2):
                subject.step(*batch)
            costs = px.profile(subject, *batch, n_steps=bench.pick(3, 1), warm_up=1)
            predicted = ps.simulate(graph, costs)
            if bench.dry:
                report.say(f"{name}: no GPU whose allocator could be asked")
                save(predicted.plot(), bench.out / f"memory-{name}.png")
                continue
            allocated = subject.allocated(*batch)
        frame = allocated.frame
        before, most = frame["nbytes"].iloc[0], frame["nbytes"].max()
        said = predicted.memory().groupby("device")["nbytes"]
        rise = (said.max() - said.first()).sum()
        before, most, rise = (x / 2**20 for x in (before, most, rise))
        report.say(f"{name}: allocated {before:.0f} MiB before the step, {most:.0f} at most; rise "
                   f"{most - before:.0f} MiB, predicted at most {rise:.0f} (sum of the slices' own "
                   "rises)")  # fmt: skip
        frame.to_csv(bench.out / f"memory-{name}.csv", index=False)
        axes = allocated.plot(predicted)
        save(axes, *(bench.out / f"memory-{name}.{suffix}" for suffix in ("png", "pdf")))


def soak(bench: Bench, report: Report) -> None:
    """Run hundreds of steps, as graphs and eagerly: memory and pace stay, the loss falls."""
    n = bench.pick(4, 2)
    m, batch = 2 * n, bench.batch(2 * n)
    for cuda_graph, n_steps in ((True, bench.pick(250, 6)), (False, bench.pick(150, 6))):
        graph = lowered("1f1b", n, m)
        marks, seconds, losses = [], [], []
        with (
            counted_replays() as replays,
            bench.pipeline(graph, bench.stages(n, 2 * n), cuda_graph=cuda_graph,
                           optimizer=sgd) as subject,
        ):  # fmt: skip
            for number in range(n_steps):
                result = subject.step(*batch)
                seconds.append(result.timeline.makespan)
                losses.append(float(result.loss))
                if number >= n_steps // 5:
                    marks.append(_held(bench))
            count = replays()
        grew = [last - first for first, last in zip(marks[0], marks[-1], strict=True)]
        quarter = n_steps // 4
        early, late = (statistics.median(x) for x in (seconds[-2 * quarter : -quarter],
                                                      seconds[-quarter:]))  # fmt: skip
        kind = "graphs" if cuda_graph else "eager"
        report.say(f"{kind}: {n_steps} steps, {count} replays, loss {losses[0]:.3f} to "
                   f"{losses[-1]:.3f}")  # fmt: skip
        report.check(grew[0] <= 1 << 20 and grew[1] <= 64 << 20,
                     f"{kind}: bytes allocated grew by {grew[0]}, reserved by {grew[1]}, the "
                     f"process by {grew[2] >> 20} MiB")  # fmt: skip
        report.check(bench.dry or abs(late / early - 1) < 0.03,
                     f"{kind}: step {early * 1e3:.3f} ms, later {late * 1e3:.3f} ms")  # fmt: skip
        report.check(bench.dry or losses[-1] < losses[0], f"{kind}: the loss falls")


def _held(bench: Bench) -> tuple[int, int, int]:
    """Return bytes allocated and reserved on the GPU, and resident on the host."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4096
    if bench.dry:
        return 0, 0, resident
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident
