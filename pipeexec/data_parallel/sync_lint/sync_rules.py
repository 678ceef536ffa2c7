"""Rules for all-reduces of gradients, applied to the history of each model.

A history lists what happened to the gradients of one model, in order: micro-steps (each a backward,
with the all-reduces that followed it), `STEP` of the optimizer, and `CLEAR` by ``zero_grad()``.
The same rules apply to the histories of loops, traces and timelines.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, NamedTuple

from pipeexec.data_parallel.sync_lint.findings import KINDS, Finding, SyncReport
from pipeexec.data_parallel.sync_lint.time_spans import TimeSpan, covered_seconds


class AllReduceCall(NamedTuple):
    """One all-reduce of gradients.

    Attributes
    ----------
    nbytes
        Its bytes; NaN if unknown.
    span
        Its start and end, seconds.
    exposed
        Parts of the span in which nothing was computed.
    parts
        Parts of the span in which it worked, such as kernels; the whole span if empty.
    """

    nbytes: float
    span: TimeSpan
    exposed: tuple[TimeSpan, ...]
    parts: tuple[TimeSpan, ...] = ()


def _seconds(calls: Iterable[AllReduceCall]) -> float:
    """Return the seconds in which at least one call worked."""
    return covered_seconds(part for call in calls for part in call.parts or (call.span,))


@dataclass
class MicroStep:
    """One backward of a model.

    Attributes
    ----------
    number
        How many micro-steps came before.
    forward_in_no_sync, backward_in_no_sync
        Whether DDP's ``no_sync()`` was around its forwards, and around its backward; None if
        unknown.
    calls
        All-reduces of its gradients, which include those that have accumulated before.
    unused
        Names of parameters without a gradient, if DDP waits for the gradients of all.
    """

    number: int
    forward_in_no_sync: bool | None = None
    backward_in_no_sync: bool | None = None
    calls: list[AllReduceCall] = field(default_factory=list)
    unused: dict[str, None] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether DDP was to reduce the gradients, and waits for some that do not come."""
        inside = self.forward_in_no_sync, self.backward_in_no_sync
        return bool(self.unused) and inside == (False, False)


STEP: Literal["step"] = "step"
CLEAR: Literal["clear"] = "clear"
HistoryEvent = MicroStep | Literal["step", "clear"]
History = Sequence[HistoryEvent]


def apply_rules(
    histories: Mapping[str, History],
    notes: Iterable[str] = (),
    *,
    without_replicas: Collection[str] = (),
) -> SyncReport:
    """Return the report on the histories of models.

    Parameters
    ----------
    histories
        By name of the model.
    notes
        For the report.
    without_replicas
        Names of models without another replica: they cannot lack an all-reduce.
    """
    events = [event for history in histories.values() for event in history]
    steps = [event for event in events if isinstance(event, MicroStep)]
    calls = [call for step in steps for call in step.calls]
    findings = [
        finding
        for name, history in histories.items()
        for finding in _findings(name, history)
        if name not in without_replicas
        or finding.kind not in ("unsynchronized_step", "unused_parameters")
    ]
    return SyncReport(
        n_micro_steps=len(steps),
        n_steps=events.count(STEP),
        n_calls=len(calls),
        nbytes=math.fsum(call.nbytes for call in calls),
        seconds=_seconds(calls),
        exposed=covered_seconds(span for call in calls for span in call.exposed),
        findings=tuple(findings),
        notes=tuple(notes),
    )


def _findings(model: str, history: History) -> Iterator[Finding]:
    """Yield the findings of one model, kind by kind."""
    violations = sorted(_violations(history), key=lambda x: (KINDS.index(x[0]), x[1].number))
    for kind, pairs in groupby(violations, key=lambda x: x[0]):
        steps = [step for _, step in pairs]
        calls = [call for step in steps for call in step.calls]
        yield Finding(
            kind,
            model,
            tuple(step.number for step in steps),
            len(calls),
            math.fsum(call.nbytes for call in calls),
            _seconds(calls),
            covered_seconds(span for call in calls for span in call.exposed)
            if kind != "not_cleared"
            else 0.0,
            parameters=tuple(dict.fromkeys(x for step in steps for x in step.unused))
            if kind == "unused_parameters"
            else (),
        )


def _violations(history: History) -> Iterator[tuple[str, MicroStep]]:
    """Yield the kind of each finding with its micro-step."""
    pending: list[MicroStep] = []  # no optimizer has used their gradients
    has_stepped = False  # whether an optimizer has stepped with the gradients as they are
    for event in history:
        if isinstance(event, MicroStep):
            if has_stepped:
                yield "not_cleared", MicroStep(event.number)
            has_stepped = False
            pending.append(event)
        elif event == STEP:
            yield from _violations_at_step(pending)
            pending, has_stepped = [], True
        else:
            yield from (("overwritten", step) for step in pending if step.calls)
            pending, has_stepped = [], False
    yield from (("never_stepped", step) for step in pending if step.calls)


def _violations_at_step(pending: Sequence[MicroStep]) -> Iterator[tuple[str, MicroStep]]:
    """Yield the violations among the micro-steps whose gradients an optimizer uses."""
    last = max((k for k, step in enumerate(pending) if step.calls), default=-1)
    for k, step in enumerate(pending):
        if step.calls and k < last:
            yield "forward_outside_no_sync" if step.backward_in_no_sync else "added_to", step
        if step.waits and step.calls:  # only the buckets of other parameters were reduced
            yield "unused_parameters", replace(step, calls=[])
        if k > last and pending[-1].waits:
            yield "unused_parameters", replace(step, unused=step.unused if step.waits else {})
        elif k > last:
            yield "unsynchronized_step", step
            if step.forward_in_no_sync and step.backward_in_no_sync is False:
                yield "forward_inside_no_sync", step
