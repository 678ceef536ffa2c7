"""A model that `pipeexec.watch_sync` watches: its history, and its all-reduces as timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeexec.moments import Moment
from pipeexec.sync_rules import CLEAR, STEP, Call, History, MicroStep

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
        """Return it with times as ``seconds`` has them; one that has not ended lasts till then."""
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
    """A model, and what happened to its gradients; calls are finished when it is reported."""

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
    backward: object = None  # in which the latest was made
    n_micro_steps: int = 0

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
        """Note a gradient of the backward ``key``, of which the first begins a micro-step."""
        if self.latest is not None and self.backward == key:
            return
        inside = None if self.ddp is None else not self.ddp.require_backward_grad_sync
        forward = all(self.forwards) if self.forwards else None
        self.latest = MicroStep(self.n_micro_steps, forward, inside)
        self.history.append(self.latest)
        self.backward = key
        self.n_micro_steps += 1
        self.forwards.clear()

    def stepped(self) -> None:
        """Note a step of an optimizer, if there was a backward before."""
        if self.latest is not None:
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
