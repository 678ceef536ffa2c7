"""`Projection`: predictions, comparisons and plans from known layers; files."""

from __future__ import annotations

import pytest

import pipesim as ps
from pipeexec.projection import Projection
from pipesim.errors import (
    AccuracyWarning,
    ArgumentError,
    MemoryLimitWarning,
    PipeError,
    RunDirectoryError,
)

N = 8


def projection(memory: float = 1e9, seconds: float = 1.0, n_gpus: int = 4, **options) -> Projection:
    gpu = ps.GPU(flops=1e12, bandwidth=1e11, memory=memory)
    network = ps.Network(latency=1e-4, bandwidth=1e9)
    columns = {
        "forward": [seconds] * (N - 1) + [2 * seconds],
        "backward": [2 * seconds] * (N - 1) + [4 * seconds],
        "input_grad": [seconds] * (N - 1) + [2 * seconds],
        "weight_grad": [seconds] * (N - 1) + [2 * seconds],
        "output_bytes": [1e6] * (N - 1) + [0],
        "activation_bytes": [10.0] * N,
        "parameter_bytes": [100.0] * N,
    }
    joint = [[9.0 * (b - a + 1) + 1 for b in range(N)] for a in range(N)]
    joint = [[max(x, 0) for x in row] for row in joint]
    values = {
        "layers": ps.Layers(columns, "projection", joint),
        "modules": (*((f"block.{k}",) for k in range(N - 1)), ("norm", "head")),
        "n_blocks": (1,) * N,
        "cluster": ps.Cluster(n_gpus=n_gpus, gpu=gpu, network=network),
        "microbatch_size": 3,
        "device": "cpu",
        "launch": 1e-5,
        "spread": (0.1,) * N,
    }
    return Projection(**values | options)


def test_predictions_are_simulations():
    """Names, schedules and splits; the graph's options pass through."""
    example = projection()
    costs = example.costs([2, 2, 2, 2])
    assert costs.activation_bytes == (19, 19, 19, 19)
    schedule = ps.schedule("1f1b", 4, 6)
    graph = ps.lower(schedule, recompute="always")
    expected = ps.simulate(graph, costs)
    for order, counts in ((schedule, ()), ("1f1b", (4, 6))):
        timeline = example.predict(order, *counts, split=[2, 2, 2, 2], recompute="always")
        assert timeline.makespan == expected.makespan
        assert timeline.name == "1f1b"
        assert timeline.memory.fits
    assert (
        example.predict("1f1b", 4, 6).makespan
        < example.predict("1f1b", 4, 6, split=[1, 1, 1, 5]).makespan
    )
    assert example.predict("gpipe", 2, 4, n_replicas=2).n_devices == 4


def test_schedules_for_costs():
    """Schedules that take costs are ordered for those of the stages."""
    example = projection()
    placement = ps.schedule("zbv", 2, 6).placement
    costs = example.costs("balanced", placement=placement)
    expected = ps.simulate(ps.lower(ps.schedule("zbv", 2, 6, costs=costs)), costs)
    assert example.predict("zbv", 2, 6).makespan == expected.makespan


def test_blocks():
    example = projection(n_blocks=(0, 1, 1, 1, 1, 1, 1, 0))
    assert example.blocks([3, 5]) == [2, 4]
    assert example.blocks([1, 6, 1]) == [0, 6, 0]
    assert len(example.blocks("balanced", placement=ps.Placement.linear(4))) == 4


def test_compare():
    """Rows are predictions; options that a schedule does not take are left out."""
    example = projection(memory=1000.0)
    names = ["gpipe", "1f1b", "interleaved_1f1b"]
    table = example.compare([*names, ps.schedule("zb_h1", 2, 4)], 2, 8, n_chunks=2)
    assert list(table.index) == [*names, "zb_h1"]
    timeline = example.predict("1f1b", 2, 8)
    assert table.loc["1f1b", "makespan"] == timeline.makespan
    assert table.loc["1f1b", "samples_per_second"] == 24 / timeline.makespan
    assert table.loc["1f1b", "peak_memory"] == max(timeline.memory.peak)
    assert table["fits"].tolist() == [False, True, True, True]
    with pytest.warns(MemoryLimitWarning, match="needs"):
        assert not example.predict("gpipe", 2, 8).memory.fits


def test_plan():
    """A plan is that of the layers, for the profiled micro-batch alone."""
    example = projection()
    plans = example.plan(24, schedules=["1f1b", "gpipe"])
    same = ps.plan(example.layers, example.cluster, global_batch=24, microbatch_size=3,
                   schedules=["1f1b", "gpipe"])  # fmt: skip
    assert plans.table.equals(same.table)
    assert set(plans.table["microbatch_size"]) == {3}
    with pytest.raises(ArgumentError, match="microbatch_size=6, but layers were profiled with 3"):
        example.plan(24, microbatch_size=6)


def test_tied_parameters():
    """Stages with copies of a parameter sum its gradients, in a task of the graph."""
    example = projection(tied=(((0, 7), 400.0), ((2, 3), 100.0), ((2, 7), 50.0)))
    assert example.costs([4, 4]).tied_bytes == (450,)
    assert example.costs([8]).tied_bytes == 0
    assert example.costs([3, 5]).tied_bytes == (550,)
    assert example.costs([1, 2, 5]).tied_bytes == (400, 150)
    assert example.tied_stages([1, 2, 5]) == ((0, 2), (1, 2))
    timeline = example.predict("1f1b", 2, 4, split=[4, 4])
    assert timeline.graph.tied == ((0, 1),)
    assert timeline.makespan > projection().predict("1f1b", 2, 4, split=[4, 4]).makespan


def test_projections_in_notebooks():
    """Units, and the first layers of many."""
    html = projection()._repr_html_()
    assert html.count("<tr>") == 1 + N
    assert "1.00 s" in html or "1 s" in html
    assert "block.0" in html


def test_short_tasks_warn():
    with pytest.warns(AccuracyWarning, match=r"F of stage 0 takes 0.400 ms: below 1 ms"):
        projection(seconds=1e-4).predict("1f1b", 2, 4, split=[4, 4])
    gpu = projection(seconds=1e-4, device="cuda:0")
    gpu.predict("1f1b", 2, 4)  # launches of a GPU are costs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.predict("1f1b", 8, 4), "8 devices, but the cluster 4 GPUs"),
        (lambda x: x.predict("gpipe", 2, 4, n_replicas=4), "8 devices, but the cluster 4"),
        (
            lambda x: x.predict("interleaved_1f1b", 4, 8, n_chunks=3),
            "the schedule has 12 stages, but the model 8 layers",
        ),
        (lambda x: x.costs(9), "split"),
        (lambda x: x.predict("1f1b", 2, 4, split=[3, 3]), "sums to 6 layers"),
        (lambda x: x.predict("1f1b", 2, 4, split=[3, 3, 2]), "3 values for 2 stages"),
        (lambda x: x.predict("1f1b", 2), "n_microbatches must be a whole number"),
        (lambda x: x.predict(ps.schedule("1f1b", 2, 4), 2), "n_devices is given"),
        (lambda x: x.predict("1f2b", 2, 4), "unknown schedule"),
        (lambda x: x.predict("seq1f1b", 2, 4), "'seq1f1b' runs slices of sequences"),
        (lambda x: x.predict(3, 2, 4), "schedule must be"),
        (lambda x: x.compare([], 2, 4), "schedules is empty"),
        (lambda x: x.compare("1f1b", 2, 4), "schedules must be a list"),
    ],
)
def test_refused(call, message):
    with pytest.raises(PipeError, match=message):
        call(projection())


def test_files(tmp_path):
    """A loaded projection is the saved one; other runs and edited files are refused."""
    example = projection(tied=(((0, 7), 400.0),))
    example.save(tmp_path / "run", record={"note": 1})
    again = Projection.load(tmp_path / "run")
    assert again.layers == example.layers
    assert again.table.equals(example.table)
    names = (
        "modules",
        "n_blocks",
        "cluster",
        "microbatch_size",
        "device",
        "launch",
        "spread",
        "tied",
    )
    for name in names:
        assert getattr(again, name) == getattr(example, name)
    assert again.predict("1f1b", 2, 4).makespan == example.predict("1f1b", 2, 4).makespan
    (tmp_path / "run" / "joint.csv").write_text("1,2\n")
    with pytest.raises(RunDirectoryError, match="does not match its checksum"):
        Projection.load(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="no whole run directory"):
        Projection.load(tmp_path / "missing")


def test_other_runs(tmp_path):
    from pipeexec.run_directory import write_directory

    with write_directory(tmp_path / "run", {}):
        pass
    with pytest.raises(RunDirectoryError, match="holds no projection"):
        Projection.load(tmp_path / "run")
    with write_directory(tmp_path / "bad", {"projection": {"modules": 3}}):
        pass
    with pytest.raises(RunDirectoryError, match="holds no whole projection"):
        Projection.load(tmp_path / "bad")
