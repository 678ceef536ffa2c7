"""Findings of the linter of gradient synchronization, and the report that lists them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Cause and advice, by kind of finding.
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
#: Kinds of findings, in the order in which a report lists them.
KINDS = tuple(_MEANINGS)

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
        All-reduces, their bytes, and the seconds in which at least one was running. For a stage of
        several replicas, the values of one replica, equal in all of them.
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
