"""Sweeps of two devices, in this process."""

from __future__ import annotations

from typing import Any

import pandas as pd

import pipesim as ps

BASE = {"n_devices": 2, "forward": 1e-3, "backward": 2e-3, "activation_bytes": 1e6}
RESULTS = [
    "n_tasks", "makespan", "bubble_fraction", "throughput", "peak_memory", "seconds", "error",
]  # fmt: skip


def sweep(configurations: Any, **options: Any) -> pd.DataFrame:
    """Sweep without a bar, by default in this process."""
    return ps.sweep(configurations, **{"base": BASE, "n_jobs": 1, "progress": False, **options})
