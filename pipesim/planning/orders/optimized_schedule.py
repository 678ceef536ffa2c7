"""`OptimizedSchedule`: an order that `optimize` found, and how far from the best one it can be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipesim.order_search import Objective
from pipesim.scheduling.schedule import Schedule

__all__ = ["OptimizedSchedule"]


@dataclass(frozen=True, eq=False, repr=False)
class OptimizedSchedule(Schedule):
    """A schedule with its predicted time and a lower bound on it; used like any other schedule.

    A file that `save` writes holds the order alone.

    Attributes
    ----------
    objective
        ``"makespan"`` or ``"span"``, which was minimized.
    makespan, span
        Seconds that `pipesim.simulate` predicts: of the step, and the longest time of a device from
        the start of its first task to the end of its last F, B, I or W.
    lower_bound
        Seconds of the objective that no order of these costs and limits goes below.
    proved
        Whether no order is better: the objective meets the bound. A span of seconds without a
        common unit may miss this: it may be rounded to 1/4096 of itself for each task.
    first_schedule
        Name of the schedule from which the search started.
    first_value
        Seconds of the objective of that schedule.
    evaluations
        Number of moves that the local search tried.
    seconds
        Seconds that the search took.
    noisy_makespan
        Percentile of the makespans with noise (s), if there was noise; else None.
    """

    objective: Objective = "makespan"
    makespan: float = math.nan
    span: float = math.nan
    lower_bound: float = 0.0
    proved: bool = False
    first_schedule: str = ""
    first_value: float = math.nan
    evaluations: int = 0
    seconds: float = 0.0
    noisy_makespan: float | None = None

    @property
    def value(self) -> float:
        """Seconds of the objective."""
        return self.makespan if self.objective == "makespan" else self.span

    @property
    def gap(self) -> float:
        """Objective over lower bound, less 1: an optimum is at most so much better; 0 if proved."""
        if self.proved or self.value == self.lower_bound:
            return 0.0
        return self.value / self.lower_bound - 1.0 if self.lower_bound > 0.0 else math.inf

    def __repr__(self) -> str:
        proof = "optimal" if self.proved else f"at most {self.gap:.2%} above the optimum"
        if not math.isfinite(self.gap):
            proof = "no lower bound"
        return (
            f"<OptimizedSchedule {self.name}: {self.n_devices} devices, {self.n_stages} stages, "
            f"{self.n_microbatches} micro-batches, {self.objective} {self.value:.6g} s, {proof}>"
        )
