"""Where the bubble comes from: every idle second of every device, given to one cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.idle_attribution import Cause, seconds_of_causes
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CAUSES", "Cause", "idle_by_cause", "idle_shares"]

Floats = NDArray[np.float64]

#: Columns of `idle_by_cause`.
CAUSES = tuple(cause.name.lower() for cause in Cause)


def idle_by_cause(timeline: Timeline) -> pd.DataFrame:
    """Return why each device was idle, in seconds: a row a device, a column a cause.

    A device is idle between two of its compute tasks, before the first and after the last. Before
    each task comes, of all that it waited for, the one that let it start last: so two chains
    of tasks and waits lead up to a gap, one to its end and one to its beginning. Back from where
    they part, the one to the end is longer, by the gap. What is on it and not on the other is the
    cause, kind by kind:

    ============== =============================================================================
    column         seconds on the chain in which
    ============== =============================================================================
    bandwidth      a message's bytes, or a collective's, are under way
    latency        a message or a collective is under way beyond its bytes
    contention     a message that could leave waits: for another on its stream or on a link, or
                   for its rendezvous partner; or a collective waits for a link
    host           a task is not issued yet (as recorded, or as the launch costs have it), or
                   nothing happens
    straggler      a task runs longer than is usual for its stage, or, on the chain to the
                   beginning, shorter: the lower median of its operation's durations there, over
                   micro-batches and replicas
    imbalance      likewise, its stage's usual time beyond the mean of all stages
    warm_up        tasks run as long as that mean, before the device's first backward
    cool_down      the same, after its last forward; where a gap is both, F and R are warm_up,
                   and B, I, W and STEP cool_down
    schedule_order the same, in the steady state between
    ============== =============================================================================

    Kinds that are longer on the chain to the beginning made the gap shorter; by as much less count
    the others of their sort (the first four rows, the last five), in proportion, and then all. So
    seconds on both chains, such as the latency of each of two messages that follow each other, are
    nobody's cause, and a slow stage is the cause of gaps on devices that never wait for it
    directly. Nothing waits for the gap at the end of the step; its chain is that of the step's
    last task.

    What is measured is treated alike. A device that is slow all along cannot be told from a
    stage that has more to do, unless replicas of the stage show what is usual. Without costs,
    links are not known (contention for links counts as host), nor when tasks were issued unless
    that was recorded, and latency is the shortest that a message of its kind took. What a message
    takes beyond its latency is bandwidth, ``Costs.output_seconds`` included, if it has bytes;
    without bytes all of it is latency. A collective whose seconds were measured is bandwidth.

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
    import pandas as pd

    graph = timeline.graph
    timeline.check_complete("what devices waited for is known of")
    seconds = seconds_of_causes(timeline)
    exact = np.stack(
        [
            _summing_to(*device_seconds)
            for device_seconds in zip(timeline.idle, seconds, strict=True)
        ]
    )
    index = pd.RangeIndex(graph.n_devices, name="device")
    return pd.DataFrame(exact, index=index, columns=list(CAUSES))


def idle_shares(timelines: Mapping[str, Timeline]) -> pd.DataFrame:
    """Return which share of all devices' time each cause is, 0..1: a row a timeline.

    Columns `CAUSES`, indexed by ``schedule``. Rows sum to ``bubble_fraction``, up to rounding.

    Raises
    ------
    TimelineError
        If tasks of a timeline did not run.
    """
    import pandas as pd

    rows = {
        name: idle_by_cause(timeline).sum() / (timeline.n_devices * timeline.makespan or 1.0)
        for name, timeline in timelines.items()
    }
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(CAUSES))
    return table.rename_axis("schedule")


def _summing_to(total: float, parts: Floats) -> Floats:
    """Return ``parts`` changed by rounding alone, so that they sum to ``total`` in any order.

    Multiples of the total's last place that sum to it have partial sums which all are doubles.
    Where tasks of a device overlap, as clocks may have it, they share out what is left.
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
