"""Whether a timeline fits in its devices' memory, tokens a second, and model FLOPs utilization."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.costs import TaskCosts, Workload
from pipesim.errors import (
    ArgumentError,
    CostsError,
    CostsWarning,
    MemoryLimitWarning,
    TimelineError,
)
from pipesim.simulation import LogNormal

#: 2 stages that always hold 10 and 20 bytes, and 3 and 5 a micro-batch in flight.
COSTS = ps.Costs(1, 2, activation_bytes=(3, 5), parameter_bytes=(5, 10))
#: GPipe holds both micro-batches at once: 10 + 2 * 3, and 20 + 2 * 5.
PEAK = [16.0, 30.0]
GRAPH = ps.lower(ps.schedule("gpipe", 2, 2))
WORKLOAD = Workload(tokens=8, flops=6, gpus_per_device=2, peak_flops=1, memory=30)


def quiet(limit: Any, costs: ps.Costs = COSTS) -> ps.Timeline:
    """Simulate two micro-batches in two stages; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ps.simulate(GRAPH, costs, memory_limit=limit)


@pytest.mark.parametrize(
    "limit", [30, 30.0, [16, 30], (16.0, float("inf")), np.array([16, 30]), np.float64(30)]
)
def test_a_limit_may_be_reached(limit: Any) -> None:
    """The peak itself fits, on each device."""
    timeline = quiet(limit)
    assert timeline.memory.peak.tolist() == PEAK
    assert timeline.memory.fits is True
    assert timeline.memory.limit is not None
    assert timeline.memory.limit.tolist() == np.broadcast_to(limit, 2).tolist()
    assert timeline.with_name("other").memory.fits is True


@pytest.mark.slow
def test_one_byte_too_much() -> None:
    """The warning has device, bytes, and the F that allocates the last of them."""
    text = (
        r"timeline 'gpipe' does not fit: device 1 needs 30.0 B of 29.0 B, 1.00 B too much, from "
        r"task 1F1 on, at 2.00 s"
    )
    with pytest.warns(MemoryLimitWarning, match=text) as caught:
        timeline = ps.simulate(GRAPH, COSTS, memory_limit=29)
    assert timeline.memory.fits is False
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_limits_of_devices() -> None:
    """Each device has its own; the one that needs most beyond it is named, others are counted."""
    text = r"fit: device 1 needs 30.0 B of 4.00 B, 26.0 B too much, [^;]*; 1 more device too; "
    with pytest.warns(MemoryLimitWarning, match=text):
        assert ps.simulate(GRAPH, COSTS, memory_limit=[15, 4]).memory.fits is False
    with pytest.warns(MemoryLimitWarning, match=r"device 0 .* 1\.00 B too much, throughout"):
        ps.simulate(GRAPH, replace(COSTS, activation_bytes=0), memory_limit=[9, 20])


def test_many_devices() -> None:
    """One is named, for all replicas; the others are counted."""
    graph = ps.lower(ps.schedule("gpipe", 5, 1), n_replicas=2)
    with pytest.warns(MemoryLimitWarning, match=r"device 0 needs [^;]*; 8 more devices too"):
        ps.simulate(graph, ps.Costs(1, 2, activation_bytes=8), memory_limit=7)


def test_equal_devices_of_replicas() -> None:
    """Devices 0 and 2 hold the first stage, 1 and 3 the second; limits may differ."""
    graph = ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=2)
    costs = ps.Costs(1, 2, activation_bytes=(8, 6))
    text = r"device 0 needs 8.00 B of 7.00 B[^;]*, from task 0F0 on, [^;]*s, in all 2 replicas; t"
    with pytest.warns(MemoryLimitWarning, match=text):
        ps.simulate(graph, costs, memory_limit=7)
    text = r"fit: device 2 needs 8.00 B of 5.00 B[^;]*s; 1 more device too; t"
    with pytest.warns(MemoryLimitWarning, match=text):
        ps.simulate(graph, costs, memory_limit=[7, 7, 5, 7])


def test_waiting_gradients_count() -> None:
    """A gradient that waits for its reduction is allocated by a backward."""
    graph = ps.lower(ps.schedule("gpipe", 1, 2), n_replicas=2, grad_sync="every")
    costs = ps.Costs(1, 2, parameter_bytes=8, reduce_grad=9)
    assert ps.simulate(graph, costs, memory_limit=24).memory.fits is True
    with pytest.warns(
        MemoryLimitWarning, match=r"device 0 needs 24.0 B of 23.0 B.*from task 0B0 on"
    ):
        ps.simulate(graph, costs, memory_limit=23)


def test_the_reserve_of_the_allocator_counts() -> None:
    """An eighth more than the tensors' bytes; workspace is part of the peak."""
    costs = replace(COSTS, memory_reserve=0.125)
    assert quiet([18, 33.75], costs).memory.fits is True
    with pytest.warns(MemoryLimitWarning, match=r"needs 33.8 B of 33.0 B.*; 0.125 of the tensors'"):
        ps.simulate(GRAPH, costs, memory_limit=33)
    assert quiet([18, 33.75], costs).memory.peak.tolist() == PEAK
    working = replace(COSTS, backward_workspace_bytes=7)
    assert quiet([23, 37], working).memory.fits is True
    with pytest.warns(
        MemoryLimitWarning, match=r"device 1 needs 37.0 B of 36.0 B.*from task 1B1 on"
    ):
        ps.simulate(GRAPH, working, memory_limit=36)


@pytest.mark.parametrize(
    ("limit", "match"),
    [
        (-1, r"memory_limit must be bytes >= 0, got -1"),
        (float("nan"), "got nan"),
        ([16, -30], r"memory_limit of device 1 must be bytes >= 0, got -30"),
        ([16, "30 cows"], "memory_limit must be bytes such as 80e9 or 80GiB, got '30 cows'"),
        ([16], "memory_limit has 1 values for 2 devices; give one number, or one a device"),
        (True, "got True"),
        ("80 Gi", "must be bytes such as 80e9 or 80GiB, got '80 Gi'; units are B, kB, MB"),
        ({0: 1, 1: 2}, "must be a list"),
        (np.array(-1.0), "got -1.0"),
    ],
)
def test_bad_limits(limit: Any, match: str) -> None:
    """Every message has the value, and the device if there are several."""
    with pytest.raises(ArgumentError, match=match):
        ps.simulate(GRAPH, COSTS, memory_limit=limit)
    with pytest.raises(ArgumentError, match=match):
        replace(quiet(None), limits=limit)
    with pytest.raises(ArgumentError, match=match):
        ps.compare({"x": quiet(None)}, memory_limit=limit)


def test_nothing_is_known_without_bytes() -> None:
    """A limit that was asked for is refused; the GPU's own limits nothing."""
    with pytest.raises(CostsError, match="memory_limit is given, but the costs have no bytes"):
        ps.simulate(GRAPH, ps.Costs(1, 2, output_bytes=8), memory_limit=80e9)
    tasks = TaskCosts.of_tasks(COSTS.of(GRAPH).per_task().table)
    with pytest.raises(CostsError, match="the costs have no bytes"):
        ps.simulate(GRAPH, tasks, memory_limit=80e9)
    timeline = quiet(None, ps.Costs(1, 2, workload=WORKLOAD))
    assert timeline.memory.fits is None
    assert timeline.memory.limit is not None
    assert quiet(None).memory.fits is None
    assert quiet(None).memory.limit is None
    assert replace(quiet(30), costs=None).memory.fits is None


def test_memory_of_the_gpu_is_the_default(tmp_path: Path) -> None:
    """It belongs to the costs: other costs have another GPU, and files keep none."""
    costs = replace(COSTS, workload=WORKLOAD)
    timeline = quiet(None, costs)
    assert timeline.memory.limit is not None
    assert timeline.memory.limit.tolist() == [30, 30]
    assert timeline.memory.fits is True
    small = replace(costs, workload=replace(WORKLOAD, memory=29))
    assert replace(timeline, costs=small).memory.fits is False
    assert quiet(31, small).memory.fits is True, "an explicit limit comes first"
    timeline.save(tmp_path / "timeline.csv")
    assert ps.Timeline.load(tmp_path / "timeline.csv").memory.limit is None
    assert ps.Timeline.load(tmp_path / "timeline.csv", costs=small).memory.fits is False
    with pytest.warns(MemoryLimitWarning):
        ps.simulate(GRAPH, small)


def test_scenarios_warn_once() -> None:
    """Not once a scenario."""
    costs = replace(COSTS, workload=replace(WORKLOAD, memory=29))
    noise = ps.Noise(task=LogNormal(0.1), seed=0)
    with pytest.warns(MemoryLimitWarning) as caught:
        ps.simulate_many(GRAPH, costs, noise, 8, progress=False)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_analysis_does_not_warn() -> None:
    """A replay and an audit simulate much; the user has had the warning."""
    costs = replace(COSTS, workload=replace(WORKLOAD, memory=29))
    with pytest.warns(MemoryLimitWarning):
        timeline = ps.simulate(GRAPH, costs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemoryLimitWarning)
        assert ps.replay(timeline).makespan == timeline.makespan
        ps.audit(GRAPH, costs)
        ps.Costs.from_timeline(timeline)


def test_tokens_and_flops_by_hand() -> None:
    """2 micro-batches take 9 s on 2 devices of 2 GPUs each, which could do 36 FLOPs in that time.

    2 * 8 tokens are in 9 s, and 2 * 6 FLOPs of 36.
    """
    timeline = quiet(None, replace(COSTS, workload=WORKLOAD))
    assert timeline.makespan == 9
    assert timeline.tokens_per_second == pytest.approx(16 / 9)
    assert timeline.mfu() == pytest.approx(12 / 36)
    assert timeline.mfu(peak_flops=2) == pytest.approx(12 / 72)
    assert quiet(None).mfu(WORKLOAD) == timeline.mfu()


def test_a_utilization_that_no_gpu_reaches() -> None:
    """A warning above 1, an error for an infinite one."""
    timeline = quiet(None, replace(COSTS, workload=WORKLOAD))
    with pytest.warns(
        CostsWarning, match=r"is 4, above 1: .* peak_flops \(0.0833333 FLOP/s"
    ) as caught:
        assert timeline.mfu(peak_flops=1 / 12) == pytest.approx(4)
    assert caught[0].filename == __file__
    with pytest.raises(ArgumentError, match=r"would be inf: peak_flops=9\.99989e-321 is"):
        timeline.mfu(peak_flops=1e-320)


def test_replicas_and_recompute_in_mfu() -> None:
    """Replicas double the tokens and the GPUs; recompute takes time and adds no model FLOPs."""
    costs = ps.Costs(1, 2, workload=replace(WORKLOAD, gpus_per_device=1))
    two = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2), n_replicas=2), costs)
    one = ps.simulate(GRAPH, costs)
    assert two.makespan == one.makespan == 9
    assert two.tokens_per_second == 2 * one.tokens_per_second
    assert two.mfu() == one.mfu() == pytest.approx(12 / 18)
    again = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2), recompute="always"), costs)
    assert again.makespan == 11
    assert again.mfu() == pytest.approx(12 / 22)
    both = ps.simulate(ps.lower(ps.schedule("chimera", 2, 2)), costs)
    assert both.mfu() == pytest.approx(12 / (2 * both.makespan)), "two paths, one model each"


def test_unknown_workload_and_peak() -> None:
    """The message says what to give."""
    timeline = quiet(None)
    for call in (lambda: timeline.tokens_per_second, timeline.mfu):
        with pytest.raises(TimelineError, match=r"'gpipe' has no workload.*Costs\(workload="):
            call()
    with pytest.raises(TimelineError, match="no workload"):
        timeline.mfu(peak_flops=1e12)
    bare = Workload(tokens=8, flops=6)
    with pytest.raises(ArgumentError, match=r"has no peak_flops; give mfu\(peak_flops="):
        timeline.mfu(bare)
    for peak in (0, -1, float("nan"), float("inf"), "1e12"):
        with pytest.raises(ArgumentError, match="peak_flops must be finite FLOP/s above 0"):
            timeline.mfu(bare, peak_flops=peak)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"workload must be a pipesim\.costs\.Workload"):
        timeline.mfu({"tokens": 8, "flops": 6})  # type: ignore[arg-type]


def test_columns_of_comparisons() -> None:
    """Each column is there if a timeline has its value; others are missing."""
    plain = quiet(None)
    assert not {"fits", "memory_limit", "tokens_per_second", "mfu"} & {*ps.compare({"x": plain})}
    table = ps.compare({"x": plain, "y": quiet([16, 31], replace(COSTS, workload=WORKLOAD))})
    assert list(table.columns[-5:]) == [
        *("memory_limit", "fits", "tokens_per_second", "mfu", "gap"),
    ]
    assert table.loc["x", ["memory_limit", "fits", "tokens_per_second", "mfu"]].isna().all()
    assert table.loc["y", "memory_limit"] == 16, "the device with the least room"
    assert table.loc["y", "fits"] is np.True_ or table.loc["y", "fits"] is True
    assert table.loc["y", "mfu"] == pytest.approx(12 / 36)
    table = ps.compare({"x": plain, "y": quiet(99)}, memory_limit=29)
    assert table["memory_limit"].tolist() == [29, 29]
    assert table["fits"].tolist() == [False, False]


def test_sweeps_have_columns_and_no_warnings() -> None:
    """One for each value that a row has; rows without stay empty."""
    base = {"n_devices": 2, "n_microbatches": 2, "costs": COSTS}
    rows = [{"schedule": "gpipe"}, {"schedule": "gpipe", "workload": WORKLOAD}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = ps.sweep(rows, base=base, n_jobs=1, progress=False)
        bare = ps.sweep(rows[:1], base=base, n_jobs=1, progress=False)
    assert table["memory_limit"].tolist()[1] == 30
    assert table["fits"].isna().tolist() == [True, False]
    assert table["fits"][1]
    assert table["mfu"][1] == pytest.approx(12 / 36)
    assert "fits" not in bare


def test_rounding_is_no_excess() -> None:
    """Thirds of activations add up to the limit but for the last bit."""
    limit = 10 << 30
    costs = ps.Costs(
        forward=2 / 3, input_grad=2 / 3, weight_grad=0.5, activation_bytes=(1 << 30) / 3,
        weight_grad_bytes=(1 << 29) / 3,
    )  # fmt: skip
    order = ps.order_by(ps.Placement.looped(8, 3), 16, costs, memory_limit=limit)
    timeline = ps.simulate(ps.lower(order), costs, memory_limit=limit)
    assert timeline.memory.peak.max() > limit
    assert timeline.memory.fits
