"""`TimelineWidget`: the page as a widget; the only file that loads anywidget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import anywidget
import traitlets

from pipesim.analysis.compare import Comparison
from pipesim.errors import ArgumentError, check_count, check_name, check_text
from pipesim.plot.page.document import LAYOUTS
from pipesim.plot.page.html import widget_program
from pipesim.plot.page.save import Showable, check_size, named_items, packed_page
from pipesim.plot.widget.latest_value import LatestValue
from pipesim.plot.widget.selection import (
    Selection,
    chain_rows,
    find_selection,
    gap_rows,
    task_rows,
)

if TYPE_CHECKING:
    import pandas as pd


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

        Raises
        ------
        CapacityError
            If they have over 5,000,000 tasks together.
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

        Raises
        ------
        CapacityError
            If the items have over 5,000,000 tasks together.
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
        return task_rows(self._selected())

    def chain(self) -> pd.DataFrame:
        """Return the chain of tasks that led to the selected task, or to the end of the gap.

        Each task waited for the one before it. The columns are those of `Timeline.frame`, and
        ``waited_for``, as in `Timeline.critical_path`. No rows if nothing is selected.

        Raises
        ------
        TimelineError
            As `selected_tasks`, and if tasks waited for each other in a circle.
        """
        return chain_rows(self._selected())

    def selected_gap(self) -> pd.DataFrame:
        """Return the selected idle gap: ``device``, ``start``, ``end`` and its causes (s).

        The columns of causes are those of `pipesim.analysis.idle.idle_by_cause`. No rows if no gap
        is selected.

        Raises
        ------
        TimelineError
            As `selected_tasks`.
        """
        return gap_rows(self._selected())

    def _update(self, content: _Content) -> None:
        self._content = content
        self._updates.put(content)

    def _send_content(self, content: _Content) -> None:
        """Pack items, and send them to the page; this may be in the thread of a timer."""
        title = self._title
        if title is None and content.n_appended:
            title = _own_name(next(iter(content.items.values())))
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


def _own_name(item: Showable) -> str:
    """Return the name of an item's timeline, schedule or graph."""
    return item.measured.name if isinstance(item, Comparison) else item.name
