"""`widget`: make a page of a notebook that Python updates and asks for its selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipesim.plot.page.save import Showable
from pipesim.utils.packages import import_extra

if TYPE_CHECKING:
    from pipesim.plot.widget.timeline_widget import TimelineWidget


_ADVICE = (
    "Without it, a timeline in the last line of a cell shows the same page, which does not tell "
    "Python what is selected"
)


def widget(
    items: Showable | Sequence[Showable] | Mapping[str, Showable],
    *,
    layout: str = "stack",
    height: int = 420,
    title: str | None = None,
) -> TimelineWidget:
    """Return a widget for notebooks: the page of `to_html`, linked to Python.

    `TimelineWidget.selected_tasks`, `TimelineWidget.chain` and `TimelineWidget.selected_gap` give
    what is selected in the page as tables. `TimelineWidget.show` and `TimelineWidget.append` update
    the page, during a training too::

        view = ps.plot.widget(timeline, layout="steps")
        view  # the last line of a cell shows it
        for batch in batches:
            view.append(pipeline.step(*batch).timeline)

    Parameters
    ----------
    items
        A timeline, a `Comparison`, a schedule or a task graph; or several, in a list or by name.
    layout
        ``"stack"`` shows several items below each other on one time axis; ``"steps"`` shows one
        at a time, which a slider chooses.
    height
        Height in the notebook (CSS pixels), at least 100.
    title
        Title of the page; by default the names of the items.

    Returns
    -------
    TimelineWidget
        The widget; the last line of a cell shows it.

    See Also
    --------
    pipesim.plot.to_html : Write the page to a file.
    pipesim.Timeline.plot : Draw a figure for a paper.

    Examples
    --------
    >>> import pipesim as ps
    >>> timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2)), ps.Costs(1, 2))
    >>> view = ps.plot.widget(timeline, height=300)
    >>> view
    <TimelineWidget gpipe>
    >>> len(view.selected_tasks())  # none until someone selects in the page
    0
    """
    import_extra("anywidget", "widget", "a widget", advice=_ADVICE)
    from pipesim.plot.widget.timeline_widget import TimelineWidget

    return TimelineWidget(items, layout=layout, height=height, title=title)
