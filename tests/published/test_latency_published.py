"""Latency of a ring step in the preset of a machine, against measured collectives of NCCL."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import pipesim as ps

MEASURED = json.loads((Path(__file__).parent / "simumax_latency.json").read_text())["expected"]


def test_latency_of_collectives_on_b200() -> None:
    """13 us a ring step suit 2, 4 and 8 devices best, by least squares without a start."""
    steps = np.array([1, 3, 7])
    measured = [step * steps + start for step, start in MEASURED["b200"].values()]
    best = sum(steps @ seconds for seconds in measured) / (len(measured) * steps @ steps)
    assert best == pytest.approx(13, abs=0.2)
    network = ps.Network.preset("dgx_b200")
    for n_steps in steps.tolist():
        devices = network.grouped(n_steps + 1)
        assert devices.group_all_gather(0, n_steps + 1) == pytest.approx(n_steps * 13e-6)
    assert ps.Network.preset("dgx_h200").grouped(2).group_all_gather(0, 2) == pytest.approx(3.4e-6)
