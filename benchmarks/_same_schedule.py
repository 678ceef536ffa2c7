"""One schedule of ours under torch's runtime and under our own; part of torch_pipelining.py.

torch.distributed.pipelining runs it in one process a stage over gloo (`px.to_torch`), under
torch.profiler, and its step is read from the traces; ours runs it in this process, one worker a
stage, and times its tasks itself. They take turns step by step, the others waiting meanwhile, so
that a machine that slows down slows both. Each also runs steps that nobody traces, timed from
outside: a profiler costs time.
"""

from __future__ import annotations

import gc
import os
import socket
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.registry import build_model, split

N_RANKS = 2
SCHEDULES = ("1f1b", "zb_h1")
COLUMNS = ["schedule", "runtime", "makespan ms", "replayed", "simulated ms", "from means",
           "untraced step ms", "makespan to torch's", "untraced step to torch's"]  # fmt: skip
REMARK = (
    "One schedule under both runtimes, each step simulated from its own means: medians over the "
    "steps, and the largest error in brackets. Gaps between tasks are charged to torch's tasks "
    "alone; ours are as they were timed."
)
WARM_UP = 2


class Runs(NamedTuple):
    """What a runtime did with a schedule: traced steps, and seconds of untraced ones."""

    traced: list[ps.Timeline]
    untraced: list[float]


def compare(options: dict[str, Any], directory: Path) -> list[list[str]]:
    """Run each schedule both ways; return the lines of a table. Traces go to ``directory``."""
    torch.set_num_threads(1)
    torch_runs = {name: Runs([], []) for name in SCHEDULES}
    own_runs = {name: Runs([], []) for name in SCHEDULES}
    with ExitStack() as stack:
        torch_step = stack.enter_context(torch_steps(options, directory))
        our_step = {name: stack.enter_context(our_steps(options, name)) for name in SCHEDULES}
        for number in range(-WARM_UP, options["steps"]):
            for name in SCHEDULES:
                untraced, (seconds, _) = torch_step(name, None), our_step[name]()
                torch_step(name, number)
                _, timeline = our_step[name]()
                if number >= 0:
                    torch_runs[name].untraced.append(untraced)
                    own_runs[name].untraced.append(seconds)
                    own_runs[name].traced.append(timeline)
    for name, runs in torch_runs.items():
        runs.traced.extend(read(options, name, directory))
    return [row for name in SCHEDULES for row in rows(name, torch_runs[name], own_runs[name])]


def rows(name: str, torch_runs: Runs, own_runs: Runs) -> Iterator[list[str]]:
    """Yield the lines of a schedule."""
    makespans = [[t.makespan for t in runs.traced] for runs in (torch_runs, own_runs)]
    for runtime, runs, seconds in zip(
        ("torch", "ours"), (torch_runs, own_runs), makespans, strict=True
    ):
        simulated = [ps.simulate(t.graph, ps.Costs.from_timeline(t)) for t in runs.traced]
        line = [
            name,
            runtime,
            _ms(seconds),
            _errors([ps.replay(t) for t in runs.traced], runs.traced),
            _ms([t.makespan for t in simulated]),
            _errors(simulated, runs.traced),
            _ms(runs.untraced),
        ]
        if runtime == "torch":
            yield [*line, "1", "1"]
        else:
            yield [*line, _ratio(seconds, makespans[0]), _ratio(runs.untraced, torch_runs.untraced)]


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}"


def _errors(predicted: list[ps.Timeline], measured: list[ps.Timeline]) -> str:
    """Return the median error of the makespan, and the largest in brackets."""
    errors = [ps.Comparison(*pair).makespan_error for pair in zip(predicted, measured, strict=True)]
    return f"{statistics.median(errors):+.1%} ({max(errors, key=abs):+.1%})"


def _ratio(own_seconds: list[float], torch_seconds: list[float]) -> str:
    """Return the median of the ratios of neighbouring steps."""
    return (
        f"{statistics.median(a / b for a, b in zip(own_seconds, torch_seconds, strict=True)):.2f}"
    )


def schedule_of(options: dict[str, Any], name: str) -> ps.Schedule:
    """Return what both run."""
    return ps.schedule(name, N_RANKS, options["microbatches"])


Problem = tuple[list[nn.Sequential], Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]


def problem(options: dict[str, Any]) -> Problem:
    """Return stages, inputs, targets and loss; the same in every process."""
    workload = build_model("gpt", **{k: options[k] for k in ("layers", "width", "sequence")})
    inputs, targets = workload.make_batch(options["microbatches"] * options["size"], 0)
    return split(workload.layers, N_RANKS), inputs, targets, workload.loss


@contextmanager
def our_steps(
    options: dict[str, Any], name: str
) -> Iterator[Callable[[], tuple[float, ps.Timeline]]]:
    """Give a step of ours: its seconds, and its timeline."""
    stages, inputs, targets, loss = problem(options)
    graph = ps.lower(schedule_of(options, name), step="none")
    pipeline = px.Pipeline(stages, graph, ["cpu"] * N_RANKS, loss)

    def step() -> tuple[float, ps.Timeline]:
        for stage in stages:
            stage.zero_grad()
        gc.collect()
        start = perf_counter()
        timeline = pipeline.step(inputs, targets).timeline
        return perf_counter() - start, timeline

    try:
        yield step
    finally:
        pipeline.close()


@contextmanager
def torch_steps(
    options: dict[str, Any], directory: Path
) -> Iterator[Callable[[str, int | None], float]]:
    """Give a step of torch's in seconds: of which schedule, and its trace's number, or None."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for rank in range(N_RANKS):
        local, remote = context.Pipe()
        arguments = (rank, port, options, str(directory), remote)
        processes.append(context.Process(target=run_rank, args=arguments, daemon=True))
        processes[-1].start()
        remote.close()  # so that a rank that dies ends the pipe
        pipes.append(local)

    def step(name: str, number: int | None) -> float:
        for pipe in pipes:
            pipe.send((name, number))
        return max(pipe.recv() for pipe in pipes)

    try:
        yield step
        for pipe in pipes:
            pipe.send(None)
    finally:
        for process in processes:
            process.join(60)


def run_rank(
    rank: int, port: int, options: dict[str, Any], directory: str, pipe: Connection
) -> None:
    """Be one process of torch's: run a step, traced or not, whenever told to."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=N_RANKS)
    stages, inputs, targets, loss = problem(options)
    runtimes = {}
    for name in SCHEDULES:
        stage = PipelineStage(stages[rank], rank, N_RANKS, torch.device("cpu"))
        runtimes[name] = px.to_torch(schedule_of(options, name), [stage], loss)

    def step(name: str) -> float:
        stages[rank].zero_grad()
        gc.collect()
        dist.barrier()
        start = perf_counter()
        if rank == 0:
            runtimes[name].step(inputs)
        else:
            runtimes[name].step(target=targets)
        dist.barrier()
        return perf_counter() - start

    while (request := pipe.recv()) is not None:
        name, number = request
        if number is None:
            pipe.send(step(name))
            continue
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            seconds = step(name)
        if number >= 0:
            profiler.export_chrome_trace(str(trace(Path(directory), name, number, rank)))
        pipe.send(seconds)
    dist.destroy_process_group()


def trace(directory: Path, name: str, number: int, rank: int) -> Path:
    """Return where the trace of a step is."""
    return directory / f"same.{name}.step{number}.rank{rank}.json.gz"


def read(options: dict[str, Any], name: str, directory: Path) -> list[ps.Timeline]:
    """Return the timelines of torch's traced steps."""
    floats = options["size"] * options["sequence"] * options["width"]
    return [
        ps.Timeline.from_chrome(
            [trace(directory, name, number, rank) for rank in range(N_RANKS)],
            output_bytes=4 * floats,
            gaps="charge",
            name=name,
        )
        for number in range(options["steps"])
    ]
