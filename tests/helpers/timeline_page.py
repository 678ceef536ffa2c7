"""An open page of a timeline: where tasks are by the arrays, and what the page says is there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from browser import Pages

import pipesim as ps

if TYPE_CHECKING:
    from playwright.sync_api import Page


class TimelinePage(NamedTuple):
    """A page in Chromium."""

    page: Page

    @property
    def state(self) -> dict[str, Any]:
        """What the page shows, after the frames that are due."""
        script = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))"
        self.page.evaluate(script)
        state: dict[str, Any] = self.page.evaluate("pipesimPage.describe()")
        return state

    def place(
        self,
        timeline: ps.Timeline,
        task: int,
        role: str = "",
        state: dict[str, Any] | None = None,
    ) -> tuple[float, float] | None:
        """Return the middle of a task on the canvas by the timeline's arrays; None if out of view.

        Long tasks count by their part in view.
        """
        state, graph = state or self.state, timeline.graph
        size = state["size"]
        left, right = size["gutter"], size["width"] - size["right"]
        scale = (right - left) / (state["to"] - state["from"])
        x0, x1 = (
            left + (t - state["from"]) * scale for t in (timeline.start[task], timeline.end[task])
        )
        x0, x1 = max(x0, left), min(x1, right)
        device, stream = graph.streams[graph.stream[task]]
        rows = [
            row
            for row in state["rows"]
            if row["type"] == "lane"
            and (row["device"], row["stream"], row["role"]) == (device, stream, role)
        ]
        if x1 - x0 < 1 or not rows:
            return None
        y = rows[0]["y"] + rows[0]["height"] / 2
        if not size["top"] < y < size["height"] - size["bottom"]:
            return None
        return (x0 + x1) / 2, y

    def point(self, x: float, y: float) -> None:
        """Move the pointer to a place of the canvas."""
        box = self.canvas.bounding_box()
        assert box is not None
        self.page.mouse.move(box["x"] + x, box["y"] + y)

    def click(self, x: float, y: float) -> None:
        """Click on a place of the canvas."""
        self.point(x, y)
        self.page.mouse.down()
        self.page.mouse.up()

    @property
    def canvas(self) -> Any:
        """The canvas that the tasks are drawn on."""
        return self.page.locator("canvas").first

    @property
    def tip(self) -> str:
        """The text beside the pointer, "" if there is none."""
        tip = self.page.locator(".tip")
        return tip.inner_text() if tip.is_visible() else ""

    def check_pointer(self, timeline: ps.Timeline, role: str = "", n: int = 12) -> int:
        """Point at tasks in view and check what the page says; return how many there were."""
        n_found, state = 0, self.state
        tasks = np.random.default_rng(0).permutation(len(timeline))
        for task in tasks.tolist():
            place = self.place(timeline, task, role, state)
            if place is None:
                continue
            self.point(*place)
            name = str(timeline.graph.task(task))
            assert name + "," in self.tip, (name, self.tip, place)
            n_found += 1
            if n_found == n:
                break
        return n_found


def open_timeline(
    open_page: Pages,
    folder: Path,
    items: Any,
    *,
    options: dict[str, Any] | None = None,
    **context: Any,
) -> TimelinePage:
    """Write a page and open it; ``context`` are options of `Pages`, ``options`` of `to_html`."""
    path = folder / "page.html"
    ps.plot.to_html(path, items, **(options or {}))
    context.setdefault("viewport", {"width": 1200, "height": 700})
    page = open_page(path, **context)
    deadline = time.monotonic() + 20
    while not page.evaluate("!!globalThis.pipesimPage && pipesimPage.view.nFrames > 0"):
        assert time.monotonic() < deadline, page.locator("body").inner_text()[:300]
        time.sleep(0.01)
    return TimelinePage(page)
