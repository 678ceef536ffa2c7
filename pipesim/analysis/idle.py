"""Idle time by cause: attribute every idle second of every device to one cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.idle_attribution import causes_of_gaps
from pipesim.analysis.idle_gaps import Cause, Gaps
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import bincount

if TYPE_CHECKING:
    import pandas as pd


Floats = NDArray[np.float64]

#: Columns of `idle_by_cause`.
CAUSES = tuple(cause.name.lower() for cause in Cause)


def idle_by_cause(timeline: Timeline) -> pd.DataFrame:
    """Return the idle seconds of each device by cause: a row a device, a column a cause.

    A device is idle between two of its compute tasks, before the first and after the last. The
    predecessor of a task is the last of the tasks and waits that it waited for. So two chains of
    tasks and waits lead up to a gap: one to its end and one to its beginning. From their common
    ancestor on, the chain to the end is longer by the gap. The seconds on this chain that are not
    on the other are the cause, kind by kind:

    ============== =============================================================================
    column         seconds on the chain in which
    ============== =============================================================================
    bandwidth      a message's bytes, or a collective's, are under way
    latency        a message or a collective is under way beyond its bytes
    contention     a message that could leave waits: for another on its stream or on a link, or
                   for its rendezvous partner; or a collective waits for a link
    host           a task is not issued yet (by the recorded issue times, or by the launch costs),
                   or nothing happens
    straggler      a task runs beyond the usual time of its stage, or, on the chain to the
                   beginning, below it: the lower median of the durations of its operation on
                   this stage, over micro-batches and replicas; each segment has its own
    imbalance      the usual time of a stage is beyond the mean of all stages, or below it
    warm_up        tasks run for this mean time, before the device's first backward
    cool_down      the same, after its last forward; where a gap is both, F and R are warm_up,
                   and B, I, W and STEP cool_down
    schedule_order the same, in the steady state between
    ============== =============================================================================

    Kinds with more seconds on the chain to the beginning made the gap shorter. These seconds are
    subtracted from the other kinds of their sort (the first four rows, the last five), in
    proportion, and then from all kinds. So:

    - Seconds on both chains are no cause, such as the latency of each of two consecutive messages.
    - A slow stage is the cause of gaps on devices that never wait for it directly.
    - No task waits for the gap at the end of the step; its chain is that of the step's last task.

    Measured timelines are treated alike:

    - A device that is always slow looks like a stage with more work, unless replicas of the stage
      show its usual time.
    - Without costs, links are unknown, and contention for links counts as host.
    - Without costs, issue times are unknown unless they were recorded.
    - Without costs, latency is the shortest time of a message of the same kind.
    - The time of a message beyond its latency is bandwidth, ``Costs.output_seconds`` included, if
      the message has bytes; without bytes all of it is latency.
    - A collective with measured seconds is bandwidth.

    Returns
    -------
    pandas.DataFrame
        Columns `CAUSES`, indexed by ``device``. Rows sum exactly to ``timeline.idle``, added in
        any order. No value is below 0, unless ``idle`` itself is, by rounding.

    Raises
    ------
    TimelineError
        If tasks of the timeline did not run.
    """
    from pipesim.utils.packages import pandas as pd

    timeline.check_complete("the causes of idle time need")
    exact = exact_sums(timeline, *causes_of_gaps(timeline))
    index = pd.RangeIndex(timeline.n_devices, name="device")
    return pd.DataFrame(exact, index=index, columns=list(CAUSES))


def exact_sums(timeline: Timeline, gaps: Gaps, seconds: Floats) -> Floats:
    """Return the seconds of each cause on each device, from those of each gap.

    Rows of the result sum exactly to ``timeline.idle``, as in `idle_by_cause`. ``gaps`` and
    ``seconds`` are the results of `causes_of_gaps`. Shape ``(n_devices, len(Cause))``.
    """
    columns = [bincount(gaps.device, column, timeline.n_devices) for column in seconds.T]
    sums = np.stack(columns, axis=1)
    return np.stack([_summing_to(*row) for row in zip(timeline.idle, sums, strict=True)])


def idle_shares(timelines: Mapping[str, Timeline]) -> pd.DataFrame:
    """Return the share of each cause in the time of all devices, 0..1: a row a timeline.

    Columns `CAUSES`, indexed by ``schedule``. Rows sum to ``bubble_fraction``, up to rounding.

    Raises
    ------
    TimelineError
        If tasks of a timeline did not run.
    """
    from pipesim.utils.packages import pandas as pd

    rows = {
        name: idle_by_cause(timeline).sum() / (timeline.n_devices * timeline.makespan or 1.0)
        for name, timeline in timelines.items()
    }
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(CAUSES))
    return table.rename_axis("schedule")


def _summing_to(total: float, parts: Floats) -> Floats:
    """Return ``parts`` changed by rounding alone, so that they sum to ``total`` in any order.

    The results are multiples of the unit in the last place of ``total``, so that every partial sum
    is an exact double. Where tasks of a device overlap by inexact clocks, ``parts`` may sum to more
    than ``total``; they are then scaled down.
    """
    if total <= 0:
        parts = np.zeros_like(parts)
    elif parts.sum() > total:
        parts = parts * (total / parts.sum())
    unit = float(np.spacing(abs(total)))
    whole = np.rint(parts / unit) * unit
    missing = math.fsum([total, *(-whole).tolist()])
    for k in np.argsort(-whole, kind="stable"):
        change = max(missing, -float(whole[k])) if total >= 0 else missing
        whole[k] += change
        missing -= change
        if not missing:
            break
    return whole
