"""Chromium for the benchmarks of pages: its start, its clocks, and its memory."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


_COMMANDS = ("chromium", "chromium-browser", "google-chrome")
# Without the GPU, Chromium draws a canvas in its own process. Otherwise it may take SwiftShader, a
# GPU in software, whose frames take ten times as long. The other flags keep it off the network.
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
)
#: Window, in CSS pixels; a CSS pixel is a device pixel.
SIZE = {"width": 1280, "height": 800}
#: Note when a condition holds and the frame after that is drawn; ms since the navigation.
_WATCH = """(() => {
  const ready = () => { try { return Boolean(CONDITION); } catch { return false; } };
  const look = () => {
    if (!ready()) return setTimeout(look, 2);
    requestAnimationFrame(() => setTimeout(() => globalThis.firstPicture = performance.now(), 0));
  };
  look();
})();"""


class TooSlow(Exception):
    """A page took longer than its limit."""


def command() -> str | None:
    """Return the path of the machine's Chromium."""
    return next(filter(None, map(shutil.which, _COMMANDS)), None)


def missing() -> str:
    """Return why pages cannot be opened on this machine, and how to change it; else ``""``."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install -e '.[dev]' -c constraints.txt"
    if command() is None:
        return f"none of {', '.join(_COMMANDS)} is installed: apt-get install chromium"
    return ""


@contextmanager
def start() -> Iterator[Browser]:
    """Run Chromium without a window, from an empty profile in a temporary folder."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=command(), args=_FLAGS)
        yield browser
        browser.close()


class Tab:
    """A page in a context of its own; made by `tab`."""

    def __init__(self, page: Page, limit: float) -> None:
        self.page = page
        self._limit = 1000 * limit

    def run(self, script: str) -> Any:
        """Return the value of an expression; raise `TooSlow` past the limit.

        The limit holds for a page that is busy, too.
        """
        from playwright.sync_api import TimeoutError as PlaywrightTimeout

        try:
            return self.page.locator(":root").evaluate(f"() => ({script})", timeout=self._limit)
        except PlaywrightTimeout as error:
            raise TooSlow from error

    def wait(self, condition: str) -> None:
        """Return once an expression is true. A page's policy forbids ``wait_for_function``."""
        deadline = monotonic() + self._limit / 1000
        while not self.run(f"Boolean({condition})"):
            if monotonic() > deadline:
                raise TooSlow
            sleep(0.02)

    def cpu(self) -> float:
        """Return the seconds of all threads of the page's process, to 10 ms."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("Performance.enable")
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(entry["value"] for entry in metrics if entry["name"] == "ProcessTime"))

    def heap(self) -> int:
        """Return the bytes that JavaScript holds after garbage collection, arrays included."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("HeapProfiler.collectGarbage")
        usage = session.send("Runtime.getHeapUsage")
        return int(usage["usedSize"] + usage.get("backingStorageSize", 0))

    def renderer(self) -> int:
        """Return the anonymous bytes that are resident in the page's process."""
        browser = self.page.context.browser
        assert browser is not None
        processes = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")
        return max(
            _anonymous(process["id"])
            for process in processes["processInfo"]
            if process["type"] == "renderer"
        )


def _anonymous(pid: int) -> int:
    """Return the anonymous bytes that are resident in a process; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"^RssAnon:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


@contextmanager
def tab(
    browser: Browser,
    url: str,
    *,
    ready: str,
    limit: float,
    prepare: Callable[[Page], None] | None = None,
) -> Iterator[tuple[Tab, float]]:
    """Open a page; give it and the seconds from the navigation to its first picture.

    Parameters
    ----------
    browser
        A running Chromium.
    url
        Address of the page.
    ready
        JavaScript expression that is true once the page has drawn its picture. The seconds last to
        the end of the next frame.
    limit
        Seconds after which `TooSlow` is raised, for the first picture and for each script.
    prepare
        Called with the page before it is opened.
    """
    from playwright.sync_api import TimeoutError as PlaywrightTimeout

    context = browser.new_context(viewport=SIZE, service_workers="block")  # type: ignore[arg-type]
    page = context.new_page()
    page.add_init_script(_WATCH.replace("CONDITION", ready))
    if prepare is not None:
        prepare(page)
    opened = Tab(page, limit)
    try:
        page.goto(url, wait_until="commit", timeout=1000 * limit)
    except PlaywrightTimeout as error:
        raise TooSlow from error
    opened.wait("globalThis.firstPicture")
    first = float(opened.run("firstPicture")) / 1000
    if first > limit:
        raise TooSlow
    yield opened, first
    context.close()
