"""Fixtures that open pages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from browser import Chromium, Pages, open_pages


def write(folder: Path, script: str) -> Path:
    """Write a page that sets its title, then runs a script."""
    path = folder / "page.html"
    path.write_text(f"<!doctype html><script>document.title = 'ran';\n{script}</script>")
    return path


def test_a_console(open_page: Pages, tmp_path: Path) -> None:
    """Errors and warnings are recorded; other messages are free."""
    script = "console.error('bad'); console.warn('odd'); console.log('fine')"
    page = open_page(write(tmp_path, script), color_scheme="dark", device_scale_factor=2)
    assert page.title() == "ran"
    assert page.evaluate("devicePixelRatio") == 2
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert open_page.take() == [("console error", "bad"), ("console warning", "odd")]
    assert open_page.take() == []


def test_exceptions(open_page: Pages, tmp_path: Path) -> None:
    """Those of the script, of a callback and of a promise."""
    open_page(write(tmp_path, "setTimeout('f()'); Promise.reject(new TypeError('g')); h()"))
    faults = open_page.take()
    assert {fault.kind for fault in faults} == {"exception"}
    assert sorted(fault.text.partition("\n")[0] for fault in faults) == [
        "ReferenceError: f is not defined",
        "ReferenceError: h is not defined",
        "TypeError: g",
    ]


REQUESTS = """
const blob = URL.createObjectURL(new Blob());
const addresses = ["http://example.invalid/", "other.js", "data:,", blob];
location.hash = "#view";
globalThis.loads = addresses.map((address) => new Promise((resolve) => {
  const script = document.createElement("script");
  Object.assign(script, { src: address, onload: resolve, onerror: resolve });
  document.head.append(script);
}));
"""


def test_requests(open_page: Pages, tmp_path: Path) -> None:
    """Addresses and other files are recorded; data within the page is free."""
    page = open_page(write(tmp_path, REQUESTS))
    page.evaluate("Promise.all(loads)")
    requests = [fault.text for fault in open_page.take() if fault.kind == "request"]
    assert requests == ["http://example.invalid/", (tmp_path / "other.js").as_uri()]


def test_a_fault_that_no_test_takes_fails_it(browser: Chromium, tmp_path: Path) -> None:
    with (
        pytest.raises(pytest.fail.Exception, match="console error: bad"),
        open_pages(browser) as open_page,
    ):
        open_page(write(tmp_path, "console.error('bad')"))


def test_the_next_test_may_run_an_event_loop(browser: Chromium) -> None:
    assert asyncio.run(asyncio.sleep(0, "done")) == "done"
