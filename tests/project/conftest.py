"""Settings of the tests of the whole project."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    """Close the figures that a test leaves open; matplotlib warns of more than twenty."""
    yield
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close("all")
