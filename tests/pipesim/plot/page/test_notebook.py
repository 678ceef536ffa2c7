"""The page in a frame of a notebook: in hosts with the rules of VS Code and Colab, and its size."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from browser import Pages
from html_cells import parsed
from notebook_hosts import VS_CODE, framed_html, host_html

import pipesim as ps
from pipesim.ops import COMPUTE
from pipesim.plot.html import frame_html, mimebundle

if TYPE_CHECKING:
    from playwright.sync_api import Frame, Page

TIMELINE = ps.simulate(ps.lower(ps.schedule("1f1b", 4, 8)), ps.Costs(forward=1e-3, backward=2e-3))
COMPARISON = ps.Comparison(TIMELINE, ps.simulate(TIMELINE.graph, ps.Costs(1.2e-3, 2e-3)))
HOSTILE = "\"'></iframe><script>attack()</script><img src=x onerror=attack()>]]>&quot;&lt;b&gt;"


@cache
def bundle_of(item: ps.Timeline | ps.Comparison) -> dict[str, str]:
    """Return all forms of an item, which take long to draw."""
    return mimebundle(item)


def open_output(open_page: Pages, folder: Path, html: str) -> tuple[Page, Frame]:
    """Open a notebook; return it and the innermost frame, in which the page is drawn."""
    path = folder / "notebook.html"
    path.write_text(html)
    page = open_page(path, viewport={"width": 1000, "height": 600})
    frame = page.main_frame
    while inner := frame.locator("iframe, canvas").first.element_handle().content_frame():
        frame = inner
    # The policy of a page forbids expressions as text, and allows functions.
    frame.locator(":root").evaluate("() => new Promise(requestAnimationFrame)")
    return page, frame


def click_task(page: Page, frame: Frame, task: int) -> str:
    """Click on a task, and return the text beside the pointer."""
    state = frame.locator(":root").evaluate("() => pipesimPage.describe()")
    box = frame.locator("canvas").first.bounding_box()
    assert box is not None
    size, middle = state["size"], (TIMELINE.start[task] + TIMELINE.end[task]) / 2
    share = (middle - state["from"]) / (state["to"] - state["from"])
    x = size["gutter"] + share * (size["width"] - size["right"] - size["gutter"])
    row = next(row for row in state["rows"] if row["device"] == TIMELINE.graph.device[task])
    page.mouse.click(box["x"] + x, box["y"] + row["y"] + row["height"] / 2)
    return str(frame.locator(".tip").inner_text())


def check_interaction(page: Page, frame: Frame) -> None:
    """Click on a task, press keys and export: the notebook gets a file, and no keys."""
    task = int(np.flatnonzero(TIMELINE.graph.is_op(COMPUTE))[20])
    assert click_task(page, frame, task).startswith(f"{TIMELINE.graph.task(task)}, ")
    page.keyboard.press("c")
    state = frame.locator(":root").evaluate("() => pipesimPage.describe()")
    assert state["selected"]["task"] == task
    assert state["show"]["critical"]
    frame.locator("#details").click()
    frame.locator("#tab-export").click()
    for kind in ("svg", "png", "csv"):
        with page.expect_download() as download:
            frame.locator(f"#save-{kind}").click()
        assert download.value.suggested_filename == f"1f1b.{kind}"
        assert download.value.failure() is None


def test_frame_under_the_rules_of_vs_code(open_page: Pages, tmp_path: Path) -> None:
    """Its policy, in a frame with its sandbox; faults, such as of the policy, fail the test."""
    page, frame = open_output(open_page, tmp_path, framed_html(TIMELINE._repr_html_(), VS_CODE))
    assert page.frames[1].locator("iframe").count() == 1
    check_interaction(page, frame)
    assert page.frames[1].evaluate("keys") == []


def test_frame_in_the_frame_of_another_origin(open_page: Pages, tmp_path: Path) -> None:
    """Such as that of Colab."""
    page, frame = open_output(open_page, tmp_path, framed_html(COMPARISON._repr_html_()))
    assert frame.locator(":root").evaluate("() => pipesimPage.panels[0].tracks.length") == 2
    frame.locator("#details").click()
    frame.locator("#tab-export").click()
    with page.expect_download() as download:
        frame.locator("#save-svg").click()
    assert download.value.failure() is None


def test_the_frame_reaches_nothing_of_the_notebook(open_page: Pages, tmp_path: Path) -> None:
    """It has an origin of its own."""
    _, frame = open_output(open_page, tmp_path, host_html(frame_html(TIMELINE)))
    reach = "() => { try { return parent.document.title; } catch (error) { return error.name; } }"
    assert frame.locator(":root").evaluate(reach) == "SecurityError"
    assert frame.locator(":root").evaluate("() => origin") == "null"


def test_the_wheel_scrolls_the_notebook(open_page: Pages, tmp_path: Path) -> None:
    """Until a click in the frame; with Ctrl it zooms."""
    page, frame = open_output(open_page, tmp_path, host_html(frame_html(TIMELINE)))

    def span() -> float:
        state = frame.locator(":root").evaluate("() => pipesimPage.describe()")
        return float(state["to"] - state["from"])

    whole = span()
    page.mouse.move(500, 300)
    page.mouse.wheel(0, 60)
    page.wait_for_function("scrollY === 60")
    assert span() == whole
    page.keyboard.down("Control")
    page.mouse.wheel(0, -60)
    page.keyboard.up("Control")
    frame.locator(":root").evaluate("() => new Promise(requestAnimationFrame)")
    closer = span()
    assert closer < whole
    page.mouse.click(500, 250)
    page.mouse.wheel(0, -60)
    frame.locator(":root").evaluate("() => new Promise(requestAnimationFrame)")
    assert span() < closer
    assert page.evaluate("scrollY") == 60


def test_names_are_text(open_page: Pages, tmp_path: Path) -> None:
    """In the attributes of the frame, in its page and in the picture's alternative text."""
    html = replace(TIMELINE, name=HOSTILE)._repr_html_()
    (element,) = parsed(html).iter("iframe")
    assert element.get("title") == HOSTILE
    page, frame = open_output(open_page, tmp_path, host_html(html))
    assert frame.locator("h1").inner_text() == HOSTILE
    for document in (page.main_frame, frame):
        assert document.locator("img[src=x]").count() == 0
    assert page.locator("iframe").count() == 1
    assert page.locator("img").get_attribute("alt").startswith(HOSTILE)


@pytest.mark.slow
@pytest.mark.parametrize("item", [TIMELINE, COMPARISON], ids=["timeline", "comparison"])
def test_mimebundle(item: ps.Timeline | ps.Comparison) -> None:
    """LaTeX and PDF by nbconvert take the PNG, as there is neither LaTeX, PDF nor SVG."""
    bundle = bundle_of(item)
    assert list(bundle) == ["text/html", "image/png", "text/plain"]
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG\r\n")
    assert bundle["text/plain"] == repr(item)
    tags = [element.tag for element in parsed(bundle["text/html"])]
    assert tags[:2] == ["iframe", "details"]
    json.dumps(bundle)
    assert item._repr_mimebundle_(include=None, exclude=None) == bundle


def test_large_timelines_have_a_picture_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipesim.plot.html.MAX_FRAMED", 2 * len(TIMELINE))
    assert frame_html(TIMELINE).startswith("<iframe")
    assert frame_html(COMPARISON).startswith("<iframe")
    monkeypatch.setattr("pipesim.plot.html.MAX_FRAMED", 2 * len(TIMELINE) - 1)
    html = COMPARISON._repr_html_()
    assert frame_html(TIMELINE).startswith("<iframe")
    assert "iframe" not in html
    assert ".to_html(&quot;timeline.html&quot;)" in html
    assert [element.tag for element in parsed(html)][:2] == ["p", "details"]


def test_a_saved_notebook_is_small() -> None:
    """About 48 kB of page, and the picture twice: in HTML and for PDF."""
    assert len(frame_html(TIMELINE)) < 60_000
    assert len(json.dumps(bundle_of(TIMELINE))) < 180_000
