"""Schedules beside each other, and a prediction beside a measurement."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from strategies import cases
from tracing import traced, write

import pipesim as ps
from pipesim.errors import ArgumentError, CostsWarning, TimelineError
from pipesim.graph import Tasks


def run(name: str, m: int = 4, **costs: Any) -> ps.Timeline:
    """Simulate a schedule on two devices."""
    return ps.simulate(ps.lower(ps.schedule(name, 2, m)), ps.Costs(1, 2, **costs))


def measured(timeline: ps.Timeline, factor: float = 1.0) -> ps.Timeline:
    """Return the same tasks with other times."""
    return replace(timeline, start=timeline.start * factor, end=timeline.end * factor)


def test_table() -> None:
    """One row a timeline, in the order given; the first is what the others are relative to."""
    table = ps.compare(
        {"b": run("gpipe", activation_bytes=8), "a": run("1f1b", m=8, activation_bytes=8)}
    )
    assert table.index.tolist() == ["b", "a"]
    assert table.index.name == "schedule"
    assert list(table.columns) == [
        "makespan", "relative", "bubble_fraction", "throughput", "peak_memory", "gap"
    ]  # fmt: skip
    assert table.loc["b"].tolist() == [15, 1, 1 / 5, 4 / 15, 32, 0]
    assert table.loc["a"].tolist() == [27, 27 / 15, 1 / 9, 8 / 27, 16, 0]


def test_table_without_costs() -> None:
    """Memory is not known, nor with costs without bytes; the rest is."""
    table = ps.compare({"mine": replace(run("gpipe"), costs=None), "no bytes": run("gpipe")})
    assert table["peak_memory"].isna().all()
    assert table["makespan"].tolist() == [15, 15]


def test_table_of_nothing_that_took_time() -> None:
    """No division by zero."""
    table = ps.compare({"mine": measured(run("gpipe"), 0.0)})
    assert math.isnan(table.loc["mine", "relative"])


@pytest.mark.parametrize("things", [{}, None, [], 3, "gpipe"])
def test_nothing_to_compare(things: Any) -> None:
    """A mapping with at least one timeline; a bare timeline or a list has no names."""
    with pytest.raises(ArgumentError, match="compare takes a mapping of names to timelines with"):
        ps.compare(things)


def test_list_of_timelines() -> None:
    """They have no names to list them by."""
    with pytest.raises(ArgumentError, match="compare takes a mapping"):
        ps.compare([run("gpipe")])  # type: ignore[arg-type]


@pytest.mark.parametrize("thing", [None, 3, "t", ps.Costs(1, 1)])
def test_no_timelines(thing: Any) -> None:
    """The name of the one that is none."""
    with pytest.raises(ArgumentError, match=f"'bad' is no Timeline but {type(thing).__name__}"):
        ps.compare({"good": run("gpipe"), "bad": thing})
    with pytest.raises(ArgumentError, match=r"predicted must be a pipesim\.Timeline, got"):
        ps.Comparison(predicted=thing, measured=run("gpipe"))
    with pytest.raises(ArgumentError, match=r"measured must be a pipesim\.Timeline, got"):
        ps.Comparison(predicted=run("gpipe"), measured=thing)


def test_comparison() -> None:
    """Signed and relative: a run that took longer than predicted is an error below zero."""
    predicted = run("gpipe")
    comparison = ps.Comparison(predicted=predicted, measured=measured(predicted, 1.25))
    assert comparison.makespan_error == 15 / 18.75 - 1
    assert "error -20.0%" in repr(comparison)
    by_op = comparison.by_op
    assert by_op.loc["F"].tolist() == [8, 1, 1.25, 1 / 1.25 - 1]
    assert by_op.loc["B"].tolist() == [8, 2, 2.5, 1 / 1.25 - 1]
    assert by_op.index.name == "op"


@pytest.mark.slow
@given(cases())
def test_of_itself(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Nothing is wrong, for every operation that takes time."""
    graph, costs = case
    timeline = ps.simulate(graph, costs)
    comparison = ps.Comparison(predicted=timeline, measured=timeline)
    assert comparison.makespan_error == 0 or timeline.makespan == 0
    assert comparison.by_op["count"].sum() == len(graph)
    assert comparison.by_op["error"].dropna().eq(0).all()


def test_of_a_saved_run(tmp_path: Path) -> None:
    """The same tasks, in another graph."""
    predicted = run("1f1b")
    measured(predicted, 2.0).save(tmp_path / "timeline.csv")
    loaded = ps.Timeline.load(tmp_path / "timeline.csv")
    assert ps.Comparison(predicted=predicted, measured=loaded).makespan_error == -0.5


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            ps.lower(ps.schedule("gpipe", 2, 5)),
            "tasks: 0F4 on device 0, .* and 5 more are only in the measured one; simulate",
        ),
        (
            ps.lower(ps.schedule("gpipe", 2, 3)),
            "tasks: 0F3 on device 0, .* and 5 more are only in the predicted one; simulate the g",
        ),
        (
            ps.lower(ps.schedule("gpipe", 2, 4), recompute="always"),
            "tasks: .*0R.* on device 0, .* are only in the measured one; simulate the graph",
        ),
        (
            ps.lower(ps.schedule("gpipe", 2, 4), n_replicas=2),
            r"tasks: .* on device \d \(replica 1\).* are only in the measured one; simulate",
        ),
    ],
    ids=["more micro-batches", "fewer micro-batches", "recompute", "replicas"],
)
def test_of_different_tasks(other: ps.TaskGraph, message: str) -> None:
    """Both graphs are shown, some of the tasks, and what to do."""
    predicted = run("gpipe")
    other_run = ps.simulate(other, ps.Costs(1, 2))
    with pytest.raises(TimelineError, match=rf"predicted \(<.*measured \(<.*same {message}"):
        ps.Comparison(predicted, other_run)
    assert (
        ps.Comparison(ps.simulate(other_run.graph, ps.Costs(1, 2)), other_run).makespan_error == 0
    )


def test_of_tasks_on_other_devices() -> None:
    """A task on another device is another one."""
    columns = {"op": [ps.Op.F, ps.Op.B], "stage": [0, 0], "microbatch": [0, 0], "stream": [0, 0]}
    one, other = (
        ps.simulate(ps.TaskGraph.build(Tasks(device=[k, k], **columns)), ps.Costs(1, 2))
        for k in range(2)
    )
    with pytest.raises(TimelineError, match="0F0 on device 0, 0B0 on device 0 are only in the pre"):
        ps.Comparison(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        ps.lower(ps.schedule("1f1b", 2, 4)),
        ps.lower(ps.schedule("gpipe", 2, 4), overlap=False),
        ps.lower(ps.schedule("gpipe", 2, 4, backward_order="forward")),
    ],
    ids=["schedule", "overlap", "order"],
)
def test_of_tasks_in_another_order(other: ps.TaskGraph, tmp_path: Path) -> None:
    """Each task is beside itself, so that no duration differs."""
    costs = ps.Costs(np.arange(1.0, 9).reshape(2, 4), np.arange(11.0, 19).reshape(2, 4))
    predicted = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 4)), costs)
    measured = ps.simulate(other, costs)
    comparison = ps.Comparison(predicted, measured)
    assert comparison.measured is measured
    assert comparison.matched.graph is predicted.graph
    assert comparison.matched.duration.tolist() == predicted.duration.tolist()
    assert comparison.matched.makespan == measured.makespan
    assert comparison.by_op["error"].abs().max() == 0
    parts = comparison.error_parts()
    assert parts.sum() == pytest.approx(predicted.makespan - measured.makespan)
    assert parts["durations"] == parts["spread"] == 0
    comparison.plot()
    comparison.to_html(tmp_path / "both.html")
    assert comparison._repr_html_()


def test_of_a_trace_of_the_same_schedule(tmp_path: Path) -> None:
    """A simulated 1F1B lies over a trace of it, whose rows are in order of time."""
    predicted = ps.simulate(ps.lower(ps.schedule("1f1b", 3, 5)), ps.Costs(forward=1, backward=2))
    measured = ps.simulate(predicted.graph, ps.Costs(forward=[1, 1.5, 1], backward=2))
    ranks = write(tmp_path, traced(measured))
    read = ps.Timeline.from_chrome(ranks)
    assert [str(x) for x in read.frame["op"]] != [str(x) for x in predicted.frame["op"]]
    comparison = ps.Comparison(predicted, read)
    assert comparison.makespan_error == pytest.approx(predicted.makespan / measured.makespan - 1)
    by_row = comparison.matched.duration[predicted.graph.is_op(frozenset({ps.Op.F, ps.Op.B}))]
    expected = measured.duration[predicted.graph.is_op(frozenset({ps.Op.F, ps.Op.B}))]
    assert by_row == pytest.approx(expected)


def test_of_a_run_in_which_nothing_ran() -> None:
    """A step that failed at once."""
    predicted = run("gpipe")
    nothing = np.full(len(predicted), np.nan)
    comparison = ps.Comparison(predicted, replace(predicted, start=nothing, end=nothing))
    assert math.isnan(comparison.makespan_error)
    assert "nan" in repr(comparison)


SPLIT = ps.Costs(2, input_grad=2, weight_grad=2)


def _timeline(name: str, costs: ps.Costs = SPLIT) -> ps.Timeline:
    return ps.simulate(ps.lower(ps.schedule(name, 2, 4)), costs)


def test_models_of_other_sizes() -> None:
    """Twice the stages at the same costs a stage is twice the model."""
    with pytest.warns(CostsWarning, match="on 2 devices 'gpipe' 2 and 'zbv' 4 stages") as caught:
        ps.compare({"gpipe": _timeline("gpipe"), "zbv": _timeline("zbv")})
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shared = SPLIT.in_chunks(ps.Placement.v_shaped(2))
        ps.compare({"gpipe": _timeline("gpipe"), "zbv": _timeline("zbv", shared)})
        ps.compare({"gpipe": _timeline("gpipe"), "1f1b": _timeline("1f1b")})


def test_rows_of_a_file_are_models_too(tmp_path: Path) -> None:
    """Rows that a file holds take part in the warning; those of older files say no stages."""
    path = tmp_path / "rows.jsonl"
    base = {"n_devices": 2, "n_microbatches": 4, "forward": 2, "input_grad": 2, "weight_grad": 2}
    options: dict[str, Any] = {"base": base, "path": path, "n_jobs": 1, "progress": False}
    ps.sweep([{"schedule": "gpipe"}], **options)
    for _ in range(2):  # one row is read, then both
        with pytest.warns(CostsWarning, match="'gpipe' 2 and 'zbv' 4 stages"):
            ps.sweep({"schedule": ["gpipe", "zbv"]}, **options)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["graph.n_stages"], line["checksum"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.sweep({"schedule": ["gpipe", "zbv"]}, **options)
    path.write_text(json.dumps(lines[0] | {"graph.n_stages": "two"}) + "\n")
    with pytest.raises(ArgumentError, match=r"line 1: graph\.n_stages must be a whole number"):
        ps.sweep([{"schedule": "gpipe"}], **options)


def test_sweeps_of_models_of_other_sizes() -> None:
    """Unless the unit of costs is given; one a device makes the models equal."""
    fields = {"n_devices": 2, "n_microbatches": 4, "forward": 2, "input_grad": 2, "weight_grad": 2}
    options: dict[str, Any] = {"n_jobs": 1, "progress": False}
    grid = {"schedule": ["gpipe", "zbv"]}
    with pytest.warns(CostsWarning, match="'gpipe' 2 and 'zbv' 4 stages.*per=.device") as caught:
        ps.sweep(grid, base=fields, **options)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.sweep(grid, base={**fields, "per": "stage"}, **options)
        rows = [{"schedule": "gpipe"}, {"schedule": "zbv", "forward": 1}]
        ps.sweep(rows, base=fields, **options)
        table = ps.sweep(grid, base={**fields, "per": "device"}, **options)
    assert (table["makespan"] * (1 - table["bubble_fraction"])).tolist() == pytest.approx([24, 24])
