"""`StepResult`: losses, times and counts of one training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeexec.executor.process_results import ProcessResult
from pipeexec.executor.task_times import Readings
from pipesim.errors import ExecutionError
from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline

__all__ = ["StepResult", "kept_losses", "unread_result"]

#: Fields that are read from events, and where those are until then.
_READ = frozenset({"timeline", "clock_error", "milestones", "host_times"})
_UNREAD = "_unread"


@dataclass(frozen=True, eq=False)
class StepResult:
    """Result of one training step.

    Attributes
    ----------
    losses
        Share of each micro-batch in the loss of its mini-batch; in a pipeline of several processes,
        of those whose last stage is in this one.
    timeline
        When each task ran; NaN for those of other processes. A task of an eager step on a GPU
        begins when its stream gets to it; where the host is late, its duration contains what the
        host takes to launch it. Of an eager step of one process, this,
        ``clock_error``, ``milestones`` and ``host_times`` are read from events at the first access;
        until then the result keeps these events.
    peak_held
        Most micro-batches whose activations each device held; shape ``(n_devices,)``.
    host_seconds
        What the host took to issue all tasks, or to launch them as one CUDA graph; the sum over
        processes, once gathered.
    part
        What this process measured, for `Pipeline.gather`; None where it is the only one.
    clock_error
        The most that times of two devices can be wrong against each other (s), from how their
        clocks were joined; 0 where they have one clock. See `pipeexec.devices.clocks`.
    host_times
        What the host took to issue each task (s), until the next one; shape ``(n_tasks,)``. NaN for
        tasks of other processes, None where one CUDA graph was launched.
    milestones
        Share of the last backward, 0 to 1, after which the gradients of each bucket of this process
        were there; by the number of its REDUCE_GRAD. Empty once gathered.
    """

    losses: tuple[Tensor, ...]
    timeline: Timeline
    peak_held: tuple[int, ...]
    host_seconds: float
    part: ProcessResult | None = None
    n_losses: int = 1
    clock_error: float = field(default_factory=float)
    milestones: Mapping[int, float] = field(default_factory=dict)
    #: By a factory, as `__getattr__` would not be asked for an attribute that the class has.
    host_times: NDArray[np.float64] | None = field(default_factory=lambda: None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            readings = self.__dict__.get(_UNREAD)
            if readings is not None and name in _READ:
                self.__dict__.update(readings.fields())
                self.__dict__.pop(_UNREAD, None)  # another thread may have read them too
            if name not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, for copies and pickles: events stay in their process."""
        return {x.name: getattr(self, x.name) for x in fields(self)}

    @property
    def n_microbatches(self) -> int:
        """Number of micro-batches, of all replicas."""
        readings = self.__dict__.get(_UNREAD)
        graph = self.timeline.graph if readings is None else readings.graph
        return int(((graph.op == Op.F) & (graph.stage == 0)).sum())

    @cached_property
    def loss(self) -> Tensor:
        """Loss of the whole batch, or mean of the mini-batches'; a tensor without dimensions.

        Raises
        ------
        ExecutionError
            If last stages are in other processes, and the result was not gathered.
        """
        if len(self.losses) < self.n_microbatches:
            raise ExecutionError(
                "the loss is computed in another process; every process can have it from "
                "pipeline.gather(result), which all must call"
            )
        first = self.losses[0]
        return torch.stack([loss.to(first.device) for loss in self.losses]).sum() / self.n_losses


def unread_result(
    readings: Readings,
    losses: tuple[Tensor, ...],
    peak_held: tuple[int, ...],
    host_seconds: float,
    n_losses: int,
) -> StepResult:
    """Return the result of a step of one process whose events are read when asked for."""
    result = object.__new__(StepResult)
    # The fields that are missing are put there by `__getattr__`.
    result.__dict__.update(
        {
            "losses": losses,
            "peak_held": peak_held,
            "host_seconds": host_seconds,
            "part": None,
            "n_losses": n_losses,
            _UNREAD: readings,
        }
    )
    return result


def kept_losses(losses: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], list[int]]:
    """Return copies of the losses of micro-batches, and the numbers of those that are NaN.

    Copies, as a replay of a CUDA graph overwrites losses. The caller waits, once for each device,
    until its own stream there has made them: their memory may then be given to other streams.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, loss in enumerate(losses):
        if loss is not None:
            alike.setdefault((loss.device, loss.dtype), []).append(number)
    kept: dict[int, Tensor] = {}
    nan: list[int] = []
    for numbers in alike.values():
        copies = torch.stack([x for k in numbers if (x := losses[k]) is not None])
        kept.update(zip(numbers, copies.unbind(), strict=True))
        nan += [k for k, is_nan in zip(numbers, copies.isnan().tolist(), strict=True) if is_nan]
    return tuple(kept[k] for k in sorted(kept)), sorted(nan)
