"""`WatchedModel`: history of a model that `pipeexec.watch_sync` watches, with its all-reduces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeexec.data_parallel.sync_lint.device_times import Moment
from pipeexec.data_parallel.sync_lint.sync_rules import (
    CLEAR,
    STEP,
    AllReduceCall,
    History,
    HistoryEvent,
    MicroStep,
)


@dataclass(eq=False)
class WatchedBackward:
    """A backward: ``computed`` is the moment of its last gradient, ``ended`` that of its end."""

    makes_gradients: bool = True
    computed: Moment = None
    ended: Moment = None


@dataclass(eq=False)
class TimedAllReduce:
    """An all-reduce that has started, and the backward in which it did."""

    nbytes: float
    start: Moment
    backward: WatchedBackward | None
    end: Moment = None

    def to_call(self, seconds: Callable[[Moment], float]) -> AllReduceCall:
        """Return its times in seconds; without an end, the end of the backward counts."""
        start = seconds(self.start)
        backward = self.backward
        ends = [x for x in (self.end, backward and backward.ended) if x is not None]
        end = max(start, seconds(ends[0])) if ends else start
        exposed = (start, end)
        if backward is not None and backward.computed is not None:
            last = seconds(backward.ended) if backward.ended is not None else end
            exposed = (max(start, seconds(backward.computed)), min(end, last))
        return AllReduceCall(
            self.nbytes, (start, end), (exposed,) if exposed[0] < exposed[1] else ()
        )


@dataclass(eq=False)
class WatchedModel:
    """A model and the history of its gradients; `with_calls` adds the times of all-reduces.

    Attributes
    ----------
    name
        Name in the report.
    ddp
        The DistributedDataParallel around the model, or None.
    names, parameters
        Names of the parameters that require gradients, and these.
    now, seconds
        Functions of `device_timer`.
    history
        Micro-steps, steps and clears so far.
    calls
        All-reduces of each micro-step.
    forwards
        Whether ``no_sync()`` was around each forward since the last backward.
    latest
        The latest micro-step, if neither a step nor a clear has followed it.
    backward
        Key of the latest micro-step's backward.
    n_micro_steps
        Micro-steps so far.
    n_processes
        Processes over which the model is replicated, as observed at steps of an optimizer.
    """

    name: str
    ddp: DistributedDataParallel | None
    names: list[str]
    parameters: list[nn.Parameter]
    now: Callable[[], Moment]
    seconds: Callable[[Moment], float]
    history: list[HistoryEvent] = field(default_factory=list)
    calls: list[tuple[MicroStep, TimedAllReduce]] = field(default_factory=list)
    forwards: list[bool] = field(default_factory=list)
    latest: MicroStep | None = None
    backward: object = None
    n_micro_steps: int = 0
    n_processes: int = 0

    def __post_init__(self) -> None:
        self.ids = {id(parameter) for parameter in self.parameters}
        self.n_elements = sum(parameter.numel() for parameter in self.parameters)

    @property
    def group(self) -> str | None:
        """Name of DDP's process group."""
        return None if self.ddp is None else str(self.ddp.process_group.group_name)

    @property
    def is_clear(self) -> bool:
        """Whether there was no backward since gradients were cleared."""
        return not self.history or self.history[-1] == CLEAR

    def add_gradient(self, key: object, name: str) -> None:
        """Note the gradient of a parameter; the first of a backward ``key`` starts a micro-step."""
        if self.latest is None or self.backward != key:
            self._start_micro_step(key)
        if self.latest is not None:
            self.latest.unused.pop(name, None)

    def _start_micro_step(self, key: object) -> None:
        backward_in = None if self.ddp is None else not self.ddp.require_backward_grad_sync
        forward_in = all(self.forwards) if self.forwards else None
        ddp = self.ddp
        waits_for_all = ddp is not None and not (ddp.find_unused_parameters or ddp.static_graph)
        ignored = getattr(ddp, "parameters_to_ignore", ())
        unused = dict.fromkeys(x for x in self.names if waits_for_all and x not in ignored)
        self.latest = MicroStep(self.n_micro_steps, forward_in, backward_in, unused=unused)
        self.history.append(self.latest)
        self.backward = key
        self.n_micro_steps += 1
        self.forwards.clear()

    def add_step(self, group: dist.ProcessGroup | None) -> None:
        """Note a step of an optimizer, if there was a backward before.

        A model without DDP is replicated over ``group``, or over all processes if it is None.
        """
        if self.latest is not None:
            if self.ddp is not None:
                group = self.ddp.process_group
            has_group = dist.is_available() and dist.is_initialized()
            size = dist.get_world_size(group) if has_group else 1
            self.n_processes = max(self.n_processes, size)
            self.history.append(STEP)
            self.latest = None

    def add_clear(self) -> None:
        """Note that gradients are cleared."""
        if not self.is_clear:
            self.history.append(CLEAR)
        self.latest = None

    def with_calls(self) -> History:
        """Return the history, with the all-reduces of each micro-step so far."""
        for step, _ in self.calls:
            step.calls.clear()
        for step, timed in self.calls:
            step.calls.append(timed.to_call(self.seconds))
        return self.history
