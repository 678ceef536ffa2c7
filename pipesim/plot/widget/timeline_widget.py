"""`TimelineWidget`: a page as a widget, its selection as tables. Only this file loads anywidget."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import anywidget
import numpy as np
import traitlets

from pipesim.analysis.compare import Comparison
from pipesim.analysis.critical_path import WaitReason, chain_to, last_waits
from pipesim.analysis.idle import CAUSES, causes_of_gaps
from pipesim.errors import ArgumentError, TimelineError, check_count, check_name, check_text
from pipesim.plot.page.document import LAYOUTS
from pipesim.plot.page.save import (
    Showable,
    check_size,
    item_name,
    named_items,
    packed_page,
    widget_program,
)
from pipesim.timeline.timeline import COLUMNS, Timeline

if TYPE_CHECKING:
    import pandas as pd


class Selection(NamedTuple):
    """A selected task (an id, -1 for a gap) or idle gap (None for a task).

    A gap has its device, the id of the task before it (-1 if none), and that of the task after it.
    At the end of the step, the latter is the task that ends last.
    """

    timeline: Timeline
    task: int
    gap: tuple[int, int, int] | None


def find_selection(shown: Sequence[Showable], values: Mapping[str, Any]) -> Selection | None:
    """Return what the values of ``TimelineWidget.selection`` name; None if nothing is selected."""
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


T = TypeVar("T")


class LatestValue(Generic[T]):
    """Send the latest of the values that are put, at most once in a period.

    A value that comes early waits for a timer, and a later one takes its place. So the last value
    is always sent. `put` returns at once while another thread sends.

    Parameters
    ----------
    send
        It is called by `put`, or in the timer's thread: one call at a time.
    period
        Least time from the end of a call to the next one (s).
    share
        Most share of the time that the calls may take, 0 to 1: after a slow call, the next one
        waits for longer.
    """

    def __init__(self, send: Callable[[T], None], *, period: float, share: float) -> None:
        self._send = send
        self._period = period
        self._share = share
        self._lock = threading.Lock()
        self._waiting: list[T] = []  # the latest value, or none
        self._is_busy = False  # a call runs, or a timer is set
        self._next = time.monotonic()

    def put(self, value: T) -> None:
        """Send a value now or later, unless another one follows before."""
        with self._lock:
            self._waiting = [value]
            if self._is_busy:
                return
            self._is_busy = True
            wait = self._next - time.monotonic()
            if wait > 0:
                self._set_timer(wait)
                return
        self._send_waiting()

    def _set_timer(self, wait: float) -> None:
        timer = threading.Timer(wait, self._send_waiting)
        timer.name, timer.daemon = "pipesim widget", True
        timer.start()

    def _send_waiting(self) -> None:
        """Send the value that waits; set a timer if another one came meanwhile."""
        with self._lock:
            value = self._waiting.pop()
        began = time.monotonic()
        try:
            self._send(value)
        finally:
            with self._lock:
                ended = time.monotonic()
                wait = max(self._period, (ended - began) * (1 / self._share - 1))
                self._next = ended + wait
                self._is_busy = bool(self._waiting)
                if self._is_busy:
                    self._set_timer(wait)


#: Least time between two updates of the page (s), and the most share of the time that they take.
PERIOD, SHARE = 0.2, 0.2
#: Items that `TimelineWidget.append` keeps: each update sends all of them.
KEPT = 50

Items = Showable | Sequence[Showable] | Mapping[str, Showable]


class _Content(NamedTuple):
    """Items by name; how many were appended, and how many of the first were left out since."""

    items: dict[str, Showable]
    n_appended: int = 0
    n_left_out: int = 0


class TimelineWidget(anywidget.AnyWidget):
    """An interactive page in a notebook; `pipesim.plot.widget.make_widget.widget` makes it.

    Attributes
    ----------
    selection
        What is selected in the page, as plain values; empty if nothing is. ``view.observe(f,
        "selection")`` calls ``f`` at each change.

        - ``type``: ``"task"`` or ``"gap"``.
        - ``panel`` and ``name``: position and name of the item.
        - ``role``: ``"predicted"`` or ``"measured"`` in a `Comparison`, else ``""``.
        - ``simulated``: whether the times are those of What if.
        - ``task`` and ``action`` of a task: its id, and its text, such as ``"2F0"``.
        - ``device``, ``since``, ``until`` (s), ``previous`` and ``next`` of a gap; the last two are
          ids of the tasks around it, -1 for none.
    height
        Height in the notebook (CSS pixels). It can be set.
    """

    _esm = widget_program()
    height = traitlets.Int(420, min=100).tag(sync=True)
    selection: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    # The packed document; its number, which a selection names; items left out at its front.
    document = traitlets.Bytes().tag(sync=True)
    version = traitlets.Int(0).tag(sync=True)
    n_left_out = traitlets.Int(0).tag(sync=True)

    def __init__(
        self, items: Items, *, layout: str = "stack", height: int = 420, title: str | None = None
    ) -> None:
        self._arrangement = check_name("layout", layout, LAYOUTS)
        self._title = title if title is None else check_text("title", title)
        self._content = _checked(items)
        self._sent: tuple[int, list[Showable]] = (0, [])
        super().__init__(height=check_count("height", height, 100))
        # The first document is no update: loading compiled loops for it can take seconds.
        self._send_content(self._content)
        self._updates = LatestValue(self._send_content, period=PERIOD, share=SHARE)

    def __repr__(self) -> str:
        names = list(self._content.items)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"<TimelineWidget {', '.join(names[:3])}{more}>"

    def show(self, items: Items) -> None:
        """Show items in place of those that are shown. Zoom and settings of the page stay.

        Of updates that follow each other fast, some are left out. The last one is in the page after
        0.2 s, or after four times the time that preparing an update takes.
        """
        self._update(_checked(items))

    def append(self, item: Showable, name: str | None = None) -> None:
        """Show one more item: with ``layout="steps"`` as the last step.

        A page that shows the last step goes on to the new one. The page keeps the last 50 items.
        Updates are as fast as those of `show`.

        Parameters
        ----------
        item
            A timeline, a comparison, a schedule or a task graph.
        name
            Name in the page; by default ``step`` and the number of items until now.
        """
        items, n_appended, n_left_out = self._content
        number = len(items) + n_left_out + 1
        name = f"step {number}" if name is None else check_text("name", name)
        if name in items:
            raise ArgumentError(f"an item of this widget is named {name!r}; give another name")
        pairs = [*items.items(), *named_items({name: item})][-KEPT:]
        check_size(pairs)
        n_left_out += len(items) + 1 - len(pairs)
        self._update(_Content(dict(pairs), n_appended + 1, n_left_out))

    def selected_tasks(self) -> pd.DataFrame:
        """Return the row of `Timeline.frame` of the selected task; no rows if none is selected.

        Raises
        ------
        TimelineError
            If the selection is in a schedule, a task graph, or a simulation of the page (What if).
        """
        selection = self._selected()
        if selection is None or selection.task < 0:
            return _no_tasks()
        return selection.timeline.frame.loc[[selection.task]]

    def chain(self) -> pd.DataFrame:
        """Return the chain of tasks that led to the selected task, or to the end of the gap.

        Each task waited for the one before it. The columns are those of `Timeline.frame`, and
        ``waited_for``, as in `Timeline.why.critical_path`. No rows if nothing is selected.

        Raises
        ------
        TimelineError
            As `selected_tasks`, and if tasks waited for each other in a circle.
        """
        selection = self._selected()
        if selection is None:
            return _no_tasks().assign(waited_for=[])
        timeline = selection.timeline
        waits = last_waits(timeline)
        last = selection.task if selection.gap is None else selection.gap[2]
        path = chain_to(timeline, waits, last)
        reasons = [str(WaitReason(reason)) for reason in waits.reason[path]]
        return timeline.frame.loc[path].assign(waited_for=reasons)

    def selected_gap(self) -> pd.DataFrame:
        """Return the selected idle gap: ``device``, ``start``, ``end`` and its causes (s).

        The columns of causes are those of `pipesim.analysis.idle.idle_by_cause`, and sum to
        ``end - start``, up to rounding. No rows if no gap is selected.

        Raises
        ------
        TimelineError
            As `selected_tasks`.
        """
        from pipesim.utils.packages import pandas as pd

        selection = self._selected()
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

    def _update(self, content: _Content) -> None:
        self._content = content
        self._updates.put(content)

    def _send_content(self, content: _Content) -> None:
        """Pack items, and send them to the page; this may be in the thread of a timer."""
        title = self._title
        if title is None and content.n_appended:
            title = item_name(next(iter(content.items.values())))
        _, document = packed_page(content.items, title=title, layout=self._arrangement)
        with self.hold_sync():
            self.version += 1
            self._sent = (self.version, list(content.items.values()))
            self.n_left_out = content.n_left_out
            self.document = document
            self.selection = {}

    def _selected(self) -> Selection | None:
        """Return what is selected; None for a selection in an earlier document."""
        version, items = self._sent
        values = dict(self.selection)
        return find_selection(items, values) if values.get("version") == version else None


def _checked(items: Items) -> _Content:
    """Return items by name; of equal names, later ones get a number."""
    pairs = named_items(items)
    check_size(pairs)
    named: dict[str, Showable] = {}
    for name, item in pairs:
        number, unique = 1, name
        while unique in named:
            number += 1
            unique = f"{name} ({number})"
        named[unique] = item
    return _Content(named)


def _no_tasks() -> pd.DataFrame:
    from pipesim.utils.packages import pandas as pd

    return pd.DataFrame(columns=list(COLUMNS), index=pd.RangeIndex(0, name="task"))
