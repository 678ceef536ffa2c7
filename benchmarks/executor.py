"""Host time a task: what issuing and bookkeeping cost when stages do nothing.

``python benchmarks/executor.py`` prints, for several graphs, the median over steps of

- issue: microseconds a task that the host takes to walk the graph;
- step: makespan of the whole step a task, which includes the workers' own bookkeeping, their
  wake-ups, and autograd's for an identity.
"""

from __future__ import annotations

import argparse
import statistics
import warnings

import torch
from torch import nn

import pipeexec as px
import pipesim as ps


def measure(
    name: str, n_devices: int, n_microbatches: int, n_steps: int
) -> tuple[int, float, float]:
    """Return the number of tasks, and issue and step time in microseconds a task."""
    graph = ps.lower(ps.schedule(name, n_devices, n_microbatches), step="none")
    stages = [nn.Identity() for _ in range(n_devices)]
    batch = torch.zeros(n_microbatches, 1, requires_grad=False)
    with px.Pipeline(stages, graph, ["cpu"] * n_devices, lambda y, t: y.sum()) as pipeline:
        results = [pipeline.step(batch, batch) for _ in range(n_steps + 3)][3:]
    issue = statistics.median(r.host_seconds for r in results)
    step = statistics.median(r.timeline.makespan for r in results)
    return len(graph), issue / len(graph) * 1e6, step / len(graph) * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    n_steps = parser.parse_args().steps
    warnings.simplefilter("ignore")
    print(f"{'graph':>16} {'tasks':>6} {'issue us/task':>14} {'step us/task':>13}")
    for name in ("gpipe", "1f1b"):
        for n_devices, n_microbatches in ((1, 64), (2, 8), (2, 64), (4, 32), (8, 32)):
            n_tasks, issue, step = measure(name, n_devices, n_microbatches, n_steps)
            label = f"{name} {n_devices}x{n_microbatches}"
            print(f"{label:>16} {n_tasks:>6} {issue:>14.1f} {step:>13.1f}")


if __name__ == "__main__":
    main()
