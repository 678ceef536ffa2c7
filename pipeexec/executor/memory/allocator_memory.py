"""Memory of each GPU over a step, as torch's allocator sees it, beside the simulator's.

The allocator takes and gives back memory when the host issues a task, long before the GPU runs it.
So what each task changed is noted as it is issued, and put at the time at which the task ran: what
it took at its start, what it gave back at its end, as in rule 10 of docs/time.md. What a task takes
and gives back within itself is not seen. Slices of one GPU share its allocator, and are counted
together: one may give back what another took.

By this count, memory is given back when Python frees its tensor. The allocator keeps the block
until every stream that may still read it is done (`Tensor.record_stream`), so that a GPU needs more
than this says. torch counts such blocks as active; the most of that count is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from pipeexec.devices.device import Device
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step
from pipesim.errors import ArgumentError
from pipesim.plot.paper_figure import SMALL, axes_or_new, end_of_axis, label
from pipesim.plot.style import byte_unit, time_unit
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["Allocated", "Samples", "sampled"]

Floats = NDArray[np.float64]
#: Returns the bytes that are allocated on a GPU.
Count = Callable[[torch.device], int]


@dataclass(frozen=True, eq=False)
class Allocated:
    """Bytes allocated on each GPU over one step.

    Attributes
    ----------
    frame
        ``gpu`` (such as ``"cuda:0"``), ``time`` (s), ``nbytes``; by GPU, then in order of time.
        The first row of a GPU is what it held before the step, at time 0.
    timeline
        Of the step; its times are those of a host that asks the allocator at every task.
    devices
        The GPU of each device.
    most_active
        By GPU, the most bytes that the allocator could not reuse, at any task: those allocated,
        and blocks that were freed and that other streams may still read (``active_bytes`` of
        `torch.cuda.memory_stats`). 0 if not counted.
    """

    frame: pd.DataFrame
    timeline: Timeline
    devices: tuple[str, ...]
    most_active: Mapping[str, int] = field(default_factory=dict)

    def plot(self, predicted: Timeline | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw the bytes of each GPU over time, and dashed those predicted for its devices.

        Parameters
        ----------
        predicted
            A simulated timeline with costs.
        ax
            Where to draw.

        Raises
        ------
        ArgumentError
            If ``predicted`` has another number of devices, or ``ax`` is something else.
        TimelineError
            If ``predicted`` has no costs.
        """
        prediction = self.frame.iloc[:0] if predicted is None else self._of_gpus(predicted)
        last = max([self.timeline.makespan, *prediction["time"]])
        ax = axes_or_new(ax, 6)
        sign, scale = time_unit(last)
        size_sign, size = byte_unit(float(max([1, *self.frame["nbytes"], *prediction["nbytes"]])))
        for kind, frame, style in (("measured", self.frame, "-"), ("predicted", prediction, "--")):
            for number, gpu in enumerate(dict.fromkeys(frame["gpu"])):
                rows = frame[frame["gpu"] == gpu]
                (line,) = ax.step(
                    np.append(rows["time"], last) * scale,
                    np.append(rows["nbytes"], rows["nbytes"].iloc[-1]) / size,
                    where="post",
                    linestyle=style,
                    color=f"C{number}",
                    label=f"{gpu}, {kind}",
                )
                line.set_gid(f"{kind}:{gpu}")
        ax.set_xlim(0, max(last, end_of_axis(self.timeline)) * scale)
        ax.set_ylim(bottom=0)
        label(ax, f"Time ({sign})", f"Memory held ({size_sign})")
        ax.legend(frameon=False, fontsize=SMALL)
        return ax

    def _of_gpus(self, predicted: Timeline) -> pd.DataFrame:
        """Return the predicted memory of each GPU: the sum of its devices'."""
        if predicted.n_devices != len(self.devices):
            raise ArgumentError(
                f"predicted has {predicted.n_devices} devices, the measured step "
                f"{len(self.devices)}; simulate the graph that was run"
            )
        held = predicted.memory()
        change = held.groupby("device")["nbytes"].diff().fillna(held["nbytes"])
        gpus = held["device"].map(dict(enumerate(self.devices)))
        return _summed(gpus.to_numpy(), held["time"].to_numpy(), change.to_numpy())


class Samples:
    """Allocated bytes before the step, and after each task was issued.

    Parameters
    ----------
    n_tasks
        In the graph.
    devices
        Of the pipeline.
    count, count_active
        Ask the allocator for what is allocated, and for that and what is kept for streams.
    """

    def __init__(
        self, n_tasks: int, devices: Sequence[Device], count: Count, count_active: Count
    ) -> None:
        self.gpus = list(dict.fromkeys(device.torch_device for device in devices))
        self.devices = tuple(str(device.torch_device) for device in devices)
        self.count, self.count_active = count, count_active
        self.most_active = [0] * len(self.gpus)
        self.before: list[int] | None = None
        self.after = np.full((n_tasks, len(self.gpus)), np.nan)

    def wrap(self, task: PlannedTask) -> PlannedTask:
        """Return a task that notes what the allocator says once it has been issued."""

        def handler(step: Step, planned: PlannedTask) -> None:
            if self.before is None:
                self.before = self._now()
            task.handler(step, planned)
            self.after[planned.id] = self._now()

        return task._replace(handler=handler)

    def _now(self) -> list[int]:
        now = map(self.count_active, self.gpus)
        self.most_active = list(map(max, self.most_active, now))
        return [self.count(gpu) for gpu in self.gpus]

    def placed(self, timeline: Timeline) -> Allocated:
        """Return the samples at the times at which the tasks ran."""
        before = np.array(self.before or [0] * len(self.gpus), dtype=np.float64)
        ran = np.flatnonzero(~np.isnan(self.after[:, 0]) & ~np.isnan(timeline.end))
        change = np.diff(self.after[ran], axis=0, prepend=before[None])
        time = np.where(change > 0, timeline.start[ran, None], timeline.end[ran, None])
        # Sums are over changes in order of time, each GPU by itself; the first is all there was.
        names = np.tile([str(gpu) for gpu in self.gpus], len(ran) + 1)
        frame = _summed(
            names,
            np.concatenate([np.zeros(len(self.gpus)), time.ravel()]),
            np.concatenate([before, change.ravel()]),
        )
        active = dict(zip(map(str, self.gpus), self.most_active, strict=True))
        return Allocated(frame, timeline, self.devices, active)


def _summed(gpu: NDArray[np.object_], time: Floats, change: Floats) -> pd.DataFrame:
    """Return the running sums of changes of each GPU."""
    import pandas as pd

    frame = pd.DataFrame({"gpu": gpu, "time": time, "nbytes": change})
    frame = frame.sort_values(["gpu", "time"], kind="stable")
    frame["nbytes"] = frame.groupby("gpu")["nbytes"].cumsum()
    return frame.reset_index(drop=True)


def active_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that the allocator cannot reuse."""
    return int(torch.cuda.memory_stats(device).get("active_bytes.all.current", 0))


def sampled(
    tasks: Sequence[PlannedTask],
    devices: Sequence[Device],
    count: Count = torch.cuda.memory_allocated,
    count_active: Count = active_bytes,
) -> tuple[list[PlannedTask], Samples]:
    """Return tasks that note what the allocator says, and where they note it.

    Raises
    ------
    ArgumentError
        If a device is no GPU.
    """
    for device in devices:
        if device.torch_device.type != "cuda":
            raise ArgumentError(
                f"{device.name} is no GPU, and torch does not count what it allocates; "
                "pipeline.device_bytes counts activations on any device"
            )
    samples = Samples(len(tasks), devices, count, count_active)
    return [samples.wrap(task) for task in tasks], samples
