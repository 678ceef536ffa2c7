"""Pages in Chromium, and a record of each thing that a page must not do."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import (
        Browser,
        BrowserContext,
        ConsoleMessage,
        Page,
        Request,
        WebError,
        WebSocket,
    )


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
_TIMEOUT = 30_000  # ms; that of each call which waits for the page


class Fault(NamedTuple):
    """A thing that a page must not do.

    ``kind`` is ``"console error"``, ``"console warning"``, ``"exception"`` or ``"request"``;
    ``text`` is the message, or the address of the request.
    """

    kind: str
    text: str


class Chromium(NamedTuple):
    """A running Chromium, its contexts by their options, and the event loop of Playwright."""

    browser: Browser
    loop: asyncio.AbstractEventLoop
    contexts: dict[str, BrowserContext]


def missing() -> str:
    """Return why pages cannot be opened on this machine, and how to change it; else ``""``."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install -e '.[dev]' -c constraints.txt"
    if _command() is None:
        return f"none of {', '.join(_COMMANDS)} is installed: apt-get install chromium"
    return ""


def _command() -> str | None:
    """Return the path of the machine's Chromium."""
    return next(filter(None, map(shutil.which, _COMMANDS)), None)


@contextmanager
def start_chromium() -> Iterator[Chromium]:
    """Run Chromium without a window, from an empty profile in a temporary folder."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        loop = asyncio.get_running_loop()
        browser = playwright.chromium.launch(executable_path=_command(), args=_FLAGS)
        with _running(None):
            yield Chromium(browser, loop, {})
        browser.close()


@contextmanager
def _running(loop: asyncio.AbstractEventLoop | None) -> Iterator[None]:
    """Declare the event loop of this thread.

    Playwright's loop stands between two calls, yet asyncio takes it for running. Tests that have a
    loop of their own (notebooks, Dask) would fail.
    """
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(before)


class Pages:
    """Opens pages and records their faults; made by `open_pages`."""

    def __init__(self, chromium: Chromium) -> None:
        self._chromium = chromium
        self._contexts: list[BrowserContext] = []
        self._pages: list[Page] = []
        self._files: set[str] = set()
        self._faults: list[Fault] = []

    def __call__(self, path: Path, **options: Any) -> Page:
        """Open a file in a page of its own, and return the page once it is loaded.

        Pages with the same options are in one context, that is, one process of Chromium, which
        takes long to start. Our pages store nothing there.

        Parameters
        ----------
        path
            HTML file.
        **options
            Those of Playwright's ``Browser.new_context``: ``color_scheme``, ``viewport``,
            ``device_scale_factor``, ``reduced_motion``, ``has_touch``. The context is offline.
        """
        url = path.resolve().as_uri()
        self._files.add(url)
        page = self._context_with(options).new_page()
        page.goto(url)
        return page

    def _context_with(self, options: dict[str, Any]) -> BrowserContext:
        """Return the context with these options, whose events go here until `close`."""
        contexts, key = self._chromium.contexts, repr(sorted(options.items()))
        if key not in contexts:
            contexts[key] = self._chromium.browser.new_context(offline=True, **options)
            contexts[key].set_default_timeout(_TIMEOUT)
        context = contexts[key]
        if context not in self._contexts:
            self._contexts.append(context)
            context.on("console", self._on_console)
            context.on("weberror", self._on_exception)
            context.on("request", self._on_request)
            context.on("page", self._on_page)
        return context

    def take(self) -> list[Fault]:
        """Return the faults until now, of all pages, and forget them."""
        for page in self._pages:
            if not page.is_closed():  # its answer comes after the events before it
                page.locator(":root").evaluate("0", timeout=_TIMEOUT)
        faults, self._faults = self._faults, []
        return faults

    def close(self) -> None:
        """Close all pages, and leave their contexts to other tests."""
        for context in self._contexts:
            for page in context.pages:
                page.close()
            context.remove_listener("console", self._on_console)
            context.remove_listener("weberror", self._on_exception)
            context.remove_listener("request", self._on_request)
            context.remove_listener("page", self._on_page)

    def _on_page(self, page: Page) -> None:
        self._pages.append(page)
        page.on("websocket", self._on_socket)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._faults.append(Fault(f"console {message.type}", message.text))

    def _on_exception(self, error: WebError) -> None:
        self._faults.append(Fault("exception", error.error.stack or str(error.error)))

    def _on_request(self, request: Request) -> None:
        url = request.url
        if url.partition("#")[0] not in self._files and not url.startswith(("data:", "blob:")):
            self._faults.append(Fault("request", url))

    def _on_socket(self, socket: WebSocket) -> None:
        self._faults.append(Fault("request", socket.url))


@contextmanager
def open_pages(chromium: Chromium) -> Iterator[Pages]:
    """Return a function that opens pages; at the end, fail if it has faults that no one took."""
    pages = Pages(chromium)
    with _running(chromium.loop):
        try:
            yield pages
            faults = pages.take()
        finally:
            pages.close()
    if faults:
        pytest.fail("\n".join(["Faults of the page:", *(": ".join(fault) for fault in faults)]))
