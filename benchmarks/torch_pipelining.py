"""How well a run of torch.distributed.pipelining is understood from its profiler traces alone.

Two processes, one thread each, run GPipe and 1F1B over gloo on loopback under torch.profiler. Each
step is read from the ranks' traces with ``Timeline.from_chrome``; then its makespan is

- replayed from each task's own duration: a check of the graph, which leaves nothing since gaps
  between tasks are charged to tasks;
- simulated from its means (``Costs.from_timeline``);
- predicted from the means of the same step of the other schedule.

A second table has one schedule of ours under torch's runtime and under `pipeexec.Pipeline`, the
makespans of both, and how well each is simulated from its own means (`_same_schedule.py`).

``python benchmarks/torch_pipelining.py`` prints the errors, predicted over measured minus one, and
writes them to results/benchmarks/torch_pipelining.txt. ``--keep DIRECTORY`` keeps the traces.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _machine as machine
import _same_schedule as same_schedule
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.profiler import ProfilerActivity, profile, record_function

import pipesim as ps
from pipeexec.demo_models.registry import build_model, split
from pipesim.errors import PipeWarning

N_RANKS = 2
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class AnnotatedStage(PipelineStage):
    """A stage whose calls are ranges in a trace; torch's 1F1B has none of its own."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a forward."""
        with record_function(f"PP:{self.stage_index}F{fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a backward."""
        with record_function(f"PP:{self.stage_index}B{bwd_chunk_id}"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class WithLoss(nn.Module):
    """The last stage and its loss, so that its F covers both; torch computes a loss after it."""

    def __init__(self, module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, x: Tensor, answers: Tensor) -> Tensor:
        """Return the loss as a tensor of one value, as torch joins those of micro-batches."""
        return self.loss(self.module(x), answers).reshape(1)


def run_rank(rank: int, port: int, options: dict[str, Any], directory: str) -> None:
    """Be one process: run every schedule and write a trace of each."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=N_RANKS)
    workload = build_model("gpt", **{k: options[k] for k in ("layers", "width", "sequence")})
    inputs, targets = workload.make_batch(options["microbatches"] * options["size"], 0)
    module: nn.Module = split(workload.layers, N_RANKS)[rank]
    if rank == N_RANKS - 1:
        module = WithLoss(module, workload.loss)
    schedules = {}
    for name, kind in SCHEDULES.items():
        stage = AnnotatedStage(module, rank, N_RANKS, torch.device("cpu"))
        schedules[name] = kind(
            stage, options["microbatches"], loss_fn=lambda output, _: output.sum()
        )

    def step(name: str) -> None:
        module.zero_grad()
        dist.barrier()
        if rank == 0:
            schedules[name].step(inputs)
        else:
            schedules[name].step(target=targets, answers=targets)

    # In turns, so that a machine that slows down slows both.
    for number in range(-2, options["steps"]):
        for name in SCHEDULES:
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                step(name)
            if number >= 0:
                trace = Path(directory) / f"{name}.step{number}.rank{rank}.json.gz"
                profiler.export_chrome_trace(str(trace))
    dist.destroy_process_group()


def run(options: dict[str, Any], directory: Path) -> None:
    """Run both processes and wait for their traces."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run_rank, (port, options, str(directory)), nprocs=N_RANKS)


def read(directory: Path, options: dict[str, Any]) -> dict[str, list[ps.Timeline]]:
    """Return the timelines of all steps of each schedule."""
    floats = options["size"] * options["sequence"] * options["width"]
    return {
        name: [
            ps.Timeline.from_chrome(
                sorted(directory.glob(f"{name}.step{step}.rank*.json.gz")),
                output_bytes=4 * floats,
                gaps="charge",
                name=name,
            )
            for step in range(options["steps"])
        ]
        for name in SCHEDULES
    }


def error(predicted: ps.Timeline, measured: ps.Timeline) -> float:
    """Return the signed error of the makespan."""
    return ps.Comparison(predicted, measured).makespan_error


def rows(timelines: dict[str, list[ps.Timeline]]) -> list[list[str]]:
    """Return the lines of the table: median error, and the largest in brackets."""
    lines = []
    for name, steps in timelines.items():
        other = next(runtime for runtime in timelines if runtime != name)
        errors: dict[str, list[float]] = {"replayed": [], "simulated": [], "predicted": []}
        for step, its_other in zip(steps, timelines[other], strict=True):
            own, others = (ps.Costs.from_timeline(steps) for steps in (step, its_other))
            errors["replayed"].append(error(ps.replay(step), step))
            errors["simulated"].append(error(ps.simulate(step.graph, own), step))
            errors["predicted"].append(error(ps.simulate(step.graph, others), step))
        costs = ps.Costs.from_timeline(steps[-1])
        cells = [
            f"{statistics.median(values):+.1%} ({max(values, key=abs):+.1%})"
            for values in errors.values()
        ]
        makespan = statistics.median(step.makespan for step in steps)
        seconds = [costs.per_stage(op, N_RANKS).mean() for op in ("forward", "backward")]
        times = [f"{s * 1e3:.1f}" for s in (*seconds, makespan)]
        lines.append([name, *times, f"{costs.network.latency * 1e3:.2f}", *cells])
    return lines


def main() -> None:
    """Run, read, simulate, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = {
        "microbatches": 8,
        "size": 4,
        "layers": 4,
        "width": 96,
        "sequence": 64,
        "steps": 10,
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=Path)
    out = machine.ROOT / "results" / "benchmarks" / "torch_pipelining.txt"
    parser.add_argument("--out", type=Path, default=out)
    options = vars(parser.parse_args())
    keep, out = options.pop("keep"), options.pop("out")
    warnings.simplefilter("ignore", PipeWarning)
    with tempfile.TemporaryDirectory() as temporary:
        directory = keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        run(options, directory)
        timelines = read(directory, options)
        same = same_schedule.compare(options, directory)
    columns = ["schedule", "F ms", "B ms", "makespan ms", "latency ms"]
    columns += ["replayed", "simulated from means", "predicted from the other"]
    sizes = ", ".join(f"{key} {value}" for key, value in options.items())
    load = f"load average of the machine afterwards: {os.getloadavg()[0]:.1f}"
    remark = "Error of the makespan: median over the steps, and the largest in brackets."
    lines = [*machine.header(["torch"]), load, sizes, remark, ""]
    lines += [*machine.table(columns, rows(timelines), 1), "", same_schedule.REMARK, ""]
    machine.publish([*lines, *machine.table(same_schedule.COLUMNS, same, 2)], out)


if __name__ == "__main__":
    main()
