"""What is selected in a page, as tables: a task, the chain that led to it, an idle gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipesim.analysis.compare import Comparison
from pipesim.analysis.critical_path import WaitReason, chain_to, last_waits
from pipesim.analysis.idle import CAUSES, causes_of_gaps
from pipesim.errors import ArgumentError, TimelineError
from pipesim.plot.page.save import Showable
from pipesim.timeline.timeline import COLUMNS, Timeline

if TYPE_CHECKING:
    import pandas as pd


class Selection(NamedTuple):
    """A selected task or idle gap.

    Attributes
    ----------
    timeline
        The timeline that it is in.
    task
        Id of the task; -1 for a gap.
    gap
        Device, id of the task before the gap (-1 if none), and id of the task after it; at the
        end of the step, the latter is the task that ends last. None for a task.
    """

    timeline: Timeline
    task: int
    gap: tuple[int, int, int] | None


def find_selection(shown: Sequence[Showable], values: Mapping[str, Any]) -> Selection | None:
    """Return what the values of ``TimelineWidget.selection`` name; None if nothing is selected.

    Raises
    ------
    TimelineError
        If it is in a schedule, a task graph or a simulation of the page, which are no timelines.
    """
    if not values:
        return None
    if values.get("simulated"):
        raise TimelineError(
            "the selection is in a simulation of the page, which Python does not have; press Reset "
            "in the tab What if, or simulate the change with pipesim.simulate"
        )
    try:
        item = shown[values["panel"]]
        content = item
        if isinstance(item, Comparison):
            content = {"predicted": item.predicted, "measured": item.matched}[values["role"]]
        if not isinstance(content, Timeline):
            raise TimelineError(
                f"the selection is in the {type(content).__name__} {content.name!r}, whose tasks "
                "have no times; pipesim.simulate gives a timeline, whose selection has"
            )
        if values["type"] == "gap":
            gap = int(values["device"]), int(values["previous"]), int(values["next"])
            return Selection(content, -1, gap)
        return Selection(content, range(len(content))[values["task"]], None)
    except (KeyError, IndexError, TypeError) as error:
        raise ArgumentError(f"this selection names nothing that is shown: {values!r}") from error


def task_rows(selection: Selection | None) -> pd.DataFrame:
    """Return the row of `Timeline.frame` of a selected task; no rows if none is selected."""
    if selection is None or selection.task < 0:
        return _no_tasks()
    return selection.timeline.frame.loc[[selection.task]]


def chain_rows(selection: Selection | None) -> pd.DataFrame:
    """Return the chain of tasks that led to a selected task, or to the end of a selected gap.

    Returns
    -------
    pandas.DataFrame
        The columns of `Timeline.frame`, first task first, and ``waited_for``: the reason of the
        task's last wait, a word of `pipesim.analysis.critical_path.WaitReason`. No rows if nothing
        is selected.

    Raises
    ------
    TimelineError
        If tasks waited for each other in a circle, by their measured times.
    """
    if selection is None:
        return _no_tasks().assign(waited_for=[])
    timeline = selection.timeline
    waits = last_waits(timeline)
    last = selection.task if selection.gap is None else selection.gap[2]
    path = chain_to(timeline, waits, last)
    reasons = [str(WaitReason(reason)) for reason in waits.reason[path]]
    return timeline.frame.loc[path].assign(waited_for=reasons)


def gap_rows(selection: Selection | None) -> pd.DataFrame:
    """Return a selected idle gap: a row with its device, its times and its causes.

    Returns
    -------
    pandas.DataFrame
        ``device``, ``start``, ``end`` (s), and a column of seconds for each cause of
        `pipesim.analysis.idle.idle_by_cause`; these sum to ``end - start``, up to rounding. No rows
        if no gap is selected.
    """
    from pipesim.utils.packages import pandas as pd

    if selection is None or selection.gap is None:
        return pd.DataFrame(columns=["device", "start", "end", *CAUSES])
    device, previous, following = selection.gap
    gaps, seconds = causes_of_gaps(selection.timeline)
    rows = np.flatnonzero(
        (gaps.device == device) & (gaps.previous == previous) & (gaps.task == following)
    )
    if len(rows) != 1:
        raise ArgumentError(
            f"timeline {selection.timeline.name!r} has no idle gap of device {device} between "
            f"tasks {previous} and {following}"
        )
    row = int(rows[0])
    causes = dict(zip(CAUSES, seconds[row], strict=True))
    values = {"device": device, "start": gaps.since[row], "end": gaps.until[row], **causes}
    return pd.DataFrame([values])


def _no_tasks() -> pd.DataFrame:
    """Return a table of tasks without rows."""
    from pipesim.utils.packages import pandas as pd

    return pd.DataFrame(columns=list(COLUMNS), index=pd.RangeIndex(0, name="task"))
