"""`TimelineWhy`: `Timeline.why`, reasons why a timeline takes as long as it does."""

from __future__ import annotations

import math

from pipesim.analysis.critical_path import critical_path
from pipesim.analysis.idle import idle_by_cause
from pipesim.analysis.lower_bounds.lower_bound import SHARE_OF_ROUNDING, timeline_bound
from pipesim.timeline.timeline import Timeline
from pipesim.utils.accessors import OwnerMethod, Subject


class TimelineWhy(Subject[Timeline]):
    """Reasons why a timeline takes as long as it does: ``timeline.why``.

    Examples
    --------
    >>> import pipesim as ps
    >>> timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), ps.Costs(1, 2))
    >>> timeline.why.lower_bound, timeline.why.gap
    (9.0, 0.0)
    """

    critical_path = OwnerMethod(critical_path)
    idle_by_cause = OwnerMethod(idle_by_cause)

    @property
    def lower_bound(self) -> float:
        """A time (s) that no order of the same tasks goes below, at the same costs.

        If the timeline has a memory limit and fits, the bound holds for the orders that fit.
        `pipesim.lower_bound` says how it is computed. It is not raised further once it meets the
        makespan. NaN if it is unknown: without costs, and if durations are not those of the costs,
        as after a run or with noise.
        """
        values = vars(self._owner)  # of a timeline that is frozen: it is computed once
        if "_lower_bound" not in values:
            values["_lower_bound"] = timeline_bound(self._owner)
        bound: float = values["_lower_bound"]
        return bound

    @property
    def gap(self) -> float:
        """Makespan over `lower_bound`, minus 1: 0 proves that no order is faster.

        An order may be optimal with a gap above 0, as the bound may be too low. NaN if the bound is
        unknown or 0. Differences by rounding count as 0.
        """
        bound = self.lower_bound
        if not bound > 0.0:
            return math.nan
        share = self._owner.makespan / bound - 1.0
        return share if share > SHARE_OF_ROUNDING else 0.0
