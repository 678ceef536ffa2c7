"""Step ``peers``: a step beside what a user would write by hand, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from on_gpu.bench import Bench
from on_gpu.report import Report
from pipeexec.models import cross_entropy


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
