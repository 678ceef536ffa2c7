"""Rules for all-reduces of gradients, applied to the history of each model, and their findings.

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


class AllReduceCall(NamedTuple):
    """One all-reduce of gradients."""

    nbytes: float  # NaN if unknown
    span: TimeSpan
    exposed: tuple[TimeSpan, ...]  # parts of the span in which nothing was computed
    parts: tuple[TimeSpan, ...] = ()  # in which it worked, such as kernels; the span if empty


def _seconds(calls: Iterable[AllReduceCall]) -> float:
    """Return the seconds in which at least one call worked."""
    return covered_seconds(part for call in calls for part in call.parts or (call.span,))


@dataclass
class MicroStep:
    """One backward of a model.

    DDP's ``no_sync()`` may be around its forwards, and around its backward; None if unknown.
    """

    number: int  # of micro-steps before
    forward_in_no_sync: bool | None = None
    backward_in_no_sync: bool | None = None
    #: All-reduces of its gradients, which include those that have accumulated before.
    calls: list[AllReduceCall] = field(default_factory=list)
    #: Names of parameters without a gradient, if DDP waits for the gradients of all.
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
    """Return the report on the histories of models, by name.

    Models ``without_replicas`` cannot lack an all-reduce.
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
    kinds = list(_MEANINGS)
    violations = sorted(_violations(history), key=lambda x: (kinds.index(x[0]), x[1].number))
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


# Findings and the report

#: Cause and advice, by kind of finding, in the order in which a report lists them.
_MEANINGS = {
    "added_to": "a later backward adds to the result, which is reduced again before the optimizer "
    "steps; run forward and backward of these micro-steps within no_sync()",
    "forward_outside_no_sync": "no_sync() is around the backward alone, where it has no effect: "
    "the forward has made DDP's reducer ready; put the forward within it, too",
    "overwritten": "zero_grad() clears the result before an optimizer steps; run forward and "
    "backward within no_sync(), or leave the backward out",
    "never_stepped": "no optimizer has stepped with the result when watching ends; step with what "
    "is left at the end of an epoch, or leave these micro-batches out",
    "forward_inside_no_sync": "no_sync() is around the forward alone: DDP's reducer is not ready, "
    "and the backward outside reduces nothing; put both outside it",
    "unsynchronized_step": "the optimizer steps with gradients of these micro-steps that no "
    "all-reduce has added up: weights of the replicas diverge; run the last micro-step of each "
    "batch, forward and backward, outside no_sync()",
    "unused_parameters": "the backward gave these parameters no gradient; DistributedDataParallel "
    "waits for it and leaves all-reduces out: weights of the replicas diverge; make it with "
    "find_unused_parameters=True, or let all parameters take part in each loss",
    "not_cleared": "gradients with which the optimizer has stepped are added to: zero_grad() is "
    "missing after the step before",
}

#: Names of parameters that a report shows.
_N_NAMES = 4

#: Cause and advice for the stages of a graph, where they differ.
_GRAPH_MEANINGS = {
    "added_to": "a later backward adds to the result, which is reduced again before the optimizer "
    'steps; lower with grad_sync="last", or with a larger k, for this stage',
    "unsynchronized_step": "the optimizer steps with gradients of these micro-batches that no "
    "REDUCE_GRAD has added up: weights of the replicas diverge; lower with "
    'grad_sync="last", or with a k that divides the micro-batches of a mini-batch',
}


@dataclass(frozen=True)
class Finding:
    """A broken rule: all-reduces that are of no use, or that are missing.

    Attributes
    ----------
    kind
        ``"added_to"``, ``"forward_outside_no_sync"``, ``"overwritten"`` or ``"never_stepped"`` for
        all-reduces that are of no use; ``"unsynchronized_step"``, ``"forward_inside_no_sync"`` or
        ``"unused_parameters"`` for missing ones; or ``"not_cleared"``.
    model
        Name of the model; in a timeline, the stage and its replicas.
    micro_steps
        Numbers of the micro-steps.
    n_calls, nbytes, seconds
        As of `SyncReport`; for a stage of several replicas, of one replica, equal in all of them.
    saved
        Seconds saved without these all-reduces: the part of ``seconds`` in which nothing was
        computed.
    is_of_graph
        Whether the model is a stage of a task graph. The remedy is then ``grad_sync`` of
        `pipesim.lower`, for a DistributedDataParallel ``no_sync()``.
    parameters
        Names of unused parameters, of ``"unused_parameters"``.
    """

    kind: str
    model: str
    micro_steps: tuple[int, ...]
    n_calls: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0
    saved: float = 0.0
    is_of_graph: bool = False
    parameters: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """Cause and advice."""
        meaning = _MEANINGS[self.kind]
        return _GRAPH_MEANINGS.get(self.kind, meaning) if self.is_of_graph else meaning

    def __str__(self) -> str:
        cost, unit = "", "micro-batch" if self.is_of_graph else "micro-step"
        if self.n_calls:
            remedy = "leaving them out" if self.is_of_graph else "no_sync"
            cost = (
                f": {_count(self.n_calls, 'all-reduce')} of {_bytes(self.nbytes)} in all took "
                f"{_ms(self.seconds)}; {remedy} would save {_ms(self.saved)}"
            )
        if self.parameters:
            more = ", ..." if len(self.parameters) > _N_NAMES else ""
            cost = f": {', '.join(self.parameters[:_N_NAMES])}{more}"
        return (
            f"{self.kind} ({self.model}), {_count(len(self.micro_steps), unit)} "
            f"{_ranges(self.micro_steps)}{cost}\n    {self.meaning}"
        )


@dataclass(frozen=True)
class SyncReport:
    """Report on the synchronization of gradients; ``print`` shows it as text.

    Attributes
    ----------
    n_micro_steps, n_steps
        Backwards, and optimizer steps that followed one.
    n_calls, nbytes, seconds, exposed
        All-reduces of gradients, their bytes, the seconds in which at least one was running, and
        the part of these in which nothing was computed.
    findings
        Broken rules; empty if each all-reduce was of use, and none was missing.
    notes
        Limits of the observation, and models that need no synchronization.
    """

    n_micro_steps: int
    n_steps: int
    n_calls: int
    nbytes: float
    seconds: float
    exposed: float
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def saved(self) -> float:
        """Seconds that ``no_sync()`` would save, over all findings."""
        return math.fsum(finding.saved for finding in self.findings)

    def __str__(self) -> str:
        head = (
            f"{_count(self.n_micro_steps, 'micro-step')}, "
            f"{_count(self.n_steps, 'optimizer step')}, "
            f"{_count(self.n_calls, 'all-reduce')} of gradients: {_bytes(self.nbytes)} in "
            f"{_ms(self.seconds)}, {_ms(self.exposed)} of them not overlapped"
        )
        findings = list(map(str, self.findings))
        if self.n_micro_steps and not findings:
            result = "every all-reduce was of use" if self.n_calls else "no all-reduce was missing"
            findings = [f"nothing found: {result}"]
        return "\n".join([head, *findings, *(f"note: {note}" for note in self.notes)])


def _ranges(numbers: Sequence[int]) -> str:
    """Return ``"0-2, 4-6"`` for numbers in order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(shown[:8]) + (f", ... {shown[-1]}" if len(shown) > 8 else "")


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 'es' if what.endswith('ch') else 's'}"


def _bytes(n: float) -> str:
    return "an unknown number of bytes" if math.isnan(n) else f"{n / 1e6:.6g} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


# Spans of time

#: Start and end, seconds.
TimeSpan = tuple[float, float]


def covered_seconds(spans: Iterable[TimeSpan]) -> float:
    """Return the seconds that at least one span covers."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def uncovered(span: TimeSpan, others: Sequence[TimeSpan]) -> Iterator[TimeSpan]:
    """Yield the parts of a span that no other span covers; the others are sorted."""
    begin, end = span
    for start, stop in others:
        if stop <= begin:
            continue
        if start >= end:
            break
        if start > begin:
            yield begin, start
        begin = stop
        if begin >= end:
            return
    if begin < end:
        yield begin, end
