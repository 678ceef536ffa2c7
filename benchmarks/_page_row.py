"""One row of ``benchmarks/page.py``: what is to be measured, and the process that measures it."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import _chromium
import _machine as machine
from _chromium import Tab, TooSlow, tab
from _page_tools import Perfetto, PipesimPage, Plotly, Seconds, Tool

import pipesim as ps
from pipesim.simulation import LogNormal

#: Parts of the step in view; the last is given as tasks of a device.
ZOOMS = {"whole": 1.0, "tenth": 0.1, "hundredth": 0.01, "20 tasks": None}
_N_TASKS = 20
#: Seconds from which something is done only once.
_SLOW = 30.0
#: Times of draws are means of so many, and their medians are of so many means.
_BATCH, _BATCHES = 5, 12
#: Move and draw, then read a pixel, which makes Chromium fill the canvas; ms of each.
_DRAWS = f"""(() => {{
  const {{ view }} = pipesimPage, context = view.base.getContext("2d"), batches = [];
  view.setTimes(FROM, TO);
  for (let k = 0; k < {_BATCHES}; k++) {{
    let draw = 0, fill = 0;
    for (let j = 0; j < {_BATCH}; j++) {{
      const start = performance.now();
      view.pan((j % 2 ? -1 : 1) * view.base.clientWidth / 100);
      view.draw();
      const middle = performance.now();
      context.getImageData(0, 0, 1, 1);
      [draw, fill] = [draw + middle - start, fill + performance.now() - middle];
    }}
    batches.push([draw / {_BATCH}, fill / {_BATCH}]);
  }}
  return batches;
}})()"""
#: Type other bandwidths into "What if"; ms to the end of the frame that shows each. Null where the
#: page refuses to simulate. A change is simulated in the next frame and drawn in the one after.
_WHAT_IF = """(async () => {
  document.querySelector("#tab-whatif").click();
  const input = document.querySelector("#bandwidth + input"), times = [];
  for (const factor of input ? ["2", "0.5", "1"] : []) {
    const start = performance.now(), { nFrames } = pipesimPage.view;
    input.value = factor;
    input.dispatchEvent(new Event("input", { bubbles: true }));
    while (pipesimPage.view.nFrames === nFrames) await new Promise(requestAnimationFrame);
    await new Promise((done) => setTimeout(done));
    times.push(performance.now() - start);
  }
  return times.length ? times : null;
})()"""
#: Keys of the layers: messages, arrows, causes of idle time, bytes, critical path.
_KEYS = "mxibc"


@dataclass(frozen=True)
class PageCase:
    """A timeline in a tool; the tool is "pipesim", "plotly" or "perfetto"."""

    tool: str
    n_devices: int
    n_microbatches: int
    has_noise: bool = False
    n_opens: int = 5
    limit: float = 60.0
    place: str = ""

    @property
    def n_tasks(self) -> int:
        """F and B; SEND and RECV of both between neighbours; one STEP a stage."""
        p, m = self.n_devices, self.n_microbatches
        return 2 * p * m + 4 * (p - 1) * m + p

    def share(self, zoom: str) -> float:
        """Return the part of the step in view."""
        return ZOOMS[zoom] or min(1.0, _N_TASKS / (2 * self.n_microbatches))


@dataclass
class PageResult:
    """Seconds and bytes; lists have a value an open, dictionaries one a zoom.

    Attributes
    ----------
    write, nbytes
        Seconds to write the file, of the wall and the CPU, and its bytes. The first is the first
        call in its process.
    program_bytes
        Bytes of the tool's program that are not in the file.
    first
        Seconds from the navigation to the first picture, and those of the CPU until then.
    heap, renderer
        Bytes of JavaScript, and anonymous bytes of the page's process.
    draw, fill
        Milliseconds of `draw`, and of filling the canvas after it: lanes of compute alone.
    own_frames
        Milliseconds between frames while the view moves: mean, 95th percentile, and of the CPU.
    frames
        The same with lanes of messages, which all tools show.
    all_draw, all_frames
        ``draw`` and ``fill`` together, and ``own_frames``, with all layers.
    what_if
        Seconds of a simulation in the page.
    stopped
        What took longer than the limit; "" if nothing did.
    pace, load
        Seconds of an addition in Python, and processes that wait for a core, before the row.
    """

    write: list[Seconds] = field(default_factory=list)
    nbytes: int = 0
    program_bytes: int = 0
    first: list[Seconds] = field(default_factory=list)
    heap: list[int] = field(default_factory=list)
    renderer: list[int] = field(default_factory=list)
    draw: dict[str, float] = field(default_factory=dict)
    fill: dict[str, float] = field(default_factory=dict)
    own_frames: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    frames: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    all_draw: dict[str, float] = field(default_factory=dict)
    all_frames: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    what_if: float | None = None
    stopped: str = ""
    pace: float = 0.0
    load: float = 0.0


def timeline_of(case: PageCase) -> ps.Timeline:
    """Return a new timeline of 1F1B: F 1 ms, B 2 ms, messages of 4 MiB, noise of 5 %."""
    graph = ps.lower(ps.schedule("1f1b", case.n_devices, case.n_microbatches))
    costs = ps.Costs(
        forward=1e-3,
        backward=2e-3,
        optimizer_step=1e-3,
        output_bytes=4 << 20,
        activation_bytes=64 << 20,
        parameter_bytes=256 << 20,
        network=ps.Network(latency=20e-6, bandwidth=25e9),
    )
    noise = ps.Noise(task=LogNormal(0.05), seed=0) if case.has_noise else None
    return ps.simulate(graph, costs, noise=noise)


def measure(case: PageCase) -> PageResult:
    """Be the process of one row."""
    result = PageResult(pace=machine.pace(), load=os.getloadavg()[0])
    tools: dict[str, Callable[[], Tool]] = {
        "pipesim": PipesimPage,
        "plotly": partial(Plotly, case.place),
        "perfetto": partial(Perfetto, Path(case.place)),
    }
    with tempfile.TemporaryDirectory(prefix="pipesim-page-") as folder:
        tool = tools[case.tool]()
        path = Path(folder) / f"timeline{tool.ending}"
        try:
            makespan = _write(tool, case, path, result)
            _open(tool, case, path, result, makespan)
        except TooSlow:
            result.stopped = "to show" if result.nbytes else "to write"
    return result


def _write(tool: Tool, case: PageCase, path: Path, result: PageResult) -> float:
    """Write the file of new timelines; return the makespan."""
    while len(result.write) <= case.n_opens:
        timeline = timeline_of(case)
        result.write.append(tool.write(timeline, path, case.limit))
        if result.write[0].wall > _SLOW:
            break
    result.nbytes = path.stat().st_size
    return timeline.makespan


def _open(tool: Tool, case: PageCase, path: Path, result: PageResult, makespan: float) -> None:
    """Open the file again and again, and move the view in the last page."""
    with _chromium.start() as browser, tool.serve(path) as url:
        open_tab = partial(tab, browser, url, ready=tool.ready, limit=case.limit)
        for k in range(case.n_opens):
            with open_tab(prepare=tool.prepare) as (opened, first):
                result.first.append(Seconds(tool.first(opened, first), opened.cpu()))
                result.heap.append(opened.heap())
                result.renderer.append(opened.renderer())
                result.program_bytes = tool.program_bytes
                if k + 1 == case.n_opens or first > _SLOW:
                    return _move(tool, case, opened, result, makespan)


def _move(tool: Tool, case: PageCase, opened: Tab, result: PageResult, makespan: float) -> None:
    """Measure frames at each zoom, in the middle of the step."""
    views = {}
    for zoom in ZOOMS:
        half = case.share(zoom) / 2
        views[zoom] = ((0.5 - half) * makespan, (0.5 + half) * makespan)
    if isinstance(tool, PipesimPage):
        for zoom, view in views.items():
            result.own_frames[zoom] = _frame_times(tool.frames(opened, *view))
            result.draw[zoom], result.fill[zoom] = _draws(opened, *view)
        times = opened.run(_WHAT_IF)
        result.what_if = times and statistics.median(times) / 1000
        _press(opened)
        for zoom, view in views.items():
            result.all_frames[zoom] = _frame_times(tool.frames(opened, *view))
            result.all_draw[zoom] = sum(_draws(opened, *view))
        _press(opened)
    tool.show_messages(opened)
    for zoom, view in views.items():
        result.frames[zoom] = _frame_times(tool.frames(opened, *view))


def _press(opened: Tab) -> None:
    """Show all layers, or hide them."""
    opened.page.locator("canvas").first.focus()
    for key in _KEYS:
        opened.page.keyboard.press(key)


def _draws(opened: Tab, start: float, end: float) -> tuple[float, float]:
    """Return milliseconds to draw, and to fill the canvas."""
    batches: list[Any] = opened.run(_DRAWS.replace("FROM", str(start)).replace("TO", str(end)))
    draw, fill = (statistics.median(column) for column in zip(*batches, strict=True))
    return draw, fill


def _frame_times(moved: tuple[list[float], float]) -> tuple[float, float, float]:
    """Return mean and 95th percentile of the ms between frames, and the ms of the CPU of each."""
    stamps, cpu = moved
    between = sorted(b - a for a, b in pairwise(stamps))
    return statistics.mean(between), between[int(0.95 * (len(between) - 1))], cpu
