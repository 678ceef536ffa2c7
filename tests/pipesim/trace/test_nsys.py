"""Reports of Nsight Systems, made by hand, as timelines."""

from __future__ import annotations

from pathlib import Path

import pytest
from nsys_reports import FIRST, KERNELS, SECOND, report

import pipesim as ps
from pipesim.errors import TimelineError


def compute(timeline: ps.Timeline) -> dict[str, tuple[float, float]]:
    """Return start and end of each forward and backward (us)."""
    frame = timeline.frame[timeline.frame["op"].isin(["F", "B"])]
    return {
        f"{row.stage}{row.op}{row.microbatch}": (
            round(row.start * 1e6, 3), round(row.end * 1e6, 3)
        )
        for row in frame.itertuples()
    }  # fmt: skip


def test_ranges_alone(tmp_path: Path) -> None:
    """Without kernels, tasks have the times of their ranges; clocks are aligned by messages."""
    reports = [report(tmp_path / "0.sqlite", FIRST), report(tmp_path / "1.sqlite", SECOND)]
    traces = ps.trace.nsys_to_chrome(reports, tmp_path / "traces")
    assert [trace.name for trace in traces] == ["0.rank0.json", "1.rank1.json"]
    # Of the 35 - 10 us between the tasks of stage 0, 5 us are messages: half each way.
    assert compute(ps.Timeline.from_chrome(traces)) == {
        "0F0": (0, 10), "1F0": (12.5, 22.5), "1B0": (22.5, 32.5), "0B0": (35, 45)
    }  # fmt: skip


def test_kernels_of_two_processes(tmp_path: Path) -> None:
    """Tasks last from their first kernel to their last; one report has both processes."""
    path = report(tmp_path / "all.sqlite", FIRST + SECOND, KERNELS)
    timeline = ps.Timeline.from_chrome(ps.trace.nsys_to_chrome(path, tmp_path / "traces"))
    # 37 - 12 us between the kernels of stage 0, 19 us of which stage 1 takes.
    assert compute(timeline) == {"0F0": (0, 10), "1F0": (13, 22), "1B0": (24, 32), "0B0": (35, 45)}


def test_refused_files(tmp_path: Path) -> None:
    """Errors say how to record or convert."""
    (tmp_path / "report.nsys-rep").write_bytes(b"something else")
    with pytest.raises(TimelineError, match="nsys export --type sqlite"):
        ps.trace.nsys_to_chrome(tmp_path / "report.nsys-rep", tmp_path)
    with pytest.raises(TimelineError, match="no NVTX ranges"):
        ps.trace.nsys_to_chrome(report(tmp_path / "empty.sqlite", []), tmp_path)
    cut = report(tmp_path / "cut.sqlite", FIRST).read_bytes()[:5000]
    (tmp_path / "cut.sqlite").write_bytes(cut)
    with pytest.raises(TimelineError, match="export it again"):
        ps.trace.nsys_to_chrome(tmp_path / "cut.sqlite", tmp_path)
