"""The command that shows files as an interactive page in a browser."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from pathlib import Path

from pipesim.analysis.compare import Comparison
from pipesim.cli.view_files import TRACE_FLAGS, ViewOptions, is_page, read_items, stem
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, CostsError, PipeError
from pipesim.graph.verify import verify
from pipesim.plot.page.save import Showable, to_html
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.timeline import Timeline
from pipesim.utils.units import format_decimal, format_time

#: Variables of which Linux sets one where a browser can open a window, or which names a browser.
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")


def view(args: argparse.Namespace) -> None:
    """Write a page of files and open it; print its path, and a line on each timeline."""
    trace = {name: getattr(args, flag[2:]) for name, flag in TRACE_FLAGS.items()}
    options = ViewOptions(
        costs=None if args.costs is None else Costs.load(args.costs),
        trace={name: value for name, value in trace.items() if value is not None},
    )
    first, *others = map(Path, args.files)
    default = f"{stem(first)}-and-{len(others)}-more" if others else stem(first)
    path = page_target(args.out, f"{default}.html")
    title = args.title or (None if others else stem(first))
    try:
        items = read_items(args.files, options)
        to_html(path, items, title=title, layout=args.layout)
    except CostsError as error:
        if options.costs is None:
            raise
        raise CostsError(f"{args.costs}: {error}") from error
    print(path, *(f"{name}: {_summary(item)}" for name, item in items.items()), sep="\n")
    if not args.no_open:
        sys.stdout.flush()  # a text browser blocks until the user leaves it
        open_page(path)


def page_target(out: Path | None, default: str) -> Path:
    """Return the path of a page to write: ``out``, or ``default`` if that replaces nothing else."""
    if out is not None:
        return out
    path = Path(default)
    if os.path.lexists(path) and not is_page(path):
        raise ArgumentError(
            f"{path} exists, and is no page of pipesim; name the page with --out, which replaces a "
            "file"
        )
    return path


def open_page(path: Path) -> bool:
    """Open a page in the user's browser; return whether there is one."""
    if sys.platform.startswith("linux") and not any(map(os.environ.get, _DISPLAYS)):
        return False  # Python would start a text browser such as w3m
    try:
        return webbrowser.open(path.resolve().as_uri())
    except webbrowser.Error:  # such as a BROWSER that is not installed
        return False


def size_text(path: Path) -> str:
    """Return the size of a file as text."""
    return format_decimal(path.stat().st_size, "B")


def _summary(item: Showable) -> str:
    """Return numbers of tasks and devices, and the makespan, as text."""
    if isinstance(item, Comparison):
        return (
            f"{_counts(item.measured)}, makespan {format_time(item.predicted.makespan)} predicted, "
            f"{format_time(item.measured.makespan)} measured ({item.makespan_error:+.1%})"
        )
    if isinstance(item, Timeline):
        return f"{_counts(item)}, makespan {format_time(item.makespan)}"
    assert isinstance(item, Schedule)
    counts = f"{len(item)} actions, {item.n_devices} devices"
    try:
        verify(item)
    except PipeError as error:
        return f"{counts}; it cannot run: {str(error).splitlines()[0].partition(';')[0]}"
    return f"{counts}, an action a clock cycle (--costs simulates it)"


def _counts(timeline: Timeline) -> str:
    """Return the numbers of tasks and devices as text."""
    ran = "" if timeline.complete else f", of which {int(timeline.ran.sum())} ran"
    return f"{len(timeline)} tasks{ran}, {timeline.n_devices} devices"
