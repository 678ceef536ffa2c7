"""One step of ours against torchgpipe's and torch.distributed.pipelining's, in one run.

Same model, split, micro-batches and threads (one a stage); forward, loss and backward, no
optimizer. Ours and torchgpipe run in this process, torch.distributed.pipelining in one process a
stage over gloo. The peers take turns step by step, so that a machine that slows down slows all.

``python benchmarks/peers_executor.py`` prints medians and the ratio to ours. torchgpipe is no
dependency: ``pip install torchgpipe`` or put its checkout on PYTHONPATH, else its row is left out.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.registry import build_model, split

Step = Callable[[], float]


def problem(options: dict[str, Any]) -> tuple[list[nn.Sequential], torch.Tensor, torch.Tensor, Any]:
    """Return stages, inputs, targets and loss; the same in every process."""
    sizes = {key: options[key] for key in ("layers", "width", "sequence")}
    workload = build_model("gpt", **sizes)
    inputs, targets = workload.make_batch(options["microbatches"] * options["size"], 0)
    return split(workload.layers, options["stages"]), inputs, targets, workload.loss


def pipeexec_step(options: dict[str, Any], graph: ps.TaskGraph) -> tuple[Step, Callable[[], None]]:
    """Return a step of ours, in seconds, and what ends it."""
    stages, inputs, targets, loss = problem(options)
    pipeline = px.Pipeline(
        stages, graph, ["cpu"] * options["stages"], loss, pin_threads=bool(options["pin"])
    )

    def step() -> float:
        for stage in stages:
            stage.zero_grad()
        start = perf_counter()
        pipeline.step(inputs, targets)
        return perf_counter() - start

    return step, pipeline.close


def torchgpipe_step(options: dict[str, Any]) -> Step:
    """Return a step of torchgpipe."""
    import torchgpipe

    stages, inputs, targets, loss = problem(options)
    layers = nn.Sequential(*(layer for stage in stages for layer in stage))
    model = torchgpipe.GPipe(
        layers,
        balance=[len(stage) for stage in stages],
        devices=["cpu"] * len(stages),
        chunks=options["microbatches"],
        checkpoint="never",
    )

    def step() -> float:
        model.zero_grad()
        start = perf_counter()
        loss(model(inputs), targets).backward()
        return perf_counter() - start

    return step


def torch_rank(rank: int, port: int, options: dict[str, Any], name: str, pipe: Connection) -> None:
    """Be one process of torch.distributed.pipelining: run a step whenever told to."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=options["stages"])
    stages, inputs, targets, loss = problem(options)
    stage = PipelineStage(stages[rank], rank, options["stages"], torch.device("cpu"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
    schedule = kind(stage, options["microbatches"], loss_fn=loss)
    while pipe.recv() == "step":
        stages[rank].zero_grad()
        dist.barrier()
        start = perf_counter()
        if rank == 0:
            schedule.step(inputs)
        elif rank == options["stages"] - 1:
            schedule.step(target=targets)
        else:
            schedule.step()
        dist.barrier()
        pipe.send(perf_counter() - start)
    dist.destroy_process_group()


def torch_step(options: dict[str, Any], name: str) -> tuple[Step, Callable[[], None]]:
    """Return a step of torch.distributed.pipelining in processes of its own, and what ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for rank in range(options["stages"]):
        local, remote = context.Pipe()
        process = context.Process(target=torch_rank, args=(rank, port, options, name, remote))
        process.start()
        pipes.append(local)
        processes.append(process)

    def step() -> float:
        for pipe in pipes:
            pipe.send("step")
        return max(pipe.recv() for pipe in pipes)

    def close() -> None:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send("end")
            process.join()

    return step, close


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = {
        "stages": 2,
        "microbatches": 8,
        "size": 4,
        "layers": 4,
        "width": 128,
        "sequence": 128,
        "rounds": 20,
        "pin": 1,
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)
    counts = options["stages"], options["microbatches"]
    ends: list[Callable[[], None]] = []
    steps: dict[str, Step] = {}

    def add(name: str, step: tuple[Step, Callable[[], None]]) -> None:
        steps[name] = step[0]
        ends.append(step[1])

    gpipe = ps.schedule("gpipe", *counts, backward_order="forward")
    add("pipeexec gpipe", pipeexec_step(options, ps.lower(gpipe, step="none")))
    add("torch.distributed.pipelining gpipe", torch_step(options, "gpipe"))
    try:
        steps["torchgpipe gpipe"] = torchgpipe_step(options)
    except ImportError as error:
        print(f"torchgpipe left out: {error}")
    add(
        "pipeexec 1f1b", pipeexec_step(options, ps.lower(ps.schedule("1f1b", *counts), step="none"))
    )
    add("torch.distributed.pipelining 1f1b", torch_step(options, "1f1b"))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options["rounds"] + 3):
        for name, step in steps.items():
            seconds = step()
            if number >= 3:
                times[name].append(seconds)
    for end in ends:
        end()
    print(f"{options}; torch {torch.__version__}; median of {options['rounds']} interleaved rounds")
    for name, seconds in times.items():
        own = times[f"pipeexec {name.split()[-1]}"]
        ratio = statistics.median(a / b for a, b in zip(own, seconds, strict=True))
        print(f"{name:>36}: {statistics.median(seconds) * 1e3:8.1f} ms   ours/this {ratio:.3f}")


if __name__ == "__main__":
    main()
