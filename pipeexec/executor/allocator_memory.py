"""Memory of each GPU over a step, as torch's allocator counts it, next to the simulator's.

The allocator takes and frees memory when the host issues a task, long before the GPU runs it. The
change is sampled when the task is issued and placed at the time at which the task ran: memory taken
at its start, memory freed at its end, as in rule 10 of docs/time.md. Memory that a task takes and
frees again is not sampled. Slices of one GPU share its allocator and are counted together, since
one may free memory that another took.

Memory counts as freed when Python frees its tensor. The allocator keeps the block until every
stream that may still read it is done (`Tensor.record_stream`), so a GPU needs more memory than
these counts. torch counts such blocks as active; the largest count of active bytes is kept.
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
from pipesim.plot.figure_style import Inches, line_colours
from pipesim.plot.paper_figure import (
    LegendPlace,
    add_legend,
    axes_or_new,
    end_of_axis,
    farthest,
    label,
)
from pipesim.timeline.timeline import Timeline
from pipesim.utils.checks import checked
from pipesim.utils.texts import byte_unit, time_unit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


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
        The first row of a GPU, at time 0, has the bytes allocated before the step.
    timeline
        Timeline of the step. Sampling delays the host, so tasks start later than in other steps.
    devices
        Name of the GPU of each device.
    most_active
        Most bytes that the allocator could not reuse at any task, by GPU: allocated bytes, and
        freed blocks that other streams may still read (``active_bytes`` of
        `torch.cuda.memory_stats`). 0 if not counted.
    """

    frame: pd.DataFrame
    timeline: Timeline
    devices: tuple[str, ...]
    most_active: Mapping[str, int] = field(default_factory=dict)

    @checked
    def plot(
        self,
        predicted: Timeline | None = None,
        *,
        ax: Axes | None = None,
        legend: bool | LegendPlace = True,
        height: Inches | None = None,
    ) -> Axes:
        """Draw the bytes of each GPU over time, and the predicted bytes as dashed lines.

        Parameters
        ----------
        predicted
            A simulated timeline with costs.
        ax
            Axes to draw into; new ones by default.
        legend, height
            As for `pipesim.plot.timeline`.
        """
        prediction = self.frame.iloc[:0] if predicted is None else self._by_gpu(predicted)
        last = max([self.timeline.makespan, *prediction["time"]])
        ax = axes_or_new(ax, 6, height)
        sign, scale = time_unit(last)
        most = float(max([1, *self.frame["nbytes"], *prediction["nbytes"]]))
        size_sign, size = byte_unit(most)
        gpus = list(dict.fromkeys(self.devices))
        for kind, frame, style in (("measured", self.frame, "-"), ("predicted", prediction, "--")):
            for gpu, colour in zip(gpus, line_colours(len(gpus)), strict=True):
                rows = frame[frame["gpu"] == gpu]
                if not len(rows):
                    continue
                (line,) = ax.step(
                    np.append(rows["time"], last) * scale,
                    np.append(rows["nbytes"], rows["nbytes"].iloc[-1]) / size,
                    where="post",
                    marker="",
                    linestyle=style,
                    color=colour,
                    label=f"{gpu}, {kind}",
                )
                line.set_gid(f"{kind}:{gpu}")
        ax.set_xlim(0, farthest(ax, max(last, end_of_axis(self.timeline)) * scale))
        ax.set_ylim(0, farthest(ax, 1.05 * float(ax.dataLim.y1) or 1.0, "y"))
        label(ax, f"Time ({sign})", f"Memory held ({size_sign})")
        add_legend(ax, *ax.get_legend_handles_labels(), legend)
        return ax

    def _by_gpu(self, predicted: Timeline) -> pd.DataFrame:
        """Return the predicted memory of each GPU, summed over its devices."""
        if predicted.n_devices != len(self.devices):
            raise ArgumentError(
                f"predicted has {predicted.n_devices} devices, the measured step "
                f"{len(self.devices)}; simulate the graph that was run"
            )
        held = predicted.memory()
        change = held.groupby("device")["nbytes"].diff().fillna(held["nbytes"])
        gpus = held["device"].map(dict(enumerate(self.devices)))
        return _running_sums(gpus.to_numpy(), held["time"].to_numpy(), change.to_numpy())


class AllocatorSamples:
    """Allocated bytes before a step and after each task is issued."""

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
        """Return a task that samples the allocator after it is issued."""

        def handler(step: Step, planned: PlannedTask) -> None:
            if self.before is None:
                self.before = self._sample()
            task.handler(step, planned)
            self.after[planned.id] = self._sample()

        return task._replace(handler=handler)

    def _sample(self) -> list[int]:
        active = map(self.count_active, self.gpus)
        self.most_active = list(map(max, self.most_active, active))
        return [self.count(gpu) for gpu in self.gpus]

    def at_task_times(self, timeline: Timeline) -> Allocated:
        """Return the samples, each at the time at which its task ran."""
        before = np.array(self.before or [0] * len(self.gpus), dtype=np.float64)
        ran = np.flatnonzero(~np.isnan(self.after[:, 0]) & ~np.isnan(timeline.end))
        change = np.diff(self.after[ran], axis=0, prepend=before[None])
        time = np.where(change > 0, timeline.start[ran, None], timeline.end[ran, None])
        # The first change of each GPU is what it held before the step.
        names = np.tile([str(gpu) for gpu in self.gpus], len(ran) + 1)
        frame = _running_sums(
            names,
            np.concatenate([np.zeros(len(self.gpus)), time.ravel()]),
            np.concatenate([before, change.ravel()]),
        )
        active = dict(zip(map(str, self.gpus), self.most_active, strict=True))
        return Allocated(frame, timeline, self.devices, active)


def _running_sums(gpu: NDArray[np.object_], time: Floats, change: Floats) -> pd.DataFrame:
    from pipesim.utils.packages import pandas as pd

    frame = pd.DataFrame({"gpu": gpu, "time": time, "nbytes": change})
    frame = frame.sort_values(["gpu", "time"], kind="stable")
    frame["nbytes"] = frame.groupby("gpu")["nbytes"].cumsum()
    return frame.reset_index(drop=True)


def active_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that the allocator cannot reuse."""
    return int(torch.cuda.memory_stats(device).get("active_bytes.all.current", 0))


def sample_tasks(
    tasks: Sequence[PlannedTask],
    devices: Sequence[Device],
    count: Count = torch.cuda.memory_allocated,
    count_active: Count = active_bytes,
) -> tuple[list[PlannedTask], AllocatorSamples]:
    """Return tasks that sample the allocator, and their samples."""
    for device in devices:
        if device.torch_device.type != "cuda":
            raise ArgumentError(
                f"{device.name} is no GPU, and torch does not count its allocations; "
                "pipeline.device_bytes counts activations on any device"
            )
    samples = AllocatorSamples(len(tasks), devices, count, count_active)
    return [samples.wrap(task) for task in tasks], samples
