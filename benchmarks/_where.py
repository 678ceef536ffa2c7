"""Where the runtime's own time goes: a clock in each of its functions, less those it calls."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from pipeexec.devices import transfer
from pipeexec.devices.streams import CpuEvent, CpuStream, InlineStream
from pipeexec.distributed.channels import Channel
from pipeexec.executor.step import Step
from pipeexec.executor.step_inputs import StepInputs
from pipeexec.stages.stage import Stage

#: What is timed: whose function, and the part of the time that it is.
PARTS: Sequence[tuple[Any, str, str]] = [
    (CpuStream, "wait_event", "issue: waits"),
    (CpuStream, "run", "issue: run"),
    (InlineStream, "wait_event", "issue: waits"),
    (InlineStream, "run", "issue: run"),
    (InlineStream, "submit", "issue: run"),
    (Step, "issue", "issue: loop"),
    (Step, "_wait", "host idle"),
    (Step, "_run_handler", "task's function and guard"),
    (StepInputs, "random_seed", "seeds"),
    (CpuEvent, "set", "events pass"),
    (Stage, "forward", "stage's books"),
    (Stage, "backward", "stage's books"),
    (Stage, "_call", "stage's call, loss"),
    (torch.autograd, "backward", "autograd"),
    (transfer, "send", "hand-over"),
    (transfer, "receive", "hand-over"),
]
#: The same of messages to other processes.
MESSAGES: Sequence[tuple[Any, str, str]] = [
    (Channel, "post", "posted"),
    (Channel, "finish", "until gone"),
    (Channel, "post_next_receive", "asked for"),
    (Channel, "accept", "header in, compared"),
    (Channel, "receive", "tensors in"),
    (Channel, "_send", "gloo send, the call"),
    (Channel, "_receive", "gloo receive, the call"),
    (Channel, "wait", "waiting for gloo"),
]
#: In which of them a thread sleeps.
ASLEEP = {"host idle", "waiting for gloo"}


class Clock:
    """Seconds and calls of each part; a function's time is less that of those it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inner = threading.local()

    def around(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*arguments: Any, **options: Any) -> Any:
            inner = self._inner
            outer, inner.seconds = getattr(inner, "seconds", 0.0), 0.0
            start = perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                whole = perf_counter() - start
                self.seconds[part] += whole - inner.seconds
                self.calls[part] += 1
                inner.seconds = outer + whole

        return timed

    def woken(self, stream: CpuStream, event: CpuEvent) -> None:
        """Do as `CpuStream._block`, and note how long the thread slept on after the event."""
        if event.add_callback(stream._gate.release):
            stream._gate.acquire()
            if event.time is not None:
                self.seconds["wake-up"] += perf_counter() - event.time
                self.calls["wake-up"] += 1

    def reset(self) -> None:
        """Forget what was timed."""
        self.seconds.clear()
        self.calls.clear()


@contextmanager
def clocks(parts: Sequence[tuple[Any, str, str]]) -> Iterator[Clock]:
    """Time the parts of whatever runs in the block."""
    clock = Clock()
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in parts]
    block = CpuStream._block
    for owner, name, part in parts:
        setattr(owner, name, clock.around(getattr(owner, name), part))
    CpuStream._block = lambda stream, event: clock.woken(stream, event)  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        CpuStream._block = block  # type: ignore[method-assign]
        for owner, name, function in before:
            setattr(owner, name, function)
