"""Measured steps of public runs on GPUs: read, recognized and replayed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from places import BENCHMARKS

import pipesim as ps
from pipesim.costs import CostTable, TaskCosts

sys.path.insert(0, str(BENCHMARKS))

from published_timelines import by_lengths, medians, predictions, timelines

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


def packed_documents(seed: int, n_steps: int = 8) -> pd.DataFrame:
    """Return measured F and B of micro-batches whose attention grows with squared lengths.

    The last stage is slower by its head, kernels by 2 % of noise.
    """
    generator = np.random.default_rng(seed)
    graph = ps.lower(ps.schedule("1f1b", 4, 16))
    compute = np.isin(graph.op, [ps.Op.F, ps.Op.B])
    zeros = np.zeros(len(graph))
    steps = []
    for step in range(n_steps):
        cuts = [np.sort(generator.random(generator.integers(6))) for _ in range(16)]
        attention = np.array([(np.diff([0, *cut, 1]) ** 2).sum() for cut in cuts])
        head = 0.1 * (graph.stage == 3)
        seconds = 0.4 + head + 0.8 * attention[np.maximum(graph.microbatch, 0)]
        seconds = np.select([graph.op == ps.Op.F, graph.op == ps.Op.B], [seconds, 2.2 * seconds])
        seconds *= generator.lognormal(0, 0.02, len(graph))
        table = CostTable(
            duration=seconds,
            latency=np.where(compute, 0, 0.01),
            links=np.arange(len(graph))[:, None],
            share=np.ones(len(graph)),
            launch=zeros,
            nbytes=zeros,
        )
        timeline = ps.simulate(graph, TaskCosts.of_tasks(table, None, zeros))
        columns = {"stage": graph.stage, "microbatch": graph.microbatch, "start": timeline.start}
        rows = pd.DataFrame({**columns, "duration": timeline.end - timeline.start})[compute]
        ops = [ps.Op(op).name for op in graph.op[compute]]
        steps.append(rows.assign(step=step, replica=0, op=ops))
    return pd.concat(steps, ignore_index=True)


@pytest.mark.parametrize("seed", range(3))
def test_unequal_sequences(seed: int) -> None:
    """Forwards of the first stage give the lengths, which predict the other tasks."""
    steps = timelines(packed_documents(seed), gaps="charge")
    usual, by_length = (
        np.mean(np.abs(predictions(steps, predictor))) for predictor in (medians, by_lengths)
    )
    assert by_length < 0.02
    assert usual > 3 * by_length
