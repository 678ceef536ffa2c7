"""Pages in a real browser: what they show equals the arrays, whatever is done to the view."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import Pages
from PIL import Image
from timeline_page import TimelinePage, open_timeline

import pipesim as ps
from pipesim.plot.palette import PALETTE
from pipesim.simulation import LogNormal

COSTS = ps.Costs(
    forward=1e-3, backward=2.1e-3, output_bytes=4e6, activation_bytes=2e8, parameter_bytes=1e9,
    optimizer_step=4e-4, network=ps.Network(latency=2e-5, bandwidth=2e10),
)  # fmt: skip
GRAPH = ps.lower(ps.schedule("1f1b", 4, 8))
TIMELINE = ps.simulate(GRAPH, COSTS)
MEASURED = ps.simulate(GRAPH, COSTS, noise=ps.Noise(task=LogNormal(0.1), seed=1))


def text_of(page: TimelinePage, selector: str) -> str:
    """Return the text of an element."""
    return str(page.page.locator(selector).inner_text())


def test_pointer_finds_tasks_after_every_change_of_view(open_page: Pages, tmp_path: Path) -> None:
    page = open_timeline(open_page, tmp_path, TIMELINE)
    assert page.check_pointer(TIMELINE) == 12
    page.page.keyboard.press("m")  # lanes of messages
    assert page.check_pointer(TIMELINE) == 12
    whole = page.state
    page.point(500, 150)
    page.canvas.focus()
    for key in "ww":
        page.page.keyboard.press(key)
    closer = page.state
    assert closer["to"] - closer["from"] == pytest.approx((whole["to"] - whole["from"]) / 1.4**2)

    # The time under the pointer keeps its place.
    def time_at(state: dict[str, Any]) -> float:
        size = state["size"]
        share = (500 - size["gutter"]) / (size["width"] - size["right"] - size["gutter"])
        return float(state["from"] + share * (state["to"] - state["from"]))

    assert time_at(closer) == pytest.approx(time_at(whole))
    assert page.check_pointer(TIMELINE) > 4
    page.page.keyboard.press("d")
    assert page.state["from"] > closer["from"]
    page.page.keyboard.press("ArrowLeft")
    assert page.state["from"] == pytest.approx(closer["from"])
    box = page.canvas.bounding_box()
    assert box is not None
    page.page.mouse.move(box["x"] + 600, box["y"] + 200)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 500, box["y"] + 200, steps=4)
    page.page.mouse.up()
    moved = page.state
    assert moved["from"] > closer["from"]
    assert moved["selected"] is None  # a drag selects nothing
    page.page.mouse.wheel(0, -240)
    assert page.state["to"] - page.state["from"] < moved["to"] - moved["from"]
    assert page.check_pointer(TIMELINE) > 2
    page.page.keyboard.press("0")
    assert page.state["from"] == whole["from"]
    assert page.state["to"] == whole["to"]
    page.page.mouse.click(box["x"] + 900, box["y"] + 15)  # the minimap
    assert page.state["from"] >= whole["from"]


def test_search_and_paths(open_page: Pages, tmp_path: Path) -> None:
    page = open_timeline(open_page, tmp_path, TIMELINE)
    page.canvas.focus()
    page.page.keyboard.press("/")
    page.page.keyboard.type("1F4")
    task = next(k for k in range(len(GRAPH)) if str(GRAPH.task(k)) == "1F4")
    assert page.state["found"] == [task]
    page.page.keyboard.press("Enter")
    assert page.state["selected"]["task"] == task
    card = text_of(page, "aside")
    row = TIMELINE.frame.loc[task]
    assert "1F4 on device 1" in card
    assert (
        f"{1e3 * row['start']:.4f} ms" in card.replace("\n", " ")
        or f"{1e3 * row['start']:.3f}" in card
    )
    for word, column, value in (
        ("B", "op", "B"),
        ("device:2", "device", 2),
        ("mb:3", "microbatch", 3),
    ):
        page.page.fill("#search", word)
        expected = TIMELINE.frame.index[TIMELINE.frame[column] == value].tolist()
        assert sorted(page.state["found"]) == expected, word
    page.page.fill("#search", "<b>nothing</b>")
    assert page.state["found"] == []
    page.page.keyboard.press("Escape")
    assert page.state["selected"] is None
    page.canvas.focus()
    page.page.keyboard.press("c")
    path = page.page.evaluate("pipesimPage.chains()[0].tasks")
    assert path == TIMELINE.why.critical_path().index.tolist()
    page.page.keyboard.press("]")
    page.page.keyboard.press("]")
    assert page.state["selected"]["task"] == path[1]
    before = page.page.evaluate("pipesimPage.chain.before")
    assert before == path[:2]
    page.page.keyboard.press(".")  # the next of the lane
    lane = GRAPH.queues[int(GRAPH.stream[path[1]])].tolist()
    assert page.state["selected"]["task"] == lane[lane.index(path[1]) + 1]


def test_idle_gaps_have_their_causes(open_page: Pages, tmp_path: Path) -> None:
    page = open_timeline(open_page, tmp_path, TIMELINE)
    page.canvas.focus()
    page.page.keyboard.press("i")
    assert page.state["show"]["idle"]
    row = next(row for row in page.state["rows"] if row["device"] == 3)
    page.click(page.state["size"]["gutter"] + 10, row["y"] + row["height"] / 2)
    card = text_of(page, "aside")
    assert "Device 3 is idle" in card
    assert "warm-up" in card
    page.page.click("#tab-idle")
    table = ps_table(page)
    causes = TIMELINE.why.idle_by_cause()
    for device in range(4):
        shown = table[device][-1]
        assert float(shown.split()[0]) == pytest.approx(1e3 * causes.loc[device].sum(), rel=6e-3)


def ps_table(page: TimelinePage) -> list[list[str]]:
    """Return the cells of the table in the panel."""
    rows = page.page.locator("aside [role=tabpanel]:not([hidden]) tbody tr").all()
    return [row.locator("th,td").all_inner_texts() for row in rows]


def test_what_if_simulates_in_the_page(open_page: Pages, tmp_path: Path) -> None:
    page = open_timeline(open_page, tmp_path, TIMELINE, options={"microbatches": [4, 16]})
    page.page.click("#tab-whatif")
    page.page.fill("#op-F + input", "0.5")
    faster = ps.simulate(GRAPH, COSTS.scaled(0.5, op="F"))
    assert page.state["makespans"] == [faster.makespan]
    assert page.check_pointer(faster, n=6) == 6
    page.page.select_option("#stage", "2")
    page.page.fill("#stage-factor + input", "3")
    slow = COSTS.scaled(0.5, op="F").scaled(3, stage=2, n_stages=4)
    assert page.state["makespans"] == [ps.simulate(GRAPH, slow).makespan]
    assert "What if" in text_of(page, ".banner[role=status]")
    page.page.click("#reset")
    assert page.state["makespans"] == [TIMELINE.makespan]
    page.page.locator("#microbatches").focus()
    page.page.keyboard.press("ArrowRight")
    longer = ps.simulate(ps.lower(ps.schedule("1f1b", 4, 16)), COSTS)
    assert page.state["makespans"] == [longer.makespan]
    assert page.check_pointer(longer, n=6) == 6


def test_comparisons_show_both(open_page: Pages, tmp_path: Path) -> None:
    page = open_timeline(open_page, tmp_path, ps.Comparison(TIMELINE, MEASURED))
    assert page.check_pointer(TIMELINE, "predicted") == 12
    assert page.check_pointer(MEASURED, "measured") == 12
    task = int(np.flatnonzero(GRAPH.op == ps.Op.B)[3])
    place = page.place(MEASURED, task, "measured")
    assert place is not None
    page.click(*place)
    card = text_of(page, "aside")
    error = TIMELINE.duration[task] / MEASURED.duration[task] - 1
    assert f"{abs(100 * error):.1f}%" in card
    assert page.state["makespans"] == [TIMELINE.makespan, MEASURED.makespan]


def test_steps_and_stacks(open_page: Pages, tmp_path: Path) -> None:
    steps = {f"step {k}": ps.simulate(GRAPH, COSTS.scaled(k)) for k in (1, 2, 3)}
    page = open_timeline(open_page, tmp_path, steps, options={"layout": "steps"})
    assert page.state["makespans"] == [steps["step 1"].makespan]
    page.page.locator("#step").focus()
    page.page.keyboard.press("ArrowRight")
    assert page.state["makespans"] == [steps["step 2"].makespan]
    assert page.check_pointer(steps["step 2"], n=5) == 5
    table = ps.compare(steps, to_html=tmp_path / "all.html")
    assert len(table) == 3
    stack = open_timeline(open_page, tmp_path, steps)
    assert stack.state["makespans"] == [timeline.makespan for timeline in steps.values()]


def test_schedules_and_graphs_before_simulation(open_page: Pages, tmp_path: Path) -> None:
    schedule = ps.schedule("zbv", 4, 4)
    page = open_timeline(open_page, tmp_path, {"grid": schedule, "graph": GRAPH})
    cycles = ps.simulate(ps.lower(schedule), ps.Costs(1, input_grad=1, weight_grad=1)).makespan
    assert page.state["makespans"] == [cycles, GRAPH.levels.max() + 1]
    broken = ps.Schedule.from_orders([["0F0", "0B0"], ["1B0", "1F0"]])
    page = open_timeline(open_page, tmp_path, broken)
    assert "It cannot run" in text_of(page, "aside")


def test_unfinished_and_small_timelines(open_page: Pages, tmp_path: Path) -> None:
    end, start = TIMELINE.end.copy(), TIMELINE.start.copy()
    order = np.argsort(start)
    end[order[-4:]] = np.nan
    start[order[-3:]] = np.nan
    page = open_timeline(open_page, tmp_path, replace(TIMELINE, start=start, end=end))
    assert f"of {len(GRAPH)} tasks" in text_of(page, "aside")
    assert page.check_pointer(TIMELINE, n=8) == 8
    page.page.click("#tab-whatif")
    assert "tasks of this timeline did not run" in text_of(page, "aside")
    one = ps.simulate(ps.lower(ps.schedule("gpipe", 1, 1), forward_only=True), ps.Costs(1, 1))
    assert len(one) == 1
    page = open_timeline(open_page, tmp_path, one)
    assert page.check_pointer(one, n=1) == 1
    nothing = np.full(len(GRAPH), np.nan)
    page = open_timeline(open_page, tmp_path, replace(TIMELINE, start=nothing, end=nothing))
    assert f"0 of {len(GRAPH)}" in text_of(page, "aside")


HOSTILE = [
    "<script>alert(1)</script>", "</script><b>\"'&", "x" * 3000, "\u202eright to left שלום",
    "\u0000\u0007 \ud83d\ude00", "<!--", "a\nb",
]  # fmt: skip


def test_hostile_names_stay_text(open_page: Pages, tmp_path: Path) -> None:
    named = {name: TIMELINE.with_name(name) for name in HOSTILE}
    page = open_timeline(open_page, tmp_path, named, options={"title": HOSTILE[1]})
    assert page.page.locator("h1").inner_text() == HOSTILE[1]
    assert page.page.title() == HOSTILE[1]
    names = page.page.locator("aside h2").all_text_contents()
    assert names[0] == HOSTILE[0]
    assert page.page.locator("b").count() == 0
    page.page.click("#tab-export")
    with page.page.expect_download() as svg:
        page.page.click("#save-svg")
    ElementTree.parse(svg.value.path())
    with page.page.expect_download() as table:
        page.page.click("#save-csv")
    rows = list(csv.DictReader(io.StringIO(Path(table.value.path()).read_text())))
    assert {row["timeline"] for row in rows} >= {HOSTILE[0], HOSTILE[2]}


def test_exports(open_page: Pages, tmp_path: Path) -> None:
    page = open_timeline(open_page, tmp_path, TIMELINE)
    page.page.click("#tab-export")
    page.page.fill("#inches-wide", "3.5")
    page.page.fill("#inches-high", "1.5")
    with page.page.expect_download() as svg:
        page.page.click("#save-svg")
    root = ElementTree.parse(svg.value.path()).getroot()
    assert (root.get("width"), root.get("height")) == ("3.5in", "1.5in")
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "forward" in texts
    assert "7" in texts
    sizes = {
        float(node.get("font-size", 0)) for node in root.iter("{http://www.w3.org/2000/svg}text")
    }
    assert min(sizes) >= 6 * 96 / 72
    page.page.fill("#dpi", "200")
    with page.page.expect_download() as png:
        page.page.click("#save-png")
    with Image.open(png.value.path()) as image:
        assert image.size == (700, 300)
    with page.page.expect_download() as table:
        page.page.click("#save-csv")
    rows = list(csv.DictReader(io.StringIO(Path(table.value.path()).read_text())))
    frame = TIMELINE.frame[TIMELINE.frame["stream"] == "compute"].sort_values(
        "start", kind="stable"
    )
    assert [float(row["start"]) for row in rows] == frame["start"].tolist()
    assert {float(row["end"]) for row in rows} == set(frame["end"])
    assert {row["task"] for row in rows} == {str(GRAPH.task(k)) for k in frame.index}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_of_tasks(open_page: Pages, tmp_path: Path, scheme: str) -> None:
    page = open_timeline(open_page, tmp_path, TIMELINE, color_scheme=scheme)
    assert page.state["theme"] == scheme
    image = Image.open(io.BytesIO(page.canvas.screenshot())).convert("RGB")
    for op in (ps.Op.F, ps.Op.B):
        for task in np.flatnonzero(GRAPH.op == op)[:5].tolist():
            place = page.place(TIMELINE, task)
            assert place is not None
            x, y = place
            colour = "#" + "".join(
                f"{part:02X}" for part in image.getpixel((int(x) - 6, int(y) - 14))
            )
            assert colour == PALETTE[op]
    page.page.click("#theme")
    assert page.state["theme"] != scheme


def test_readers_of_screens_get_a_table(open_page: Pages, tmp_path: Path) -> None:
    page = open_timeline(open_page, tmp_path, TIMELINE)
    label = page.canvas.get_attribute("aria-label") or ""
    assert re.search(r"1f1b: 1f1b: 3\d\.\d ms, bubble", label)
    page.page.click("#tab-tasks")
    first = TIMELINE.frame[TIMELINE.frame["stream"] == "compute"].sort_values(
        "start", kind="stable"
    )
    assert [row[0] for row in ps_table(page)[:5]] == [str(GRAPH.task(k)) for k in first.index[:5]]
    page.page.keyboard.press("ArrowRight")  # to the next tab
    assert page.page.locator("#tab-export").get_attribute("aria-selected") == "true"


def test_ruler_measures_between_edges(open_page: Pages, tmp_path: Path) -> None:
    page = open_timeline(open_page, tmp_path, TIMELINE)
    page.page.click("#ruler")
    computes = np.flatnonzero(GRAPH.op == ps.Op.B)
    for task in (int(computes[0]), int(computes[9])):
        place, end = page.place(TIMELINE, task), TIMELINE.end[task]
        state = page.state
        size = state["size"]
        scale = (size["width"] - size["right"] - size["gutter"]) / (state["to"] - state["from"])
        assert place is not None
        page.click(size["gutter"] + (end - state["from"]) * scale - 3, place[1])
    ends = [float(TIMELINE.end[computes[k]]) for k in (0, 9)]
    assert page.state["ruler"] == ends
    assert f"{1e3 * abs(ends[1] - ends[0]):.4f} ms" in text_of(page, ".banner[role=status]")
