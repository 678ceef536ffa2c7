"""A browser for tests of pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Chromium, Pages, missing, open_pages, start_chromium


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that open pages."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
            item.add_marker("slow")


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """Run one Chromium for all tests of this worker."""
    if reason := missing():
        pytest.skip(reason)
    with start_chromium() as chromium:
        yield chromium


@pytest.fixture
def open_page(browser: Chromium) -> Iterator[Pages]:
    """Return ``open_page(path, **options)``; faults that a test leaves there fail it."""
    with open_pages(browser) as pages:
        yield pages
