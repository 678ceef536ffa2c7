"""Close the figures that a test opens."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_figures_left(no_figures_left: None) -> None:
    """Apply the fixture to every test of the room."""
