"""Close the figures that a test opens."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def _no_figures_left() -> Any:
    """Pyplot draws into memory, and has no open figure before and after a test."""
    mpl.use("Agg")
    plt.close("all")
    yield
    plt.close("all")
