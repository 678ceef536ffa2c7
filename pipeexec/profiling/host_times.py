"""How long a host takes to issue a task: the ``launch`` of costs.

On CPU workers that is all of the host's time over all tasks: their queues take any number of tasks.

The queue of a CUDA stream takes about a thousand kernels. The launch of the next one blocks the
host until a kernel ends, so that a step of many kernels is as long for the host as for the GPU.
This blocked time is not launch time. So each operation of each stage counts with its median, or
with its median in steps of a single micro-batch where that is less: such steps fill no queue. They
have no I and no W, neither of which takes longer than the B that is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline

__all__ = ["HostTimed", "host_share", "launch_seconds", "mean_launch"]

#: Whole backward of each half.
_WHOLE = {Op.I: Op.B, Op.W: Op.B}


class HostTimed(Protocol):
    """What is looked at of a step; `pipeexec.StepResult` has it."""

    @property
    def timeline(self) -> Timeline:
        """When each task ran."""
        ...

    @property
    def host_seconds(self) -> float:
        """What the host took to issue all tasks, the sum over processes."""
        ...

    @property
    def host_times(self) -> NDArray[np.float64] | None:
        """What the host took to issue each task; None where that is not known."""
        ...


def mean_launch(steps: Sequence[HostTimed]) -> float:
    """Return the host's seconds a task, whatever it did in them."""
    return float(np.mean([step.host_seconds / len(step.timeline) for step in steps]))


def launch_seconds(steps: Sequence[HostTimed], alone: Sequence[HostTimed] = ()) -> float:
    """Return the host's seconds a task without those in which full queues blocked it.

    Parameters
    ----------
    steps
        Of one graph.
    alone
        Of a graph of the same stages with a single micro-batch.
    """
    mean = mean_launch(steps)
    found, least = _medians(steps), _medians(alone)
    if not found:
        return mean
    graph = steps[0].timeline.graph
    seconds = []
    for (op, stage), (median, n_tasks) in found.items():
        bound = least.get((op, stage)) or least.get((_WHOLE.get(Op(op), op), stage))
        seconds.append(n_tasks * (median if bound is None else min(median, bound[0])))
    return min(mean, sum(seconds) / len(graph))


def host_share(steps: Sequence[HostTimed], n_hosts: int = 1) -> float:
    """Return the part of the makespan in which a host issues tasks; mean over steps and hosts."""
    shares = [step.host_seconds / step.timeline.makespan for step in steps]
    return float(np.mean(shares)) / n_hosts


def _medians(steps: Sequence[HostTimed]) -> dict[tuple[int, int], tuple[float, int]]:
    """Return the median seconds to issue each operation of each stage, and its tasks in a step."""
    rows = [step.host_times for step in steps]
    if not rows or any(row is None for row in rows):
        return {}
    times, graph = np.array(rows, dtype=np.float64), steps[0].timeline.graph
    found = {}
    for op, stage in sorted(set(zip(graph.op.tolist(), graph.stage.tolist(), strict=True))):
        mine = (graph.op == op) & (graph.stage == stage)
        known = times[:, mine][~np.isnan(times[:, mine])]
        if known.size:
            found[op, stage] = float(np.median(known)), int(mine.sum())
    return found
