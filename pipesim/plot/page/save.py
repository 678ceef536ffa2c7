"""`to_html`: write timelines, comparisons, schedules and graphs as one page.

A page is one HTML file: styles, scripts and data are inside, nothing is loaded. A
content-security policy admits two scripts by their hashes: a short one that decompresses the
program, and the program. No request leaves the page.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
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
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import check_path, write_text

# The HTML of a page

#: Text near the beginning of each page that tells it from other HTML.
PAGE_MARK = 'id="pipesim-page"'
_IMPORT = re.compile(r'^import [^;]*?"([./\w]+)\.js";\n', re.MULTILINE)
#: Digits of bytes as text. None of them means anything in HTML or JSON.
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%,()*+-;.=/?@^_:{|}~"
#: Those of `base64.b85encode` in the same order.
_B85_DIGITS = (
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
)
#: Decode and decompress the program, and run it. Missing digits at the end are the last one.
_LOADER = (
    'const text=document.getElementById("pipesim-program").textContent;'
    "const n=text.length-Math.ceil(text.length/5),bytes=new Uint8Array(n+4);"
    "const view=new DataView(bytes.buffer);"
    f'const digits="{_DIGITS}";'
    "for(let k=0,at=0;k<text.length;k+=5,at+=4){let number=0;"
    'for(let j=k;j<k+5;j++)number=85*number+digits.indexOf(text[j]??"~");'
    "view.setUint32(at,number);}"
    "const stream=new Blob([bytes.subarray(0,n)]).stream()"
    '.pipeThrough(new DecompressionStream("deflate"));'
    'const script=document.createElement("script");'
    'script.type="module";'
    "script.textContent=await new Response(stream).text();"
    "document.head.append(script);"
)
_HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src {hashes}; \
style-src {style}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<div {mark}{embedded}>{title}. This page needs JavaScript, and a browser with \
DecompressionStream: Chrome 80, Firefox 113, Safari 16.4 or newer.</div>
<script type="text/plain" id="pipesim-data">{data}</script>
<script type="text/plain" id="pipesim-program">{program}</script>
<script type="module">{loader}</script>
</body>
</html>
"""
_CSS = "html,body,#pipesim-page{height:100%;margin:0}"


@cache
def program(main: str = "controls/page") -> str:
    """Return module ``main`` and those that it imports as one, each after its imports."""
    texts: dict[str, str] = {}
    _add_module(main, texts)
    return "".join(texts.values())


def _add_module(name: str, texts: dict[str, str]) -> None:
    """Add a module to ``texts`` without imports, exports and lines of comments."""
    text = resources.files(__package__).joinpath(f"program/{name}.js").read_text(encoding="utf-8")
    for path in _IMPORT.findall(text):
        imported = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        if imported not in texts:
            _add_module(imported, texts)
    text = _IMPORT.sub("", text)
    text = re.sub(r"^export ", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*/\*\*.*?\*/\n", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\s*//.*\n", "", text, flags=re.MULTILINE)
    texts[name] = re.sub(r"^[ \n]+", "", text, flags=re.MULTILINE)


def page_html(title: str, data: bytes, *, embedded: bool = False) -> str:
    """Return a page of a packed document.

    With ``embedded`` it is a part of another page, which the wheel scrolls.
    """
    code = program() + "start();\n"
    return _HTML.format(
        hashes=" ".join(f"'sha256-{_digest(text)}'" for text in (_LOADER, code)),
        style=f"'sha256-{_digest(_CSS)}'",
        title=escape(title),
        mark=PAGE_MARK,
        css=_CSS,
        embedded=" data-embedded" if embedded else "",
        data=_text(data),
        program=_text(zlib.compress(code.encode(), 9)),
        loader=_LOADER,
    )


def widget_program() -> str:
    """Return the program as a module for anywidget."""
    return program("controls/widget") + "export default { render };\n"


def _digest(text: str) -> str:
    """Return the hash of a script as a content-security policy has it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _text(data: bytes) -> str:
    """Return bytes as text of 85 digits: four bytes are five of them."""
    return base64.b85encode(data).translate(_TO_DIGITS).decode("ascii")


_TO_DIGITS = bytes.maketrans(_B85_DIGITS, _DIGITS.encode())


# What a page shows

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
    pipesim.plot.widget : Show the page in a notebook, linked to Python.
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
    ...     ps.plot.to_html(f"{folder}/steps.html", {"fast": fast, "slow": slow})
    ...     [path.name for path in pathlib.Path(folder).iterdir()]
    ['steps.html']
    """
    path = page_path("path", path)
    name, data = packed_page(items, title=title, layout=layout, microbatches=microbatches)
    write_text(path, page_html(name, data))


def item_to_html(
    item: Showable,
    path: Path | str,
    *,
    title: str | None = None,
    layout: str = "stack",
    microbatches: Iterable[int] = (),
) -> None:
    """Write an interactive page of this object alone; see `pipesim.plot.to_html`.

    Parameters
    ----------
    path
        File that ends in ``.html`` or ``.htm``.
    title
        Title of the page; by default the name of the object.
    layout
        Place of the panels, of which a comparison has several.
    microbatches
        Other numbers of micro-batches that a slider of the page can choose, for timelines of named
        schedules and comparisons of them.
    """
    to_html(path, item, title=title, layout=layout, microbatches=microbatches)


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
    if not isinstance(microbatches, Iterable) or isinstance(microbatches, str | bytes | Mapping):
        raise ArgumentError(
            f"microbatches must be numbers of micro-batches, such as [4, 16], got {microbatches!r}"
        )
    counts = [check_count("microbatches", count) for count in microbatches]
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
        pairs = [(item_name(item), item) for item in items]
    else:
        pairs = [(item_name(items), items)]
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


def item_name(item: object) -> str:
    """Return the name of an item: of a comparison, that of the measured timeline."""
    named = item.measured if isinstance(item, Comparison) else item
    return str(getattr(named, "name", type(item).__name__))


def _contents(item: Showable) -> list[Track]:
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
