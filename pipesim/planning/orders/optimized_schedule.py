"""`OptimizedSchedule`: an order that `optimize` found, and how far from the best one it can be."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from pipesim.order_search import Objective
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.units import format_time


@dataclass(frozen=True, eq=False, repr=False)
class OptimizedSchedule(Schedule):
    """A schedule with its predicted time and a lower bound on it; used like any other schedule.

    A file that `save` writes holds the order alone. With another order of micro-batches, or other
    updates or slices, it becomes a `pipesim.Schedule`, without a predicted time.

    Attributes
    ----------
    name, placement, n_microbatches, op, stage, microbatch, ptr, overlapped
        Orders of the devices, as in `pipesim.Schedule`.
    n_batches, weight_versions, recipe, n_slices
        As in `pipesim.Schedule`.
    objective
        ``"makespan"`` or ``"span"``, which was minimized.
    makespan, span
        Seconds that `pipesim.simulate` predicts: of the step, and the longest time of a device from
        the start of its first task to the end of its last F, B, I or W.
    lower_bound
        Seconds of the objective that no order of these costs and limits goes below, also in any
        order of micro-batches.
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

    Raises
    ------
    ScheduleError
        Not here, but by `pipesim.verify`, as for `pipesim.Schedule`.

    See Also
    --------
    pipesim.optimize : Search for such a schedule.
    pipesim.Schedule : Orders without predicted times.
    pipesim.lower_bound : Bound the time of all orders from below.

    Examples
    --------
    >>> import pipesim as ps
    >>> costs = ps.Costs(forward=1, backward=2)
    >>> order = ps.optimize(ps.linear(2), 2, costs, progress=False)
    >>> order
    <OptimizedSchedule optimized: 2 devices, 2 stages, 2 micro-batches, makespan 9 s, optimal>
    >>> order.makespan, order.lower_bound, order.gap
    (9.0, 9.0, 0.0)
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

    def _ordered_anew(self, **changes: Any) -> Schedule:
        plain = Schedule(**{x.name: getattr(self, x.name) for x in fields(Schedule)})
        return replace(plain, **changes)

    def __repr__(self) -> str:
        return (
            f"<OptimizedSchedule {self.name}: {self.n_devices} devices, {self.n_stages} stages, "
            f"{self.n_microbatches} micro-batches, {self.objective} {self.value:.6g} s, "
            f"{self._proof()}>"
        )

    def _repr_html_(self) -> str:
        from pipesim.plot.html_parts import note_html, table_html

        head = [self.objective, "time", "above the lower bound"]
        has_bound = self.lower_bound > 0.0
        rows = [["this order", format_time(self.value), f"{self.gap:.2%}" if has_bound else "-"]]
        if self.first_schedule:
            above = f"{self.first_value / self.lower_bound - 1:.2%}" if has_bound else "-"
            first = f"{self.first_schedule}, where the search started"
            rows.append([first, format_time(self.first_value), above])
        if has_bound:
            rows.append(["lower bound of all orders", format_time(self.lower_bound), "0.00%"])
        text = f"Optimized order: {self._proof()}"
        if self.noisy_makespan is not None:
            text += f"; makespan with noise {format_time(self.noisy_makespan)}"
        text += f"; {self.evaluations:,} moves in {format_time(self.seconds)}"
        return note_html(text) + table_html(head, rows) + super()._repr_html_()

    def _proof(self) -> str:
        """Return in words how far from the optimum the order can be."""
        if not math.isfinite(self.gap):
            return "no lower bound"
        return "optimal" if self.proved else f"at most {self.gap:.2%} above the optimum"
