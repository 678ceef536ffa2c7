"""Measured steps of public runs on GPUs: read, recognized and replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import pipesim as ps

TABLES = Path(__file__).parent / "timelines"
OTHER = "layernorm-grads-all-reduce"


@pytest.mark.parametrize(
    ("name", "devices", "most"),
    [
        ("megatron_8gpu_pp4_dp2", 8, 0.005),
        ("megatron_64gpu_pp4_dp4", 16, 0.005),
        ("primus_8_mi300x_pp8", 8, 0.011),
    ],
)
def test_measured_steps(name: str, devices: int, most: float) -> None:
    """Makespans are equal to the last digit, and replays of both engines explain them."""
    frame = pd.read_csv(TABLES / f"{name}.csv.gz")
    errors = []
    for step, rows in list(frame.groupby("step"))[:8]:
        timeline = ps.Timeline.from_table(frame, step=step, ops={OTHER: None})
        rows = rows[rows["op"] != OTHER]
        assert timeline.makespan == (rows["start"] + rows["duration"]).max() - rows["start"].min()
        assert (timeline.name, timeline.n_devices) == ("1f1b", devices)
        replayed = ps.replay(timeline)
        errors.append(replayed.makespan / timeline.makespan - 1)
    np.testing.assert_array_equal(ps.replay(timeline, engine="simpy").end, replayed.end)
    assert abs(np.mean(errors)) < most


@pytest.mark.parametrize("name", ["megatron_8gpu_pp4_dp2", "megatron_64gpu_pp4_dp4"])
def test_pipelines_alone(name: str) -> None:
    """F and B of one replica, and with the messages that were recorded."""
    frame = pd.read_csv(TABLES / f"{name}.csv.gz")
    frame = frame[(frame["replica"] == 1) & (frame["step"] == frame["step"].max())]
    for ops in (["F", "B"], ["F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]):
        timeline = ps.Timeline.from_table(frame[frame["op"].isin(ops)])
        compute = frame[frame["op"].isin(["F", "B"])]
        span = (compute["start"] + compute["duration"]).max() - compute["start"].min()
        assert timeline.makespan == pytest.approx(span)
        assert ps.replay(timeline).makespan == pytest.approx(span, rel=0.005)
