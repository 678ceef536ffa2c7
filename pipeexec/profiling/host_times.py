"""Seconds that a host takes to issue a task: ``Costs.launch``.

CPU workers: the queue of a worker takes any number of tasks. Launch is the host's time of a step
over the number of tasks.

CUDA: the queue of a stream takes about a thousand kernels. The launch of the next kernel blocks the
host until a kernel ends, so that a step of many kernels is as long for the host as for the GPU.
This blocked time is not launch time. Each operation of each stage therefore counts with its
median. Its median in steps of a single micro-batch, which fill no queue, is an upper limit. Such
steps have no I and no W: the B bounds both, as it contains them. Tasks in which the host waits for
values of the GPU do not count: GRAD_NORM, which looks whether the norm is finite, and exchanges of
experts, whose sizes depend on the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op, is_expert_exchange
from pipesim.timeline.timeline import Timeline

#: Operation that contains each half of a split backward.
_FULL_BACKWARD = {Op.I: Op.B, Op.W: Op.B}


class HostTimed(Protocol):
    """Host times of a step; `pipeexec.StepResult` has them."""

    @property
    def timeline(self) -> Timeline:
        """Start and end of each task."""
        ...

    @property
    def host_seconds(self) -> float:
        """Seconds to issue all tasks, the sum over processes."""
        ...

    @property
    def host_times(self) -> NDArray[np.float64] | None:
        """Seconds to issue each task; None if unknown."""
        ...


def mean_launch(steps: Sequence[HostTimed]) -> float:
    """Return the host's mean seconds per task, blocked or not."""
    return float(np.mean([step.host_seconds / len(step.timeline) for step in steps]))


def launch_seconds(steps: Sequence[HostTimed], isolated: Sequence[HostTimed] = ()) -> float:
    """Return the host's seconds per task, without those in which full queues blocked it.

    Parameters
    ----------
    steps
        Steps of one graph.
    isolated
        Steps of a graph of the same stages with a single micro-batch.
    """
    mean = mean_launch(steps)
    medians, limits = _medians(steps), _medians(isolated)
    if not medians:
        return mean
    seconds = []
    for (op, stage), (median, n_tasks) in medians.items():
        limit = limits.get((op, stage)) or limits.get((_FULL_BACKWARD.get(Op(op), op), stage))
        seconds.append(n_tasks * (median if limit is None else min(median, limit[0])))
    return min(mean, sum(seconds) / sum(n_tasks for _, n_tasks in medians.values()))


def host_share(steps: Sequence[HostTimed], n_hosts: int = 1) -> float:
    """Return the share of the makespan in which a host issues tasks; mean over steps and hosts."""
    shares = [step.host_seconds / step.timeline.makespan for step in steps]
    return float(np.mean(shares)) / n_hosts


def _medians(steps: Sequence[HostTimed]) -> dict[tuple[int, int], tuple[float, int]]:
    """Return median seconds, and tasks per step, for each operation of each stage."""
    rows = [step.host_times for step in steps]
    if not rows or any(row is None for row in rows):
        return {}
    times, graph = np.array(rows, dtype=np.float64), steps[0].timeline.graph
    times[:, _waits_for_values(graph)] = np.nan
    medians = {}
    for op, stage in sorted(set(zip(graph.op.tolist(), graph.stage.tolist(), strict=True))):
        is_task = (graph.op == op) & (graph.stage == stage)
        seconds = times[:, is_task][~np.isnan(times[:, is_task])]
        if seconds.size:
            medians[op, stage] = float(np.median(seconds)), int(is_task.sum())
    return medians


def _waits_for_values(graph: TaskGraph) -> NDArray[np.bool_]:
    """Mark the tasks in which the host waits until a GPU has computed a value."""
    waits: NDArray[np.bool_] = (graph.op == Op.GRAD_NORM) | is_expert_exchange(graph.op, graph.part)
    return waits
