"""Measured costs: what they count, and that measuring leaves no trace."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from small_pipelines import Nap, assert_same, cut, data, dense, mse, nap_stages, orders, pipeline
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.profiling import Profile
from pipeexec.profiling.calibration import Calibration, breadth_first
from pipeexec.profiling.link_speed import (
    fit,
    fits,
    measure_transfers,
    message_costs,
    network_of,
    pairs_of,
)
from pipeexec.run_directory import write_directory
from pipesim.errors import AccuracyWarning, ArgumentError, RunDirectoryError
from pipesim.ops import Op

# The fixture `measured` times all messages, other tests few.
pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")

FORWARD, BACKWARD = 5e-3, 10e-3


def lowered(p: int = 2, m: int = 3, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule("1f1b", p, m), **options)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


@pytest.fixture(scope="module")
def measured(quiet_machine: Callable[[], AbstractContextManager[None]]) -> Profile:
    """The profile of stages that sleep 5 ms in forward and 10 ms in backward."""
    stages = nap_stages(2, FORWARD, BACKWARD)
    with quiet_machine(), pipeline(stages, lowered(), mse, adam) as subject:
        return px.measure(subject, *data(6, 4), n_steps=3, warm_up=1)


@pytest.mark.slow
def test_every_cost_of_a_whole_backward_is_measured(measured: Profile) -> None:
    costs = measured.costs
    values = costs.to_dict()
    for name in ("forward", "backward", "recompute", "optimizer_step"):
        assert len(values[name]) == 2, name
        assert all(0 < value < math.inf for value in values[name]), name
    assert costs.launch > 0
    assert costs.network.latency > 0
    assert min(costs.activation_bytes) > 0
    assert min(costs.parameter_bytes) > 0
    assert min(costs.optimizer_bytes) > 0


def test_tasks_take_at_least_as_long_as_they_sleep(measured: Profile) -> None:
    """And steps of the optimizer, which do not sleep, less than ten times as long."""
    costs = measured.costs
    for name, slept in (("forward", FORWARD), ("recompute", FORWARD), ("backward", BACKWARD)):
        for seconds in getattr(costs, name):
            assert slept <= seconds, name
    assert max(costs.optimizer_step) < 10 * FORWARD


def test_the_table_has_a_row_an_operation_and_stage(measured: Profile) -> None:
    table = measured.table
    assert list(table.index) == [(op, stage) for op in ("F", "B", "R", "STEP") for stage in (0, 1)]
    assert list(table.columns) == ["loaded", "spread", "isolated", "slow_down"]
    assert tuple(table.loc["F", "loaded"]) == measured.costs.forward
    assert (table.loc["F", "isolated"] >= FORWARD).all()
    assert (table.loc["B", "isolated"] >= BACKWARD).all()
    assert (table["spread"] >= 0).all()
    np.testing.assert_allclose(table["slow_down"], table["loaded"] / table["isolated"])


def test_transfers_are_measured_by_size(measured: Profile) -> None:
    """Within one memory a message is handed over, whatever its size: bandwidth has no end."""
    transfers = measured.transfers
    assert list(transfers.columns) == [
        *("source", "target", "nbytes", "idle", "loaded", "idle_fit", "loaded_fit")
    ]
    for pair in ((0, 1), (1, 0)):
        messages = transfers[(transfers["source"] == pair[0]) & (transfers["target"] == pair[1])]
        assert messages["nbytes"].is_monotonic_increasing
        assert messages["nbytes"].iloc[-1] >= 1 << 24
    assert (transfers.drop(columns=["source", "target"]) > 0).all(axis=None)
    assert list(measured.fits.index) == [
        (*pair, state) for pair in ((0, 1), (1, 0), (-1, -1)) for state in ("idle", "loaded")
    ]
    assert measured.costs.network.bandwidth == math.inf


def test_costs_predict_the_graph(measured: Profile) -> None:
    """They are all that the simulator needs, for each recompute mode."""
    for recompute in ("never", "always", "except_last"):
        timeline = ps.simulate(lowered(recompute=recompute), measured.costs)
        assert timeline.makespan >= 4 * (FORWARD + BACKWARD)
        assert (timeline.memory.peak > 0).all()


def test_bytes_by_hand(measured: Profile) -> None:
    """Micro-batches of two samples of four floats through a linear layer of four.

    Held: the input (and for the last stage the loss's: output and targets). Parameters: 4 x 4 + 4.
    AdamW: two moments a parameter, and a step count a tensor.
    """
    costs = measured.costs
    floats = 2 * 4
    assert costs.output_bytes == (4 * floats, 0)
    assert costs.activation_bytes[0] == 4 * floats
    assert costs.parameter_bytes == (80, 80)
    assert costs.optimizer_bytes == (2 * 80 + 2 * 4,) * 2


@pytest.mark.slow
def test_activation_bytes_of_a_chain_by_hand() -> None:
    """Each linear layer keeps its input, tanh its output, which is the next one's input."""
    stages = [
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 16)),
        nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)),
    ]
    with pipeline(stages, lowered(), lambda output, target: (output - target).sum()) as subject:
        costs = px.profile(subject, *data(6, 4), n_steps=1, warm_up=0)
    assert costs.activation_bytes == (2 * (4 + 8) * 4, 2 * (16 + 8) * 4)
    assert costs.output_bytes == (2 * 16 * 4, 0)
    assert costs.optimizer_bytes == (0, 0)


def test_held_bytes_are_those_of_the_whole_step() -> None:
    """By hand, in 1F1B's order: two micro-batches on device 0, one on device 1."""
    stages = [nn.Linear(4, 8), nn.Linear(8, 4)]
    with pipeline(stages, lowered(), lambda output, target: (output - target).sum()) as subject:
        subject.step(*data(6, 4))
        assert subject.held_bytes(*data(6, 4)) == [2 * 2 * 4 * 4, 2 * 8 * 4]
    gpipe = ps.lower(ps.schedule("gpipe", 2, 3))
    with pipeline(stages, gpipe, lambda output, target: (output - target).sum()) as subject:
        subject.step(*data(6, 4))
        assert subject.held_bytes(*data(6, 4)) == [6 * 4 * 4, 3 * 2 * 8 * 4]


@pytest.mark.slow
def test_profiling_leaves_no_trace() -> None:
    """Parameters, buffers, gradients and optimizers are as before, and so is the next step."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    untouched = copy.deepcopy(stages)
    with (
        pipeline(stages, lowered(), mse, adam) as subject,
        pipeline(untouched, lowered(), mse, adam) as other,
    ):
        for runner in (subject, other):
            runner.step(*data(6, 4))
        profile = px.measure(subject, *data(6, 4), n_steps=2, warm_up=1)
        subject.held_bytes(*data(6, 4))
        assert_same(stages, untouched)
        assert torch.equal(subject.step(*data(6, 4)).loss, other.step(*data(6, 4)).loss)
        assert_same(stages, untouched)
        state, its = (s.optimizers[0].state_dict() for s in (subject, other))
        torch.testing.assert_close(state, its, rtol=0, atol=0)
    assert isinstance(profile.costs, ps.Costs)


@pytest.mark.slow
def test_profiling_before_the_first_step_leaves_no_trace() -> None:
    """Optimizers have no state then, and gradients are missing."""
    stages = cut(dense(2), [1, 1])
    untouched = copy.deepcopy(stages)
    with pipeline(stages, lowered(), mse, adam) as subject:
        px.measure(subject, *data(6), n_steps=1, warm_up=1)
        assert_same(stages, untouched)
        assert all(not optimizer.state for optimizer in subject.optimizers)


@pytest.mark.slow
def test_gradients_that_were_gathered_are_kept() -> None:
    """Without an optimizer they add up from step to step, but not those of the profile."""
    stages = cut(dense(2), [1, 1])
    with pipeline(stages, lowered()) as subject:
        subject.step(*data(6))
        before = [p.grad.clone() for stage in stages for p in stage.parameters()]
        px.measure(subject, *data(6), n_steps=1, warm_up=1)
        after = [p.grad for stage in stages for p in stage.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.measures_time
@pytest.mark.slow
@pytest.mark.usefixtures("few_messages")
def test_short_tasks_are_warned_of() -> None:
    """By task, and where the user called."""
    with pipeline(cut(dense(2), [1, 1]), lowered()) as subject:
        for call in (px.measure, px.profile):
            with pytest.warns(AccuracyWarning, match=r"of stage \d takes 0\.\d+ ms: below 1") as w:
                call(subject, *data(6), n_steps=2, warm_up=1)
            assert w[0].message.args[0].endswith("use larger micro-batches or stages")


@pytest.mark.slow
def test_long_tasks_are_not() -> None:
    with (
        pipeline(nap_stages(2), lowered()) as subject,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", "below 1 ms", AccuracyWarning)
        px.profile(subject, *data(6, 4), n_steps=1, warm_up=0)


@pytest.mark.slow
def test_unsteady_tasks_are_warned_of() -> None:
    """A stage that sleeps longer in one step of four: a spread of 1.8, more than noise has."""

    class Uneven(Nap):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            # Of a stage's steps: 4 forwards and recomputes under load, then one of each alone.
            self.calls += 1
            slow = (self.calls - 1) // 10 == 1
            self.seconds = (2e-3 + 60e-3 * slow, 2e-3)
            return super().forward(x)

    stages = [nn.Sequential(nn.Linear(4, 4), Uneven(0, 0)), *nap_stages(1)]
    with (
        pipeline(stages, lowered()) as subject,
        pytest.warns(AccuracyWarning, match=r"mean of [FR] of stage 0 moves by \d+% from step"),
    ):
        px.profile(subject, *data(6, 4), n_steps=4, warm_up=0)


def test_one_device_has_no_transfers() -> None:
    with pipeline(nap_stages(1), lowered(1)) as subject:
        profile = px.measure(subject, *data(6, 4), n_steps=1, warm_up=0)
    assert profile.transfers.empty
    assert profile.costs.network == ps.Network()


@pytest.mark.slow
def test_stages_that_share_a_device() -> None:
    graph = ps.lower(orders("0F0 0B0", "1F0 2F0 2B0 1B0"))
    with pipeline(nap_stages(3, 2e-3, 2e-3), graph) as subject:
        costs = px.profile(subject, *data(6, 4), n_steps=1, warm_up=0)
    assert len(costs.forward) == 3
    assert min(costs.forward) >= 2e-3
    assert costs.output_bytes == (6 * 4 * 4, 0, 0)


def test_the_calibration_is_of_another_schedule() -> None:
    """One micro-batch more than the pipeline has, as large as its micro-batches; breadth first."""
    with pipeline(nap_stages(2), lowered(m=3)) as subject:
        calibration = Calibration(subject, *data(6, 4))
        graph = calibration.loaded.graph
        assert graph.n_microbatches == 4
        assert len(calibration.batch[0]) == 8
        assert (graph.op == Op.R).sum() == 8
        assert calibration.isolated.graph.n_microbatches == 1
        assert [len(inputs) for inputs, _ in calibration.singles] == [2]


def test_the_calibration_of_an_uneven_batch() -> None:
    """Seven samples in three: micro-batches of 3, 2 and 2 are measured as most of them are."""
    with pipeline(nap_stages(1, 0.0, 0.0), lowered(1, 3)) as subject:
        ((inputs, _),) = Calibration(subject, *data(7, 4)).singles
        assert len(inputs) == 2


def test_breadth_first() -> None:
    schedule = breadth_first(ps.Placement.looped(2, 2), 2)
    assert schedule.grid() == (
        "device 0 | 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\ndevice 1 | 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"
    )


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (data(2, 4)[0], data(2, 4)[1], "inputs have 2 samples, too few for 3 micro-batches"),
        (data(6, 4)[0], data(5, 4)[1], "inputs have 6 samples, targets 5"),
        ([1, 2, 3], data(6, 4)[1], "inputs must be a tensor of samples"),
    ],
)
def test_a_batch_that_does_not_suit(inputs: Any, targets: Any, message: str) -> None:
    """Found before any step, though a profile repeats samples where it needs more."""
    with (
        pipeline(nap_stages(2), lowered()) as subject,
        pytest.raises(ArgumentError, match=message),
    ):
        px.measure(subject, inputs, targets)


@pytest.mark.parametrize("counts", [{"n_steps": 0}, {"n_steps": 1.5}, {"warm_up": -1}])
def test_counts_of_steps(counts: dict[str, Any]) -> None:
    with (
        pipeline(nap_stages(2), lowered()) as subject,
        pytest.raises(ArgumentError, match=next(iter(counts))),
    ):
        px.profile(subject, *data(6, 4), **{"n_steps": 1, "warm_up": 0, **counts})


@pytest.mark.slow
def test_steps_that_keep_versions_are_measured_as_such() -> None:
    """PipeDream's steps copy the weights, and so do those of its calibration."""
    stages = [nn.Linear(64, 64) for _ in range(2)]
    x = torch.randn(8, 64)
    graph = ps.lower(ps.schedule("pipedream", 2, 4))
    with pipeline(stages, graph, mse, adam) as subject:
        before = copy.deepcopy(stages)
        profile = px.measure(subject, x, x, n_steps=1, warm_up=0)
        assert_same(stages, before)
        assert profile.table.loc[("STEP", 0), "loaded"] > 0
        predicted = ps.simulate(graph, profile.costs)
    assert predicted.complete


# Messages by size


SIZES = np.array([1 << k for k in range(12, 26, 2)], dtype=float)


def test_a_fit_by_hand() -> None:
    """Points on a line give it back, whatever one of them does."""
    seconds = 20e-6 + SIZES / 5e9
    line = fit(SIZES, seconds)
    assert (line.latency, line.bandwidth) == pytest.approx((20e-6, 5e9))
    assert line.residual == pytest.approx(0, abs=1e-9)
    assert line.r2 == pytest.approx(1)
    seconds[3] *= 10
    odd = fit(SIZES, seconds)
    assert (odd.latency, odd.bandwidth) == pytest.approx((20e-6, 5e9))
    assert odd.residual == pytest.approx(9 / len(SIZES))
    assert odd.seconds(5e9) == pytest.approx(1 + 20e-6)


def test_fits_at_their_limits() -> None:
    """Messages that take as long whatever their size, and such without any latency."""
    same = fit(SIZES, [5e-5] * len(SIZES))
    assert (same.latency, same.bandwidth) == (5e-5, math.inf)
    assert math.isnan(same.r2)
    free = fit(SIZES, SIZES / 1e9)
    assert (free.latency, free.bandwidth) == pytest.approx((0, 1e9))
    convex = fit([1, 2, 4], [1, 2, 8])  # a line through the last two has a latency below 0
    assert convex.latency >= 0
    assert convex.bandwidth == pytest.approx(1)
    one = fit([4096], [1e-4])
    assert (one.latency, one.bandwidth) == (1e-4, math.inf)


@given(st.lists(st.floats(1e-6, 1e-2), min_size=1, max_size=7))
def test_any_fit_has_possible_values(seconds: list[float]) -> None:
    """Whatever was measured, the network takes it."""
    line = fit(SIZES[: len(seconds)], seconds)
    ps.Network(line.latency, line.bandwidth)
    assert line.residual >= 0


def of_pairs(**speeds: tuple[float, float]) -> pd.DataFrame:
    """Return transfers between pairs such as ``a01`` of the given latency and bandwidth."""
    return pd.concat(
        pd.DataFrame({"source": int(name[1]), "target": int(name[2]), "nbytes": SIZES,
                      "idle": 1e-6 + SIZES / speed[1], "loaded": speed[0] + SIZES / speed[1]})
        for name, speed in speeds.items()
    ).reset_index(drop=True)  # fmt: skip


def test_pairs_of_one_speed_share_it() -> None:
    transfers = of_pairs(a01=(1e-5, 1e10), a12=(1.1e-5, 1.05e10))
    network = network_of(transfers, fits(transfers), [])
    assert network.links == ()
    assert network.bandwidth == pytest.approx(1e10, rel=0.06)
    assert network.latency == pytest.approx(1e-5, rel=0.11)


def test_pairs_of_other_speed_have_links_of_their_own() -> None:
    """As GPUs on one board and on two have."""
    transfers = of_pairs(a01=(1e-5, 1e11), a12=(4e-5, 1e10))
    network = network_of(transfers, fits(transfers), [])
    fast, slow = network.links
    assert (fast.pairs, slow.pairs) == (((0, 1),), ((1, 2),))
    assert (fast.latency, fast.bandwidth) == pytest.approx((1e-5, 1e11))
    assert (slow.latency, slow.bandwidth) == pytest.approx((4e-5, 1e10))
    assert (network.latency, network.bandwidth) == (slow.latency, slow.bandwidth)


def test_latency_is_what_was_waited_for_beyond_the_bytes() -> None:
    """Of a simulated run whose network is known: its latency comes back, not that of the fit."""
    network = ps.Network(latency=2e-3, bandwidth=1e9)
    costs = ps.Costs(5e-3, 5e-3, output_bytes=1e6, network=network)
    timeline = ps.simulate(lowered(), costs)
    transfers = of_pairs(a01=(1e-5, 1e9), a10=(1e-5, 1e9))
    fitted = network_of(transfers, fits(transfers), [timeline])
    assert fitted.latency == pytest.approx(2e-3)
    assert fitted.bandwidth == pytest.approx(1e9)
    alone = network_of(transfers.head(0), {}, [timeline])
    assert (alone.latency, alone.bandwidth) == (pytest.approx(3e-3), math.inf)


@pytest.mark.parametrize(
    ("nbytes", "held"),
    [((1e6, 2e6, 4e6, 0), 2e-3), ((1e6, 1e6, 1e6, 0), 0.0)],
    ids=["three", "one"],
)
def test_seconds_that_messages_of_several_sizes_hold_besides_bytes(
    nbytes: tuple[float, ...], held: float
) -> None:
    """Of a simulated run: bandwidth, latency and ``output_seconds`` come back."""
    network = ps.Network(latency=3e-3, bandwidth=1e9)
    costs = ps.Costs(5e-3, 5e-3, output_bytes=nbytes, output_seconds=held, network=network)
    timeline = ps.simulate(lowered(4), costs)
    priced = message_costs([timeline, timeline])
    assert priced["output_seconds"] == pytest.approx(held)
    assert (priced["network"].latency, priced["network"].bandwidth) == pytest.approx((3e-3, 1e9))
    assert message_costs([ps.simulate(lowered(1), ps.Costs(1, 1))]) == {"network": ps.Network()}


def test_messages_are_timed_between_the_pairs_that_have_any() -> None:
    """Devices 0 and 2 of a linear pipeline send each other nothing."""
    assert pairs_of(lowered(3)) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert pairs_of(lowered(1)) == []
    graph = ps.lower(ps.schedule("interleaved_1f1b", 3, 3))
    assert (2, 0) in pairs_of(graph)


def test_messages_are_timed_in_both_directions() -> None:
    """A row a pair and size, in the order of the pairs; the pipeline stays as it was."""
    with pipeline(nap_stages(3, 0.0, 0.0), lowered(3)) as some:
        pairs = pairs_of(some.graph)
        table = measure_transfers(some, pairs, sizes=[64, 1 << 16], repeat=2)
        assert some.n_steps == 0
    assert list(zip(table["source"], table["target"], strict=True)) == [
        p for p in pairs for _ in (0, 1)
    ]
    assert table["nbytes"].tolist() == [64, 1 << 16] * 4
    assert (table[["idle", "loaded"]] > 1e-9).all().all()


def test_a_profile_is_loaded_as_it_was_saved(measured: Profile, tmp_path: Path) -> None:
    measured.save(tmp_path / "run", record={"seed": 3})
    loaded = Profile.load(tmp_path / "run")
    assert loaded.costs == measured.costs
    for table in ("table", "transfers", "fits"):
        pd.testing.assert_frame_equal(getattr(loaded, table), getattr(measured, table))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("run.json", "costs.json", "profile.csv", "transfers.csv", "links.csv"),
        "transfers.png",
    }
    assert ps.Costs.load(tmp_path / "run" / "costs.json") == measured.costs


def test_a_run_without_a_profile(tmp_path: Path) -> None:
    with write_directory(tmp_path / "other", {}) as folder:
        ps.Costs(1, 1).save(folder / "costs.json")
    with pytest.raises(RunDirectoryError, match=r"no complete profile: profile\.csv is missing"):
        Profile.load(tmp_path / "other")
    with pytest.raises(RunDirectoryError, match=r"no whole run directory"):
        Profile.load(tmp_path)


def test_the_figure_shows_points_and_fits(measured: Profile) -> None:
    """Both axes logarithmic; a marker a size, a line a pair, for both states."""
    figure = Figure()
    ax = measured.plot(ax=figure.add_subplot())
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    kinds = [line.get_gid() for line in ax.lines]
    assert sorted(set(kinds)) == [*("idle:fit", "idle:measured", "loaded:fit", "loaded:measured")]
    assert len(kinds) == 2 * 4
    x, y = ax.lines[0].get_data()
    first = measured.transfers.head(len(x))
    assert list(x) == first["nbytes"].tolist()
    np.testing.assert_allclose(y / y[0], first["idle"] / first["idle"][0])
