"""Time what every version of pipesim can do; print a line of JSON: seconds of each measure.

`history.py` runs it in checkouts of older versions, so that it uses names that all of them have. A
measure that a version lacks is left out. The pace is that of an addition in a Python loop, which
shows how fast the machine was meanwhile.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

began = time.perf_counter()
import pipesim as ps  # noqa: E402

IMPORT = time.perf_counter() - began


def costs() -> Any:
    """Return costs with messages."""
    network = ps.Network(latency=20e-6, bandwidth=25e9)
    return ps.Costs(forward=1e-3, backward=2e-3, output_bytes=4 << 20, network=network)


def lowered(schedule: str, p: int, m: int) -> Any:
    """Return a task graph."""
    return ps.lower(ps.schedule(schedule, n_devices=p, n_microbatches=m))


def plan() -> object:
    """Search for the best configuration of a model."""
    model, cluster = ps.Transformer.preset("llama3_8b"), ps.Cluster("dgx_h100", n_gpus=16)
    return ps.plan(model, cluster, global_batch=64, schedules=["1f1b", "interleaved_1f1b"],
                   recompute="none", progress=False)  # fmt: skip


def step() -> Callable[[], object]:
    """Return a step of tiny stages on two CPU workers: what the executor itself takes."""
    import torch

    import pipeexec as px

    torch.set_num_threads(1)
    stages = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    loss = torch.nn.functional.mse_loss
    pipeline = px.Pipeline(stages, lowered("1f1b", 2, 16), ["cpu"] * 2, loss)
    batch = torch.randn(64, 4), torch.randn(64, 4)
    return lambda: pipeline.step(*batch)


def measures() -> dict[str, Callable[[], Callable[[], object]]]:
    """Return, by name, functions that prepare a measure and return the call to time."""

    def simulation() -> Callable[[], object]:
        graph, c = lowered("1f1b", 64, 1024), costs()
        return lambda: ps.simulate(graph, c).makespan

    def page() -> Callable[[], object]:
        timeline, path = ps.simulate(lowered("1f1b", 16, 64), costs()), Path(tempfile.mkdtemp())
        return lambda: timeline.to_html(path / "page.html")

    return {
        "order of 1F1B (64, 1024)": lambda: (
            lambda: ps.schedule("1f1b", n_devices=64, n_microbatches=1024)
        ),
        "order of ZBV (16, 64)": lambda: (
            lambda: ps.schedule("zbv", n_devices=16, n_microbatches=64)
        ),
        "graph of 1F1B (64, 1024)": lambda: lambda: lowered("1f1b", 64, 1024),
        "simulation of 1F1B (64, 1024)": simulation,
        "graph and simulation of 1F1B (8, 64)": lambda: (
            lambda: ps.simulate(lowered("1f1b", 8, 64), costs()).makespan
        ),
        "page of 1F1B (16, 64)": page,
        "plan of Llama 3 8B on 16 GPUs": lambda: plan,
        "step of 2 workers, 16 micro-batches": step,
    }


def pace() -> float:
    """Return the seconds of an addition in a Python loop."""
    start, total = time.perf_counter(), 0
    for k in range(200_000):
        total += k
    return (time.perf_counter() - start) / 200_000


def median(call: Callable[[], object], budget: float = 2.0) -> float:
    """Return the median seconds of a call: 3 to 30 of them, after one to warm up."""
    call()
    seconds: list[float] = []
    end = time.perf_counter() + budget
    while len(seconds) < 3 or (len(seconds) < 30 and time.perf_counter() < end):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    """Print the seconds of each measure, and the pace."""
    paces, seconds = [pace()], {"import": IMPORT}
    for name, prepare in measures().items():
        try:
            seconds[name] = median(prepare())
        except Exception as error:  # this version cannot do that
            print(f"# {name}: {type(error).__name__}")
        paces.append(pace())
    print(json.dumps({"pace": statistics.median(paces), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
