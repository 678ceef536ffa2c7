"""Traces of odd shapes: several ranks in a file, empty ranges, damaged heads, slow patterns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import named_schedules
from tracing import Event, event, ranges, write

import pipesim as ps
from pipesim.errors import ArgumentError, TimelineError
from pipesim.ops import COMPUTE
from pipesim.trace.chrome_import import load

#: The names that `Timeline.to_chrome` writes.
OURS = r"(?P<stage>\d+)(?P<op>[A-Z_]+)(?P<microbatch>\d*)"
GPIPE_1 = (ranges("0F0 . . 0B0"), ranges(". 1F0 1B0"))


def in_process(events: list[Event], pid: object) -> list[Event]:
    """Return the same events of another process."""
    return [{**row, "pid": pid} for row in events]


def one_file(directory: Path, events: list[Event], **head: Any) -> Path:
    """Write a file that says of itself what is in ``head``."""
    path = directory / "all.json"
    path.write_text(json.dumps({"traceEvents": events, **head}))
    return path


def microseconds(timeline: ps.Timeline) -> dict[str, tuple[float, float]]:
    """Return start and end of each compute task, by its action."""
    return {
        str(timeline.graph.task(k)): (timeline.start[k] * 1e6, timeline.end[k] * 1e6)
        for k in np.flatnonzero(timeline.graph.is_op(COMPUTE)).tolist()
    }


@pytest.mark.parametrize("pids", [(0, 1), (9, 10), ("first", "second"), (3, "other")])
def test_a_process_a_rank(tmp_path: Path, pids: tuple[object, object]) -> None:
    """In order of number, then of name; other processes than those with ranges are no ranks."""
    events = [*in_process(GPIPE_1[1], pids[1]), *in_process(GPIPE_1[0], pids[0])]
    path = one_file(tmp_path, [*events, {**event("data", 0, 5), "pid": 5}])
    timeline = ps.Timeline.from_chrome(path)
    assert timeline.n_devices == 2
    assert microseconds(timeline)["1B0"] == pytest.approx((20, 30))
    assert timeline.graph.device_of_stage.tolist() == [0, 1]


def test_a_stage_a_process(tmp_path: Path) -> None:
    """Names without a stage have that of their process."""
    first = [event("Forward 0", 0, 10), event("Backward 0", 30, 40)]
    second = [event("Forward 0", 10, 20), event("Backward 0", 20, 30)]
    path = one_file(tmp_path, [*in_process(first, 4), *in_process(second, 5)])
    assert microseconds(ps.Timeline.from_chrome(path))["1F0"] == pytest.approx((10, 20))


def launched(correlation: int, pid: int, start: float) -> list[Event]:
    """Return a launch of a process, and a kernel of 5 us of that number on a GPU."""
    launch = event("cudaLaunchKernel", start, start + 1, "cuda_runtime", correlation=correlation)
    kernel = event("gemm", start + 2, start + 7, "kernel", tid=99, correlation=correlation)
    return [{**launch, "pid": pid}, {**kernel, "pid": 0}]


def test_kernels_of_processes(tmp_path: Path) -> None:
    """They are of the process that launched them; those of two with one number are refused."""
    events = [*in_process(GPIPE_1[0], 1), *in_process(GPIPE_1[1], 2)]
    path = one_file(tmp_path, [*events, *launched(7, 1, 1), *launched(8, 2, 11)])
    times = microseconds(ps.Timeline.from_chrome(path))
    assert times["0F0"] == pytest.approx((0, 5))
    assert times["1F0"] == pytest.approx((10, 15))
    path = one_file(tmp_path, [*events, *launched(7, 1, 1), *launched(7, 2, 11)])
    with pytest.raises(TimelineError, match=r"processes 1 and 2 .* correlation, 7, .* one file a"):
        ps.Timeline.from_chrome(path)


@pytest.mark.slow
@given(schedule=named_schedules(4), latency=st.sampled_from([0.0, 3e-4]))
def test_our_own_file_comes_back(
    tmp_path_factory: pytest.TempPathFactory, schedule: ps.Schedule, latency: float
) -> None:
    """What `to_chrome` wrote of a simulation: the same compute tasks at the same times."""
    if schedule.placement.n_paths > 1:
        return
    costs = ps.Costs(1e-3, 2e-3, 1e-3, 1e-3, network=ps.Network(latency=latency))
    step = "none" if schedule.n_batches > 1 else "flush"
    graph = ps.lower(schedule, hosts="per_device", step=step)  # type: ignore[arg-type]
    timeline = ps.simulate(graph, costs)
    path = tmp_path_factory.mktemp("trace") / "own.json"
    timeline.to_chrome(path)
    back = ps.Timeline.from_chrome(path, pattern=OURS)
    assert back.n_devices == timeline.n_devices
    expected, actual = microseconds(timeline), microseconds(back)
    assert expected.keys() == actual.keys()
    for name, times in expected.items():
        assert actual[name] == pytest.approx(times, abs=0.02)  # 1 ns a task that takes no time


def test_processes_and_files(tmp_path: Path) -> None:
    """One file with several ranks beside others of one each: the ranks are ambiguous."""
    paths = write(tmp_path, [[*GPIPE_1[0], *in_process(GPIPE_1[1], 8)], GPIPE_1[1]])
    with pytest.raises(TimelineError, match=r"rank0\.json has ranges of 2 processes, .* 2 files"):
        ps.Timeline.from_chrome(paths)


def test_threads_that_overlap(tmp_path: Path) -> None:
    """Two ranks in one process: their actions run at once; one rank may change its thread."""
    other = [{**row, "tid": 2} for row in ranges("1F0 1B0", start=5)]
    with pytest.raises(TimelineError, match=r"0F0 and 1F0 ran at the same time on threads 1 and 2"):
        ps.Timeline.from_chrome(one_file(tmp_path, [*GPIPE_1[0], *other]))
    other = [{**row, "tid": 2} for row in GPIPE_1[1]]
    timeline = ps.Timeline.from_chrome(one_file(tmp_path, [*GPIPE_1[0], *other]))
    assert timeline.n_devices == 1


def test_empty_ranges(tmp_path: Path) -> None:
    """An action that takes no time is there, before what starts at the same moment."""
    first = [event("PP:0F0", 0, 0), event("PP:0F1", 0, 10), *ranges("0B0 0B1", start=60)]
    second = [*ranges("1F0 1B0 1F1", start=10), event("PP:1B1", 40, 40)]
    times = microseconds(ps.Timeline.from_chrome(write(tmp_path, [first, second])))
    assert times["0F0"] == (0, 0)
    assert times["1B1"] == pytest.approx((40, 40))
    assert times["0B1"] == pytest.approx((70, 80))


def test_empty_ranges_come_first(tmp_path: Path) -> None:
    """Before an F that starts at that moment, be it of the same step or of the next."""
    once = [*ranges("0F0"), event("PP:0B0", 10, 10), *ranges("0F1", start=10)]
    again = [{**row, "ts": row["ts"] + 20} for row in once]
    ends = [event("PP:0B1", 20, 20), event("PP:0B1", 40, 40)]
    imported = load(write(tmp_path, [[*again, *ends, *once]]))
    assert imported.n_steps == 2
    assert list(microseconds(imported.timeline)) == ["0F0", "0B0", "0F1", "0B1"]


def test_an_empty_range_within_another(tmp_path: Path) -> None:
    """Torch's I of stage 0 may hold a W that takes no time."""
    first = [event("PP:0F0", 0, 10), event("PP:0I0", 30, 40), event("PP:0W0", 40, 40)]
    times = microseconds(ps.Timeline.from_chrome(write(tmp_path, [first, GPIPE_1[1]])))
    assert times["0I0"] == pytest.approx((30, 40))
    assert times["0W0"] == pytest.approx((40, 40))


TIME, CATEGORY, ARGS, RANK = '"ts": 0.0', '"user_annotation"', '"args": {}', '"rank": 0'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (TIME, '"ts": ' + "1" * 5000, "time of event 0, 'PP:0F0', must be .* got inf"),
        (TIME, '"ts": -' + "1" * 5000, "time of event 0, .* got -inf"),
        (CATEGORY, "[]", r"category of event 0, 'PP:0F0', must be .* got \[\]"),
        (CATEGORY, "{}", r"category of event 0, .* got \{\}"),
        (ARGS, '"args": {"correlation": []}', "correlation of event 0"),
        ("2}}", "2}} x", "it continues after the end of its JSON, at character"),
        ("2}}", "2}}{}", "it continues after the end of its JSON"),
        (RANK, '"rank": -5', "of rank -5 of 2; ranks count from 0"),
        (RANK, '"rank": 7', "of rank 7 of 2"),
    ],
)
def test_damaged_files(tmp_path: Path, old: str, new: str, message: str) -> None:
    """The file is named, and the event."""
    paths = write(tmp_path, GPIPE_1)
    text = paths[0].read_text()
    assert old in text
    paths[0].write_text(text.replace(old, new, 1))
    with pytest.raises(TimelineError, match=r"rank0\.json.*" + message):
        ps.Timeline.from_chrome(paths)


@pytest.mark.parametrize("origin", ["1" + "0" * 400, "1" + "0" * 5000, "-1", "1e400"])
def test_impossible_origins(tmp_path: Path, origin: str) -> None:
    """Nanoseconds that no clock shows."""
    paths = write(tmp_path, GPIPE_1, baseTimeNanoseconds="HERE")
    for path in paths:
        path.write_text(path.read_text().replace('"HERE"', origin))
    with pytest.raises(TimelineError, match=r"rank0\.json: baseTimeNanoseconds must be .* got"):
        ps.Timeline.from_chrome(paths)


def test_a_byte_order_mark(tmp_path: Path) -> None:
    """Editors of some systems put one before UTF-8."""
    paths = write(tmp_path, GPIPE_1)
    paths[0].write_bytes(b"\xef\xbb\xbf" + paths[0].read_bytes())
    assert ps.Timeline.from_chrome(paths).n_devices == 2


def test_bidirectional_runs(tmp_path: Path) -> None:
    """The error names a stage on two ranks, which cannot be imported."""
    timeline = ps.simulate(ps.lower(ps.schedule("chimera", 2, 2)), ps.Costs(1e-3, 2e-3))
    timeline.to_chrome(tmp_path / "t.json")
    with pytest.raises(TimelineError, match=r"on ranks 0 and 1; .*; bidirectional sch.* cannot"):
        ps.Timeline.from_chrome(tmp_path / "t.json", pattern=OURS)


@pytest.mark.parametrize("paths", [None, 5, [None], b"x"])
def test_no_paths(paths: Any) -> None:
    with pytest.raises(ArgumentError, match="traces are given by a path, or several, got"):
        ps.Timeline.from_chrome(paths)


@pytest.mark.parametrize("step", ["x", 0.5, None, True])
def test_no_steps(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ArgumentError, match="step must be a whole number, got"):
        ps.Timeline.from_chrome(write(tmp_path, GPIPE_1), step=step)


def test_no_timeline_and_no_path() -> None:
    """What is no timeline is not replayed, and none is written to what is no path."""
    with pytest.raises(ArgumentError, match=r"timeline must be a pipesim\.Timeline, got None"):
        ps.replay(None)  # type: ignore[arg-type]
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 1, 1)), ps.Costs(1, 2))
    with pytest.raises(ArgumentError, match="written to a path, got None"):
        timeline.to_chrome(None)  # type: ignore[arg-type]


def test_each_name_is_matched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that takes long does so once a name, not once a range."""
    matched: list[str] = []
    compiled = re.compile

    class Counting:
        """A pattern that notes what it is matched against."""

        def __init__(self, pattern: str) -> None:
            self.pattern = compiled(pattern)
            self.groupindex = self.pattern.groupindex

        def fullmatch(self, name: str) -> re.Match[str] | None:
            matched.append(name)
            return self.pattern.fullmatch(name)

    monkeypatch.setattr(re, "compile", Counting)
    others = [event("step", 100 + k, 101 + k) for k in range(50)]
    ps.Timeline.from_chrome(
        one_file(tmp_path, [*ranges("0F0 0B0"), *others]),
        pattern=r"PP:(?P<stage>\d)(?P<op>[FB])(?P<microbatch>\d)",
    )
    assert sorted(matched) == ["PP:0B0", "PP:0F0", "step"]
