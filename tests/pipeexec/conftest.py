"""Fixtures of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from few_messages import few_messages


@pytest.fixture(autouse=True)
def _few_messages(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let calibrations time few messages, but in tests that measure time."""
    if request.node.get_closest_marker("measures_time") is not None:
        yield
        return
    with few_messages():
        yield
