"""Steps ``features`` and ``instrument`` of ``make gpu``."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gpu_modules import part

import pipesim as ps

pytestmark = [
    pytest.mark.usefixtures("gpu_script"),
    pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning"),
]


def new_bench(folder: Path) -> Any:
    return part("bench").Bench(folder, dry=True)


def new_report(folder: Path, *, dry: bool = True) -> Any:
    return part("report").Report(folder / "text.txt", dry=dry)


def rows(report: Any, kind: str) -> list[dict[str, Any]]:
    """Return the rows of a table."""
    records = map(json.loads, report.records.read_text().splitlines())
    return [row for row in records if row["kind"] == kind]


# Features


@pytest.mark.slow
def test_features_agree_in_a_dry_run(tmp_path: Path) -> None:
    """To the last bit, as both sides are CPU workers with one thread."""
    module, report = part("features"), new_report(tmp_path)
    module.features(new_bench(tmp_path), report)
    assert not report.missed
    table = rows(report, "features")
    assert [row["feature"] for row in table] == list(module.FEATURES)
    assert all(row["error"] == 0.0 and row["seconds"] > 0 for row in table)


def test_ten_features_are_compared() -> None:
    """Those that matter most first; the names are those of the table in the results."""
    assert list(part("features").FEATURES) == [
        "px.split", "px.train", "clipped gradients", "experts", "offload", "sequence slices",
        "tied parameters", "gradient scaler", "accumulate=True", "host threads",
    ]  # fmt: skip


def raises(_: object) -> list[torch.Tensor]:
    raise ValueError("no such feature")


def test_a_feature_that_raises_costs_only_itself(tmp_path: Path) -> None:
    module, report = part("features"), new_report(tmp_path)
    module.FEATURES = {"bad": raises, "good": lambda _: [torch.ones(2)]}
    module.features(new_bench(tmp_path), report)
    assert report.missed == ["bad: ValueError: no such feature"]
    text = report.path.read_text()
    assert "in raises" in text  # the traceback
    assert "ok     good: 0.0e+00" in text
    assert [(x["feature"], x["error"]) for x in rows(report, "features")] == [
        ("bad", None), ("good", 0.0)
    ]  # fmt: skip


def test_a_feature_that_differs_is_a_missed_target(tmp_path: Path) -> None:
    """Already where gradients are clipped at a norm that is 1 % larger."""
    module, report = part("features"), new_report(tmp_path)
    graph = ps.lower(ps.schedule("zbv", 2, 4), grad_norm=True)

    def clipped(devices: Callable[[int], Any]) -> list[torch.Tensor]:
        norm = module._NORM * (1.0 if devices is module._cpu_workers else 1.01)
        stages, batch = module._dense(4), module._numbers()
        return module._run(devices, stages, graph, batch, max_grad_norm=norm)

    module.FEATURES = {"clipped": clipped}
    module.features(new_bench(tmp_path), report)
    (row,), (missed,) = rows(report, "features"), report.missed
    assert row["error"] > 10 * module.LIMIT
    assert missed.startswith(f"clipped: {row['error']:.1e} (limit 0.0002)")


def test_a_feature_of_nan_is_a_missed_target(tmp_path: Path) -> None:
    """Whichever tensor has it."""
    largest_difference = part("features").largest_difference
    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    for actual in ([good, bad, good], [bad, good, good], [good, good, bad]):
        assert not largest_difference(actual, [good] * 3) <= part("features").LIMIT


# Instrument


@pytest.mark.slow
def test_the_instrument_runs_in_a_dry_run(tmp_path: Path) -> None:
    module, report = part("instrument"), new_report(tmp_path)
    module.instrument(new_bench(tmp_path), report)
    assert not report.missed
    assert len(rows(report, "event-cost")) == 1
    assert report.path.read_text().count("left out") == 2  # graphs and contention


def test_a_part_that_raises_costs_only_itself(tmp_path: Path) -> None:
    module, report, called = part("instrument"), new_report(tmp_path), []
    module.cost_of_events = lambda *_: raises(None)
    for name in ("events_beside_cupti", "contention"):
        setattr(module, name, lambda *_, name=name: called.append(name))
    bench = new_bench(tmp_path)
    bench.release = lambda: 0  # collecting garbage takes a second here
    module.instrument(bench, report)
    assert report.missed == ["cost of events, eager: ValueError: no such feature"]
    assert called == ["events_beside_cupti", "contention"]


def trace_of(context: Callable[[int, int], int], late: float = 0.0) -> Any:
    """Return a Chrome trace of a step: two kernels a task, markers, and copies around them.

    Device and number of a task tell the context of its kernels. The last kernel is ``late`` by a
    share of the makespan.
    """
    timeline = timeline_of_step()
    graph, zero = timeline.graph, 5e8
    compute = importlib.import_module("pipesim.ops").COMPUTE
    own = sorted(graph.is_op(compute).nonzero()[0].tolist(), key=lambda task: timeline.end[task])
    events = [{"cat": "cpu_op", "ts": 0.0, "dur": 9.0, "name": "aten::mm", "args": {}}]

    def add(start: float, end: float, where: tuple[int, int], name: str) -> None:
        events.append({
            "cat": "gpu_memcpy" if name == "Memcpy" else "kernel", "name": name,
            "ts": zero + start * 1e6, "dur": (end - start) * 1e6,
            "args": {"context": where[0], "stream": where[1]},
        })  # fmt: skip

    for begin in (-60.0, -10.0):  # of two steps; the first one has no other kernels here
        add(begin, begin + 1, (1, 7), "Memcpy")
        add(begin + 2, begin + 3, (1, 7), "void spin_kernel(long)")
        add(begin + 40, begin + 41, (1, 7), "void spin_kernel(long)")
    add(32.0, 33.0, (1, 7), "losses")
    for number, task in enumerate(own):
        start, end = timeline.start[task], timeline.end[task]
        end += late * timeline.makespan if task == own[-1] else 0.0
        where = context(int(graph.device[task]), number), 13
        add(start, (start + end) / 2, where, "first")
        add((start + end) / 2, end, where, "second")
    return {"traceEvents": events}


def timeline_of_step() -> ps.Timeline:
    costs = ps.Costs(forward=1.0, backward=2.0, optimizer_step=0.5)
    return ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4)), costs)


def spans_of(trace: Any) -> Any:
    module = part("instrument")
    kernels = module.between_markers(module.kernels_of(trace))
    return module.spans(timeline_of_step(), kernels)


def test_kernels_are_compared_with_tasks(tmp_path: Path) -> None:
    """Streams of two contexts have one number, and are told apart."""
    spans, report = spans_of(trace_of(lambda device, _: device)), new_report(tmp_path)
    assert [span.device for span in spans] == [None, 0, 1]
    n_tasks = 2 * 4 * 2 + 2  # forwards, backwards, steps of the optimizer
    assert [span.n_kernels for span in spans] == [2 * n_tasks, n_tasks, n_tasks]
    for span in spans:
        assert span.error == pytest.approx(0.0, abs=1e-6)
        assert span.filled == pytest.approx(1.0)
    assert [span.inside for span in spans[1:]] == pytest.approx([1.0, 1.0])
    part("instrument").report_spans(report, spans, cuda_graph=False)
    assert [row["device"] for row in rows(report, "instrument")] == [None, 0, 1]
    assert not report.missed


def test_late_kernels_are_a_missed_target(tmp_path: Path) -> None:
    """By 2 % of the makespan."""
    report = new_report(tmp_path, dry=False)
    spans = spans_of(trace_of(lambda device, _: device, late=0.02))
    assert spans[0].error == pytest.approx(0.02)
    part("instrument").report_spans(report, spans, cuda_graph=True)
    assert report.missed[0].startswith("all: makespan by CUPTI")
    assert "+2.00% (target 1%)" in report.missed[0]


@pytest.mark.parametrize(
    "context",
    [lambda *_: 1, lambda device, number: device if number % 4 else 1 - device],
    ids=["one stream", "two streams of both devices"],
)
def test_streams_that_are_of_no_device_are_compared_together(
    tmp_path: Path, context: Callable[[int, int], int]
) -> None:
    """As CUPTI may report kernels of a CUDA graph."""
    spans, report = spans_of(trace_of(context)), new_report(tmp_path)
    assert [span.device for span in spans] == [None]
    part("instrument").report_spans(report, spans, cuda_graph=True)
    assert "only the whole step is compared" in report.path.read_text()


def test_a_trace_without_kernels_is_an_error() -> None:
    """CUPTI may be busy, or missing."""
    with pytest.raises(RuntimeError, match="reported 0 kernels"):
        spans_of({"traceEvents": []})


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put the stand-in for CUDA in its place."""
    monkeypatch.delitem(sys.modules, "steps_on_stand_in", raising=False)
    module = importlib.import_module("steps_on_stand_in")
    monkeypatch.delitem(sys.modules, "steps_on_stand_in")  # it holds modules of this test
    for name in ("features", "instrument", "contention"):  # annotations name torch's own classes
        part(name)
    module.install(monkeypatch)
    return module


@pytest.mark.slow
def test_events_without_times_are_no_nodes(stand_in: ModuleType, tmp_path: Path) -> None:
    """Those with times are: two a task, and the zero of each device."""
    module, report = part("instrument"), new_report(tmp_path)
    module.node_counts = lambda graph: Counter(event_records=len(graph.nodes))
    module.cost_of_events(stand_in.Bench(tmp_path), report, True)
    n_tasks = rows(report, "event-cost")[0]["n_tasks"]
    counts = {row["events"]: row["event_records"] for row in rows(report, "graph-facts")}
    assert counts == {"with times": 2 * n_tasks + 2, "without times": 0}
    assert not report.missed


@pytest.mark.slow
def test_a_part_that_raises_fails_its_step_on_the_stand_in(
    stand_in: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that is missed does not."""
    values = iter(torch.ones(2) * k for k in range(1, 10))
    table = {"differs": lambda _: [next(values)]}
    monkeypatch.setattr(part("features"), "FEATURES", table)
    assert stand_in.run("features", tmp_path) == ""
    assert "MISSED differs: 5.0e-01" in (tmp_path / "features.txt").read_text()
    table["bad"] = raises
    assert stand_in.run("features", tmp_path) == "bad: ValueError: no such feature"


@pytest.mark.slow
@pytest.mark.parametrize("lacks_kernels", [True, False])
def test_the_stand_in_needs_no_kernels(
    stand_in: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks_kernels: bool
) -> None:
    """Whatever else a comparison with CUPTI raises fails the step."""

    def compare(*_: object) -> None:
        if lacks_kernels:
            spans_of({"traceEvents": []})
        raises(None)

    for name in ("cost_of_events", "contention"):
        monkeypatch.setattr(part("instrument"), name, lambda *_: None)
    monkeypatch.setattr(part("instrument"), "events_beside_cupti", compare)
    names = [] if lacks_kernels else ["eager", "graph"]
    assert stand_in.run("instrument", tmp_path).splitlines() == [
        f"events beside CUPTI, {name}: ValueError: no such feature" for name in names
    ]
    assert (tmp_path / "instrument.txt").read_text().count("MISSED events beside CUPTI") == 2


@pytest.mark.slow
def test_contention_runs_on_the_stand_in(stand_in: ModuleType, tmp_path: Path) -> None:
    module, report = part("contention"), new_report(tmp_path)
    module.contention(stand_in.Bench(tmp_path), report, 2)
    table = rows(report, "contention")
    assert [row["slices"] for row in table] == [2] * 5
    assert all(row["ratio"] > 0 and row["rate_alone"] > 0 for row in table)
