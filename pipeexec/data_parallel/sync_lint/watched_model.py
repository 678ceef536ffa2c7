"""A model that `pipeexec.watch_sync` watches: its history, and its all-reduces as timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeexec.data_parallel.sync_lint.device_times import Moment
from pipeexec.data_parallel.sync_lint.rules import CLEAR, STEP, Call, History, MicroStep

__all__ = ["Backward", "Timed", "Watched"]


@dataclass(eq=False)
class Backward:
    """A backward: when its last gradient was there, and when it ended."""

    makes_gradients: bool = True
    computed: Moment = None
    ended: Moment = None


@dataclass(eq=False)
class Timed:
    """An all-reduce under way; ``computed`` and ``ended`` are those of the backward around it."""

    nbytes: float
    start: Moment
    backward: Backward | None
    end: Moment = None

    def call(self, seconds: Callable[[Moment], float]) -> Call:
        """Return its times in seconds; without an end, the end of the backward counts."""
        start = seconds(self.start)
        around = self.backward
        closes = [x for x in (self.end, around and around.ended) if x is not None]
        end = max(start, seconds(closes[0])) if closes else start
        exposed = (start, end)
        if around is not None and around.computed is not None:
            last = seconds(around.ended) if around.ended is not None else end
            exposed = (max(start, seconds(around.computed)), min(end, last))
        return Call(self.nbytes, (start, end), (exposed,) if exposed[0] < exposed[1] else ())


@dataclass(eq=False)
class Watched:
    """A model and the history of its gradients; `with_calls` adds the times of all-reduces."""

    name: str
    ddp: DistributedDataParallel | None
    parameters: list[nn.Parameter]
    now: Callable[[], Moment]
    seconds: Callable[[Moment], float]
    history: list[MicroStep | Literal["step", "clear"]] = field(default_factory=list)
    calls: list[tuple[MicroStep, Timed]] = field(default_factory=list)
    #: Whether no_sync was around each forward since the last backward.
    forwards: list[bool] = field(default_factory=list)
    latest: MicroStep | None = None  # since the last step and zero_grad
    backward: object = None  # of the latest micro-step
    n_micro_steps: int = 0
    #: Processes over which the model is replicated, as seen at steps of an optimizer.
    n_processes: int = 0

    def __post_init__(self) -> None:
        self.ids = {id(parameter) for parameter in self.parameters}
        self.n_elements = sum(parameter.numel() for parameter in self.parameters)

    @property
    def group(self) -> str | None:
        """Name of the process group of DDP."""
        return None if self.ddp is None else str(self.ddp.process_group.group_name)

    @property
    def is_clear(self) -> bool:
        """Whether no backward has come since gradients were cleared."""
        return not self.history or self.history[-1] == CLEAR

    def accumulated(self, key: object) -> None:
        """Note a gradient of the backward ``key``; the first one begins a micro-step."""
        if self.latest is not None and self.backward == key:
            return
        inside = None if self.ddp is None else not self.ddp.require_backward_grad_sync
        forward = all(self.forwards) if self.forwards else None
        self.latest = MicroStep(self.n_micro_steps, forward, inside)
        self.history.append(self.latest)
        self.backward = key
        self.n_micro_steps += 1
        self.forwards.clear()

    def stepped(self, group: dist.ProcessGroup | None) -> None:
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

    def cleared(self) -> None:
        """Note that gradients were cleared."""
        if not self.is_clear:
            self.history.append(CLEAR)
        self.latest = None

    def with_calls(self) -> History:
        """Return the history, with the all-reduces of each micro-step as far as they are known."""
        for step, _ in self.calls:
            step.calls.clear()
        for step, timed in self.calls:
            step.calls.append(timed.call(self.seconds))
        return self.history
