"""`to_html`: write timelines, comparisons, schedules and graphs as one page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipesim.analysis.compare import Comparison
from pipesim.analysis.configurations import configuration
from pipesim.errors import (
    ArgumentError,
    CapacityError,
    PipeError,
    check_count,
    check_name,
    check_text,
)
from pipesim.graph.graph import TaskGraph
from pipesim.plot.page.document import LAYOUTS, Panel, Track, packed_document
from pipesim.plot.page.html import page_html
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import check_path, write_text

#: What a page shows.
Showable = Timeline | Comparison | Schedule | TaskGraph
#: Most tasks of all timelines of a page.
MAX_TASKS = 5_000_000


def to_html(
    path: Path | str,
    items: Showable | Sequence[Showable] | Mapping[str, Showable],
    *,
    title: str | None = None,
    layout: str = "stack",
    microbatches: Iterable[int] = (),
) -> None:
    """Write an interactive page: one HTML file that works without a server and a network.

    It has the tasks of each device over time, with zoom and search, and memory. It shows the chain
    that led to each task, and the causes of idle time. Sliders simulate changes of durations and of
    the network in the page. Figures can be exported for papers.
    docs/how_to/explore_a_timeline.md describes the page.

    Parameters
    ----------
    path
        A file that ends in ``.html`` or ``.htm``.
    items
        A timeline, a `Comparison` (predicted over measured), a schedule (an action a clock cycle)
        or a task graph (a task a level); or several, in a list or by name.
    title
        Title of the page; by default the names of the items.
    layout
        ``"stack"`` shows several items below each other on one time axis; ``"steps"`` shows one
        at a time, which a slider chooses.
    microbatches
        Other numbers of micro-batches that a slider of the page can choose, for timelines of named
        schedules. Their graphs are stored in the page.

    Raises
    ------
    CapacityError
        If the items have over 5,000,000 tasks together.

    See Also
    --------
    pipesim.widget : Show the page in a notebook, linked to Python.
    pipesim.Timeline.to_html : Write a page of one timeline.
    pipesim.compare : Compare timelines in a table.
    pipesim.Timeline.plot : Draw a figure for a paper.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", 2, 2))
    >>> fast, slow = (ps.simulate(graph, ps.Costs(1, backward)) for backward in (2, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ps.to_html(f"{folder}/steps.html", {"fast": fast, "slow": slow})
    ...     [path.name for path in pathlib.Path(folder).iterdir()]
    ['steps.html']
    """
    path = page_path("path", path)
    name, data = packed_page(items, title=title, layout=layout, microbatches=microbatches)
    write_text(path, page_html(name, data))


def page_path(name: str, value: object) -> Path:
    """Return the path of a page, which a user gave as argument ``name``."""
    path = check_path(name, value, "write")
    if path.suffix.lower() not in (".html", ".htm"):
        raise ArgumentError(f"{name}: a page's file ends in .html or .htm, got {path}")
    return path


def packed_page(
    items: Showable | Sequence[Showable] | Mapping[str, Showable],
    *,
    title: str | None = None,
    layout: str = "stack",
    microbatches: Iterable[int] = (),
) -> tuple[str, bytes]:
    """Return title and packed document of a page; arguments and errors are those of `to_html`."""
    check_name("layout", layout, LAYOUTS)
    named = named_items(items)
    counts = _counts(microbatches)
    check_size(named)
    panels = [_panel(name, item, counts) for name, item in named]
    if title is not None:
        check_text("title", title)
    else:
        names = [name for name, _ in named]
        title = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return title, packed_document(title, layout, panels)


def named_items(items: object) -> list[tuple[str, Showable]]:
    """Return items with their names."""
    pairs: list[tuple[str, object]]
    if isinstance(items, Mapping):
        pairs = [(str(name), item) for name, item in items.items()]
    elif isinstance(items, list | tuple):
        pairs = [(_name(item), item) for item in items]
    else:
        pairs = [(_name(items), items)]
    if not pairs:
        raise ArgumentError("items: a page needs a timeline, comparison, schedule or graph")
    named: list[tuple[str, Showable]] = []
    for name, item in pairs:
        if not isinstance(item, Showable):
            raise ArgumentError(
                f"items: {name!r} is a {type(item).__name__}; a page shows a Timeline, Comparison, "
                "Schedule or TaskGraph, or several in a list or by name"
            )
        named.append((name, item))
    return named


def _counts(microbatches: object) -> list[int]:
    """Return numbers of micro-batches."""
    if not isinstance(microbatches, Iterable) or isinstance(microbatches, str | bytes | Mapping):
        raise ArgumentError(
            f"microbatches must be numbers of micro-batches, such as [4, 16], got {microbatches!r}"
        )
    return [check_count("microbatches", count) for count in microbatches]


def _name(item: object) -> str:
    """Return the name of an item."""
    named = item.measured if isinstance(item, Comparison) else item
    return str(getattr(named, "name", type(item).__name__))


def _contents(item: Showable) -> list[Track]:
    """Return the timelines of an item, with their roles."""
    if isinstance(item, Comparison):
        return [Track("predicted", item.predicted), Track("measured", item.matched)]
    return [Track("", item)]


def check_size(named: Sequence[tuple[str, Showable]]) -> None:
    """Raise `CapacityError` for more tasks than a page shows."""
    total = 0
    for _, item in named:
        total += sum(len(track.content) for track in _contents(item))
    if total > MAX_TASKS:
        raise CapacityError(
            f"a page of {total:,} tasks would have about {total * 6e-6:,.0f} MB, and no browser "
            f"shows it well; a page has at most {MAX_TASKS:,} tasks. Show fewer micro-batches, as "
            "the steady state repeats itself, or one replica; timeline.plot() draws any number of "
            "tasks, and timeline.frame has their times"
        )


def _panel(name: str, item: Showable, counts: Sequence[int]) -> Panel:
    """Return the panel of an item."""
    variants: dict[int, Timeline] = {}
    if counts:
        first = _contents(item)[0].content
        if not isinstance(first, Timeline):
            raise ArgumentError(
                f"microbatches: {name!r} is a {type(first).__name__}, and only timelines of named "
                "schedules have other numbers of micro-batches"
            )
        variants = _variants(name, first, counts)
    return Panel(name, _contents(item), variants)


def _variants(name: str, timeline: Timeline, counts: Sequence[int]) -> dict[int, Timeline]:
    """Return the same configuration with other numbers of micro-batches of the same size."""
    try:
        start = configuration(timeline)
        changed = {count: start.with_n_microbatches(count) for count in counts}
    except PipeError as error:
        raise ArgumentError(f"microbatches of {name!r}: {error}") from error
    present = start.schedule.n_microbatches
    return {
        count: predict_timeline(other.graph(), other.costs)
        for count, other in changed.items()
        if count != present
    }
