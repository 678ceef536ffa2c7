"""Timelines as Chrome traces: what Perfetto and HolisticTraceAnalysis are given."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from strategies import cases

import pipesim as ps
from pipesim.errors import ArgumentError, TimelineError
from pipesim.ops import SENDS


@pytest.fixture
def timeline() -> ps.Timeline:
    """One micro-batch, two stages; F 1 ms, B 2 ms, messages 0.25 ms after 0.5 ms of latency."""
    network = ps.Network(latency=0.5e-3, bandwidth=4e3)
    costs = ps.Costs(1e-3, 2e-3, output_bytes=1, activation_bytes=8, network=network)
    return ps.simulate(ps.lower(ps.schedule("gpipe", 2, 1), step="none"), costs)


def events(path: Path, ph: str) -> list[dict[str, Any]]:
    """Return a file's events of one kind."""
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return [event for event in content["traceEvents"] if event["ph"] == ph]


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    """Return a slice's start and end as a viewer reads them."""
    start, duration = (round(event[key] * 1e3) for key in ("ts", "dur"))
    return start, start + duration


def assert_nested(slices: list[dict[str, Any]]) -> None:
    """No slice of a thread begins before the one before it has ended."""
    threads = defaultdict(list)
    for row in slices:
        threads[row["pid"], row["tid"]].append(nanoseconds(row))
    for intervals in threads.values():
        intervals.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(intervals))


def test_by_hand(timeline: ps.Timeline, tmp_path: Path) -> None:
    """Names, times in microseconds, a process a device and a thread a stream."""
    timeline.to_chrome(tmp_path / "t.json")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(tmp_path / "t.json", "M")
             if e["name"] == "thread_name"}  # fmt: skip
    rows = [
        (e["name"], e["pid"], names[e["pid"], e["tid"]], e["ts"], e["dur"])
        for e in events(tmp_path / "t.json", "X")
    ]
    assert sorted(rows, key=lambda row: row[3]) == [
        ("0F0", 1, "compute", 0, 1000),
        ("0SEND_F0", 1, "send:1", 1000, 250),
        ("1RECV_F0", 2, "recv:0", 1500, 250),
        ("1F0", 2, "compute", 1750, 1000),
        ("1B0", 2, "compute", 2750, 2000),
        ("1SEND_B0", 2, "send:0", 4750, 250),
        ("0RECV_B0", 1, "recv:1", 5250, 250),
        ("0B0", 1, "compute", 5500, 2000),
    ]


def test_arrows_and_counters_by_hand(timeline: ps.Timeline, tmp_path: Path) -> None:
    """From each SEND to its RECV; the bytes of one micro-batch from its F to its B."""
    timeline.to_chrome(tmp_path / "t.json.gz")
    tails, heads = (events(tmp_path / "t.json.gz", ph) for ph in "sf")
    assert [(e["id"], e["pid"], e["ts"]) for e in tails] == [(1, 1, 1000), (5, 2, 4750)]
    assert [(e["id"], e["pid"], e["ts"]) for e in heads] == [(1, 2, 1500), (5, 1, 5250)]
    counters = events(tmp_path / "t.json.gz", "C")
    assert [(e["ts"], e["args"]["bytes"]) for e in counters if e["pid"] == 1] == [
        (0, 0), (0, 8), (1000, 8), (5500, 8), (7500, 0)
    ]  # fmt: skip
    replace(timeline, costs=None).to_chrome(tmp_path / "t.json")
    assert events(tmp_path / "t.json", "C") == []


def test_side_by_side(timeline: ps.Timeline, tmp_path: Path) -> None:
    """Processes of each timeline have numbers and names of their own, and so have arrows."""
    path = tmp_path / "t.json"
    ps.trace.save(path, {"predicted": timeline, "measured": timeline.with_name("other")})
    named = {e["pid"]: e["args"]["name"] for e in events(path, "M") if e["name"] == "process_name"}
    assert named == {
        1: "predicted: device 0",
        2: "predicted: device 1",
        1000: "measured: device 0",
        1001: "measured: device 1",
    }
    assert len({e["id"] for e in events(path, "s")}) == 4
    assert len(events(path, "X")) == 2 * len(timeline)
    ps.trace.save(path, [timeline, timeline])
    names = {e["args"]["name"] for e in events(path, "M") if e["name"] == "process_name"}
    assert names == {f"{name}: device {d}" for name in ("gpipe", "gpipe (2)") for d in (0, 1)}


@pytest.mark.slow
@given(case=cases())
def test_slices_nest_and_arrows_hold_on(
    case: tuple[ps.TaskGraph, ps.Costs], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On every stream of any timeline: a slice a task, an arrow a message, each end on a slice."""
    timeline = ps.simulate(*case)
    path = tmp_path_factory.mktemp("trace") / "t.json"
    timeline.to_chrome(path)
    slices = events(path, "X")
    assert len(slices) == len(timeline)
    assert_nested(slices)
    starts = {(e["pid"], e["tid"], e["ts"]) for e in slices}
    tails, heads = (events(path, ph) for ph in "sf")
    assert len(tails) == len(heads) == timeline.graph.is_op(SENDS).sum()
    assert all((e["pid"], e["tid"], e["ts"]) in starts for e in tails + heads)


def test_times_that_overlap_have_a_thread_more(timeline: ps.Timeline, tmp_path: Path) -> None:
    """As no simulation has them, but clocks of a run may."""
    start = np.where(timeline.graph.on_compute, 0.0, timeline.start)
    replace(timeline, start=start).to_chrome(tmp_path / "t.json")
    assert_nested(events(tmp_path / "t.json", "X"))
    names = [e["args"].get("name") for e in events(tmp_path / "t.json", "M")]
    assert "compute (2)" in names


def test_a_partial_timeline(timeline: ps.Timeline, tmp_path: Path) -> None:
    """Tasks that did not start are left out; one that did not end lasts to the end, and says so."""
    start, end = timeline.start.copy(), timeline.end.copy()
    start[5:], end[4:] = np.nan, np.nan
    replace(timeline, start=start, end=end).to_chrome(tmp_path / "t.json")
    slices = events(tmp_path / "t.json", "X")
    assert len(slices) == 5
    assert [e["name"] for e in slices if e["args"].get("unfinished")] == ["1B0"]
    assert len(events(tmp_path / "t.json", "s")) == 1


def test_slices_tell_their_task(tmp_path: Path) -> None:
    """Perfetto colours by category, and shows the arguments of a slice."""
    costs = ps.Costs(1, 2, output_bytes=8, activation_bytes=1)
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 2)), costs)
    ps.trace.save(tmp_path / "t.json", timeline)
    slices = {e["name"]: e for e in events(tmp_path / "t.json", "X")}
    forward, send = slices["1F1"], slices["0SEND_F1"]
    assert (forward["cat"], send["cat"]) == ("F", "SEND_F")
    arguments = {"operation": "F", "stage": 1, "microbatch": 1}
    assert forward["args"] == {"task": forward["args"]["task"], **arguments}
    assert send["args"]["nbytes"] == 8
    assert "microbatch" not in slices["0STEP"]["args"]


@pytest.mark.parametrize(
    ("path", "what", "message"),
    [
        ("t.txt", "timeline", r"ends in \.json or \.json\.gz, got .*t\.txt"),
        ("no/t.json", "timeline", "cannot write"),
        ("t.json", {"a": 3}, "'a' is no Timeline but int"),
        ("t.json", 3, "is no Timeline but int"),
        ("t.json", [], "at least one timeline"),
    ],
)
def test_what_cannot_be_written(
    timeline: ps.Timeline, tmp_path: Path, path: str, what: Any, message: str
) -> None:
    """Nothing is left behind."""
    with pytest.raises(ArgumentError, match=message):
        ps.trace.save(tmp_path / path, timeline if what == "timeline" else what)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"offload": "all"}, {"expert_layers": 1}])
def test_events_that_are_not_read_back(options: dict[str, Any], tmp_path: Path) -> None:
    """Their tasks would be missing, or on another stream."""
    network = ps.Network(host=ps.HostLink(latency=1, bandwidth=1))
    graph = ps.lower(ps.schedule("gpipe", 2, 4), **options)
    ps.simulate(graph, ps.Costs(1, 2, network=network)).to_chrome(tmp_path / "trace.json")
    with pytest.raises(TimelineError, match=r"and no argument but name"):
        ps.Timeline.from_chrome(tmp_path / "trace.json", gaps="charge")


def test_a_file_a_rank_for_hta(timeline: ps.Timeline, tmp_path: Path) -> None:
    """Its rank where HTA looks for it; kernels with stream, correlation and a launch each."""
    paths = ps.trace.hta.save(tmp_path / "hta", timeline)
    assert [path.name for path in paths] == ["rank0.json", "rank1.json"]
    for rank, path in enumerate(paths):
        lines = [line for line in path.read_text().splitlines() if re.search(r'"rank":\s+\d', line)]
        assert re.search(rf'"rank":\s+{rank}\b', lines[0])
        slices = events(path, "X")
        kernels = [e for e in slices if e["cat"] == "kernel"]
        launches = [e for e in slices if e["cat"] == "cuda_runtime"]
        assert len(kernels) == len(launches) == 4
        assert {e["args"]["correlation"] for e in kernels} == {
            e["args"]["correlation"] for e in launches
        }
        assert {e["args"]["stream"] for e in kernels} == {1, 2, 3}
        assert all(isinstance(e[key], int) for e in slices for key in ("ts", "dur"))
        for kernel in kernels:
            talks = re.match(r"nccl.*Kernel", kernel["name"]) is not None
            assert talks == ("SEND" in kernel["name"] or "RECV" in kernel["name"])
        assert_nested(kernels)


@pytest.mark.parametrize("what", [3, [3]])
def test_hta_takes_one_timeline(what: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="a trace is of a Timeline"):
        ps.trace.hta.save(tmp_path, what)


def test_hta_needs_a_directory(timeline: ps.Timeline, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot make the directory"):
        ps.trace.hta.save(tmp_path / "file", timeline)


@pytest.mark.hta
def test_hta_reads_it(timeline: ps.Timeline, tmp_path: Path) -> None:
    """Its breakdown has the seconds of each rank that ours has."""
    analysis = pytest.importorskip("hta.trace_analysis")
    ps.trace.hta.save(tmp_path, timeline)
    breakdown = analysis.TraceAnalysis(trace_dir=str(tmp_path)).get_temporal_breakdown(
        visualize=False
    )
    computed = breakdown.set_index("rank")["compute_time(us)"]
    assert computed.tolist() == pytest.approx((timeline.busy * 1e6).tolist())
