"""Rules that all-reduces of gradients are judged by, and the report of what breaks them.

A history is what happened to the gradients of one model, in order: micro-steps (each a backward,
with the all-reduces that followed it), `STEP` of the optimizer, and `CLEAR` by ``zero_grad()``.
The same rules judge the histories of loops, traces and timelines.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple

__all__ = ["CLEAR", "STEP", "Call", "Finding", "History", "MicroStep", "SyncReport", "judge"]

Span = tuple[float, float]


class Call(NamedTuple):
    """One all-reduce of gradients.

    Attributes
    ----------
    nbytes
        NaN where it is not known.
    span
        Seconds at which it began and ended.
    exposed
        The spans of it in which nothing was computed.
    """

    nbytes: float
    span: Span
    exposed: tuple[Span, ...]


@dataclass
class MicroStep:
    """One backward of a model.

    Attributes
    ----------
    number
        How many came before.
    forward_in_no_sync, backward_in_no_sync
        Whether DDP's ``no_sync()`` was around its forwards, and around its backward; None where
        that is not known.
    calls
        All-reduces of its gradients, or of those that have accumulated by then.
    """

    number: int
    forward_in_no_sync: bool | None = None
    backward_in_no_sync: bool | None = None
    calls: list[Call] = field(default_factory=list)


STEP: Literal["step"] = "step"
CLEAR: Literal["clear"] = "clear"
History = Sequence[MicroStep | Literal["step", "clear"]]

#: By kind of finding, its cause and the advice.
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
    "not_cleared": "gradients with which the optimizer has stepped are added to: zero_grad() is "
    "missing after the step before",
}

#: The same for the stages of a graph, where they differ.
_MEANINGS_OF_GRAPHS = {
    "added_to": "a later backward adds to the result, which is reduced again before the optimizer "
    'steps; lower with grad_sync="last", or with a larger k, for this stage',
    "unsynchronized_step": "the optimizer steps with gradients of these micro-batches that no "
    "REDUCE_GRAD has added up: weights of the replicas diverge; lower with "
    'grad_sync="last", or with a k that divides the micro-batches of a mini-batch',
}


@dataclass(frozen=True)
class Finding:
    """All-reduces, or their absence, that break a rule.

    Attributes
    ----------
    kind
        ``"added_to"``, ``"forward_outside_no_sync"``, ``"overwritten"``, ``"never_stepped"``: of
        all-reduces that are of no use; ``"unsynchronized_step"``, ``"forward_inside_no_sync"``: of
        those that are missing; ``"not_cleared"``.
    model
        Name of the model; of a timeline, the stage and its replicas.
    micro_steps
        Their numbers.
    n_calls, nbytes, seconds
        All-reduces, their bytes, and the seconds in which at least one was under way. For a stage
        of several replicas, the values of one replica, equal in all of them.
    saved
        Seconds saved without these all-reduces: those of ``seconds`` in which nothing was computed.
    is_of_graph
        Whether the model is a stage of a task graph, where the remedy is ``grad_sync`` of
        `pipesim.lower`. Otherwise it is a DistributedDataParallel, where it is ``no_sync()``.
    """

    kind: str
    model: str
    micro_steps: tuple[int, ...]
    n_calls: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0
    saved: float = 0.0
    is_of_graph: bool = False

    @property
    def meaning(self) -> str:
        """Cause and advice."""
        meaning = _MEANINGS[self.kind]
        return _MEANINGS_OF_GRAPHS.get(self.kind, meaning) if self.is_of_graph else meaning

    def __str__(self) -> str:
        cost, unit = "", "micro-batch" if self.is_of_graph else "micro-step"
        if self.n_calls:
            remedy = "leaving them out" if self.is_of_graph else "no_sync"
            cost = (
                f": {_count(self.n_calls, 'all-reduce')} of {_bytes(self.nbytes)} in all took "
                f"{_ms(self.seconds)}; {remedy} would save {_ms(self.saved)}"
            )
        return (
            f"{self.kind} ({self.model}), {_count(len(self.micro_steps), unit)} "
            f"{_ranges(self.micro_steps)}{cost}\n    {self.meaning}"
        )


@dataclass(frozen=True)
class SyncReport:
    """What was seen of the synchronization of gradients; printed, a text.

    Attributes
    ----------
    n_micro_steps, n_steps
        Backwards, and optimizer steps that followed one.
    n_calls, nbytes, seconds, exposed
        All-reduces of gradients, their bytes, the seconds in which at least one was under way, and
        those of them in which nothing was computed.
    findings
        Broken rules; empty where each all-reduce was of use, and none was missing.
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
        """Seconds that ``no_sync()`` would save, of all findings."""
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


def judge(
    histories: Mapping[str, History],
    notes: Iterable[str] = (),
    *,
    without_replicas: Collection[str] = (),
) -> SyncReport:
    """Return the report on the histories of models, by name.

    Models in ``without_replicas`` have no other copy, so no all-reduce of theirs can be missing.
    """
    steps = [x for of in histories.values() for x in of if isinstance(x, MicroStep)]
    calls = [call for step in steps for call in step.calls]
    findings = [
        finding
        for name, history in histories.items()
        for finding in _findings(name, history)
        if name not in without_replicas or finding.kind != "unsynchronized_step"
    ]
    return SyncReport(
        n_micro_steps=len(steps),
        n_steps=sum(x == STEP for of in histories.values() for x in of),
        n_calls=len(calls),
        nbytes=math.fsum(call.nbytes for call in calls),
        seconds=_length(call.span for call in calls),
        exposed=_length(span for call in calls for span in call.exposed),
        findings=tuple(findings),
        notes=tuple(notes),
    )


def _findings(model: str, history: History) -> Iterator[Finding]:
    """Yield the findings of one model, a kind after the other."""
    broken = sorted(_broken(history), key=lambda x: (list(_MEANINGS).index(x[0]), x[1].number))
    for kind, pairs in groupby(broken, key=lambda x: x[0]):
        of = [step for _, step in pairs]
        calls = [call for step in of for call in step.calls]
        yield Finding(
            kind,
            model,
            tuple(step.number for step in of),
            len(calls),
            math.fsum(call.nbytes for call in calls),
            _length(call.span for call in calls),
            _length(span for call in calls for span in call.exposed)
            if kind != "not_cleared"
            else 0.0,
        )


def _broken(history: History) -> Iterator[tuple[str, MicroStep]]:
    """Yield kinds of findings and the micro-steps that they are about."""
    pending: list[MicroStep] = []  # whose gradients no optimizer has used
    has_stepped = False  # with what the gradients hold
    for event in history:
        if isinstance(event, MicroStep):
            if has_stepped:
                yield "not_cleared", MicroStep(event.number)
            has_stepped = False
            pending.append(event)
        elif event == STEP:
            yield from _at_step(pending)
            pending, has_stepped = [], True
        else:
            yield from (("overwritten", step) for step in pending if step.calls)
            pending, has_stepped = [], False
    yield from (("never_stepped", step) for step in pending if step.calls)


def _at_step(pending: Sequence[MicroStep]) -> Iterator[tuple[str, MicroStep]]:
    """Yield the broken rules among the micro-steps whose gradients an optimizer uses."""
    last = max((k for k, step in enumerate(pending) if step.calls), default=-1)
    for k, step in enumerate(pending):
        if step.calls and k < last:
            yield "forward_outside_no_sync" if step.backward_in_no_sync else "added_to", step
        if k > last:
            yield "unsynchronized_step", step
            if step.forward_in_no_sync and step.backward_in_no_sync is False:
                yield "forward_inside_no_sync", step


def _length(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one span lies."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


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
