"""The widget of notebooks on the side of the browser: selection, keys, updates, messages."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from browser import Pages

import pipesim as ps
from pipesim.analysis.idle import causes_of_gaps
from pipesim.ops import COMPUTE
from pipesim.plot.page.save import widget_program
from pipesim.plot.widget import timeline_widget
from pipesim.plot.widget.make_widget import widget
from pipesim.plot.widget.timeline_widget import TimelineWidget

if TYPE_CHECKING:
    from playwright.sync_api import Page

GRAPH = ps.lower(ps.schedule("1f1b", 4, 8))
COSTS = ps.Costs(forward=1e-3, backward=2e-3, network=ps.Network(latency=1e-4))
TIMELINE = ps.simulate(GRAPH, COSTS)
SLOWER = ps.simulate(GRAPH, ps.Costs(forward=2e-3, backward=5e-3))

# A notebook with a model, which has the methods of anywidget's, and keeps what the page sends.
NOTEBOOK = """<!doctype html><meta charset="utf-8"><body data-jp-theme-light="%s">
<script type="module">
const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const sources = %s;
if (sources.before) new Function(sources.before)();
class Model {
  sent = [];
  listeners = new Set();
  constructor(values) { this.values = values; }
  get(name) { return this.values[name]; }
  set(name, value) { this.values[name] = value; this.changed = { ...this.changed, [name]: value }; }
  save_changes() { this.sent.push(this.changed); this.changed = {}; }
  on(event, listener) { this.listeners.add(listener); }
  off(event, listener) { this.listeners.delete(listener); }
  receive(values) {
    const { document } = values;
    Object.assign(this.values, values, { document: new DataView(bytesOf(document).buffer) });
    for (const listener of this.listeners) listener();
  }
}
const code = new Blob([bytesOf(sources.program)], { type: "text/javascript" });
const { default: view } = await import(URL.createObjectURL(code));
globalThis.model = new Model({});
model.receive(sources.state);
const el = document.createElement("div"); // in the document after it is rendered
globalThis.remove = await view.render({ model, el });
document.body.append(el);
globalThis.keys = [];
document.addEventListener("keydown", ({ key, target }) =>
  keys.push([key, target.hasAttribute("data-lm-suppress-shortcuts")]), true);
document.addEventListener("keydown", ({ key }) => keys.push(key));
globalThis.host = el.firstChild;
</script>"""


def state_of(view: TimelineWidget) -> dict[str, Any]:
    """Return the traits that the page reads, as JSON."""
    document = base64.b64encode(view.document).decode()
    names = ("height", "version", "n_left_out", "selection")
    return {"document": document, **{name: getattr(view, name) for name in names}}


def open_widget(
    open_page: Pages, folder: Path, view: TimelineWidget, *, before: str = "", dark: bool = False
) -> Page:
    """Open a page that renders a widget; ``before`` is JavaScript that runs first."""
    program = base64.b64encode(widget_program().encode()).decode()
    sources = {"program": program, "state": state_of(view), "before": before}
    path = folder / "notebook.html"
    path.write_text(NOTEBOOK % (str(not dark).lower(), json.dumps(sources)))
    page = open_page(path, viewport={"width": 1000, "height": 500})
    page.wait_for_function("globalThis.host?.isConnected")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page


def shown(page: Page) -> dict[str, Any]:
    """Return what the page in the widget shows, after its updates."""
    page.evaluate("new Promise((done) => setTimeout(done, 60))")
    state: dict[str, Any] = page.evaluate("host.pipesimPage.describe()")
    return state


def receive(page: Page, view: TimelineWidget) -> None:
    """Send the traits of a widget to the page."""
    page.evaluate("(state) => model.receive(state)", state_of(view))


def place(page: Page, timeline: ps.Timeline, time: float, device: int) -> tuple[float, float]:
    """Return the place on the screen of a time of a device."""
    state, box = shown(page), page.locator("canvas").first.bounding_box()
    assert box is not None
    size = state["size"]
    share = (time - state["from"]) / (state["to"] - state["from"])
    x = size["gutter"] + share * (size["width"] - size["right"] - size["gutter"])
    (row,) = (row for row in state["rows"] if row["device"] == device)
    return box["x"] + x, box["y"] + row["y"] + row["height"] / 2


def test_clicks_reach_python(open_page: Pages, tmp_path: Path) -> None:
    """A click on a task, on a gap, and on nothing."""
    view = widget(TIMELINE)
    page = open_widget(open_page, tmp_path, view)
    task = int(np.flatnonzero(GRAPH.is_op(COMPUTE))[17])
    middle = (TIMELINE.start[task] + TIMELINE.end[task]) / 2
    page.mouse.click(*place(page, TIMELINE, middle, int(GRAPH.device[task])))
    view.selection = page.evaluate("model.sent.at(-1).selection")
    assert view.selection["action"] == str(GRAPH.task(task))
    pd.testing.assert_frame_equal(view.selected_tasks(), TIMELINE.frame.loc[[task]])

    gaps, _ = causes_of_gaps(TIMELINE)
    k = int(np.argmax(gaps.until - gaps.since))
    middle = (gaps.since[k] + gaps.until[k]) / 2
    page.mouse.click(*place(page, TIMELINE, middle, int(gaps.device[k])))
    view.selection = page.evaluate("model.sent.at(-1).selection")
    row = view.selected_gap().iloc[0]
    assert (row["device"], row["start"], row["end"]) == (
        gaps.device[k], gaps.since[k], gaps.until[k],
    )  # fmt: skip
    assert view.selection["since"] == row["start"]

    page.keyboard.press("Escape")
    assert page.evaluate("model.sent.at(-1)") == {"selection": {}}
    n_sent = page.evaluate("model.sent.length")
    page.keyboard.press("Escape")
    assert page.evaluate("model.sent.length") == n_sent


def test_keys_are_the_page_s(open_page: Pages, tmp_path: Path) -> None:
    """Letters are no commands of the notebook; keys with Ctrl are."""
    page = open_widget(open_page, tmp_path, widget(TIMELINE))
    page.locator("canvas").first.focus()
    page.keyboard.press("m")
    assert shown(page)["show"]["messages"]
    page.keyboard.press("Control+s")
    assert page.evaluate("keys") == [
        ["m", True],  # what listens before the page knows by the attribute
        ["Control", False],
        "Control",
        ["s", False],
        "s",
    ]


def test_updates_keep_zoom_and_settings(open_page: Pages, tmp_path: Path) -> None:
    view = widget(TIMELINE)
    page = open_widget(open_page, tmp_path, view)
    assert shown(page)["to"] > TIMELINE.makespan
    view._send_content(timeline_widget._checked(SLOWER))
    receive(page, view)
    whole = shown(page)
    assert whole["to"] > SLOWER.makespan  # the whole step stays the whole step
    assert whole["makespans"] == [SLOWER.makespan]
    page.evaluate("host.pipesimPage.view.setTimes(0.004, 0.009)")
    page.locator("#show-idle").click()
    view._send_content(timeline_widget._checked(TIMELINE))
    receive(page, view)
    state = shown(page)
    assert (state["from"], state["to"]) == pytest.approx((0.004, 0.009))
    assert state["show"]["idle"]
    assert state["makespans"] == [TIMELINE.makespan]
    assert page.locator(".facts").first.inner_text().startswith("34.6 ms")


def test_steps_that_are_appended(
    open_page: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step stays the last; an earlier one stays, although others are left out."""
    monkeypatch.setattr(timeline_widget, "KEPT", 4)
    view = widget({"step 1": TIMELINE}, layout="steps")
    monkeypatch.setattr(view, "_update", lambda content: setattr(view, "_content", content))
    page = open_widget(open_page, tmp_path, view)

    def append(n: int) -> str:
        for _ in range(n):
            view.append(SLOWER)
        view._send_content(view._content)
        receive(page, view)
        shown(page)
        name: str = page.evaluate("host.pipesimPage.panels[host.pipesimPage.step].name")
        return name

    assert append(1) == "step 2"
    assert append(2) == "step 4"
    page.evaluate("host.pipesimPage.showStep(2)")
    assert append(1) == "step 3"
    assert append(1) == "step 3"
    assert append(2) == "step 5"  # those before are left out
    page.evaluate("host.pipesimPage.showStep(3)")
    assert append(1) == "step 9"


# Count the documents that a page decompresses.
COUNTER = """
globalThis.nRead = 0;
const Stream = globalThis.DecompressionStream;
globalThis.DecompressionStream = class extends Stream {
  constructor(format) {
    super(format);
    globalThis.nRead++;
  }
};"""


def test_the_last_of_many_updates_is_shown(open_page: Pages, tmp_path: Path) -> None:
    """Those that come while another is read are left out."""
    view = widget(TIMELINE)
    page = open_widget(open_page, tmp_path, view, before=COUNTER)
    states = []
    for timeline in (SLOWER, TIMELINE) * 10 + (SLOWER,):
        view._send_content(timeline_widget._checked(timeline))
        states.append(state_of(view))
    page.evaluate("(states) => states.forEach((state) => model.receive(state))", states)
    assert shown(page)["makespans"] == [SLOWER.makespan]
    assert page.evaluate("nRead") == 3  # the first document, the first update and the last
    task = 3
    middle = (SLOWER.start[task] + SLOWER.end[task]) / 2
    page.mouse.click(*place(page, SLOWER, middle, int(GRAPH.device[task])))
    view.selection = page.evaluate("model.sent.at(-1).selection")
    assert view.selected_tasks().index.tolist() == [task]


def test_height_theme_and_removal(open_page: Pages, tmp_path: Path) -> None:
    view = widget(TIMELINE, height=250)
    page = open_widget(open_page, tmp_path, view, dark=True)
    assert shown(page)["theme"] == "dark"
    assert page.evaluate("host.offsetHeight") == 250
    view.height = 300
    receive(page, view)
    assert page.evaluate("host.offsetHeight") == 300
    page.evaluate("remove()")
    assert page.evaluate("model.listeners.size") == 0


def test_names_are_text(open_page: Pages, tmp_path: Path) -> None:
    name = "</script><img src=x onerror=attack()> <b>&amp;"
    page = open_widget(open_page, tmp_path, widget({name: TIMELINE}))
    assert page.locator("h1").inner_text() == name
    assert page.locator("img").count() == 0


def test_a_browser_without_decompression(open_page: Pages, tmp_path: Path) -> None:
    view = widget(TIMELINE)
    page = open_widget(open_page, tmp_path, view, before="delete globalThis.DecompressionStream")
    text = page.evaluate("host.shadowRoot.textContent")
    assert text == "This timeline cannot be shown: the browser has no DecompressionStream."


def test_a_document_that_cannot_be_read(open_page: Pages, tmp_path: Path) -> None:
    """The page says so, and shows the next one."""
    view = widget(TIMELINE)
    page = open_widget(open_page, tmp_path, view)
    broken = {**state_of(view), "document": "AAAA", "version": 2}
    page.evaluate("(state) => model.receive(state)", broken)
    page.wait_for_function(
        "host.shadowRoot.textContent.startsWith('This timeline cannot be shown')"
    )
    assert {fault.kind for fault in open_page.take()} == {"exception"}
    page.evaluate("(state) => model.receive(state)", {**state_of(view), "version": 3})
    page.wait_for_function("!!host.shadowRoot.querySelector('h1')")
    assert "cannot be" not in page.evaluate("host.shadowRoot.textContent")
    assert shown(page)["makespans"] == [TIMELINE.makespan]
